"""tiktoken's time for encoding and decoding texts: tokenizer_tiktoken.py TOKENIZER FILE..., one JSON line a file.

One thread, the least of several runs. Of its two ways to return ids, a list and a numpy array, the faster counts. Text is
cut after 400,000 characters, as the published tokenizer does it; its rule for long runs is left out, which favours tiktoken.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tiktoken

RUNS = 5
PIECE = 400_000
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*" + CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def least_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(encoding: tiktoken.Encoding, path: str) -> dict[str, object]:
    text = Path(path).read_bytes().decode()

    def pieces() -> list[str]:
        return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]

    def as_list() -> list[int]:
        return [token for piece in pieces() for token in encoding.encode_ordinary(piece)]

    def as_array() -> np.ndarray:
        return np.concatenate([encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces()])

    ids = as_list()
    return {
        "file": path,
        "bytes": len(text.encode()),
        "tokens": len(ids),
        "encode_s": min(least_seconds(as_list), least_seconds(as_array)),
        "decode_s": least_seconds(lambda: encoding.decode_bytes(ids)),
        "ids_sha256": hashlib.sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest(),
    }


def main() -> None:
    # Not by tiktoken.load: it keeps files by their path and would give yesterday's ranks.
    lines = (line.split() for line in (Path(sys.argv[1]) / "tiktoken.model").read_text(encoding="ascii").splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    encoding = tiktoken.Encoding("furlong", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for path in sys.argv[2:]:
        print(json.dumps(measure(encoding, path)), flush=True)


if __name__ == "__main__":
    main()
