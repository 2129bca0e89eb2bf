"""Runs tokenizer_bench and tokenizer_tiktoken.py in turn and compares: tokenizer_points.py WORK [OUT.json].

WORK holds prose.txt and code.txt. Called by tokenizer_speed.sh.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROUNDS = 3
AIM = 1.0  # times tiktoken's speed
VOCABULARY = 32768
BIN = Path("build/cpu/bin")
HERE = Path(__file__).resolve().parent


def han_text(characters: int) -> str:
    """Words of 2 to 12 Han characters, a few of them frequent, between punctuation, Latin and digits."""
    source = random.Random(1)
    parts = []
    while characters > 0:
        length = source.randint(2, 12)
        parts += [chr(0x4E00 + min(int(source.paretovariate(0.6) * 3), 20900)) for _ in range(length)]
        parts.append(source.choice(["，", "。", "、", "。\n\n", "：", " Kimi ", " 2026", "！"]))
        characters -= length
    return "".join(parts)


def measured(command: list[str]) -> list[dict]:
    one_thread = {**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread).stdout
    return [json.loads(line) for line in output.splitlines()]


def least(rounds: list[list[dict]]) -> list[dict]:
    """The best time of all rounds for each text."""
    return [
        {**runs[0], **{key: min(run[key] for run in runs) for key in ("encode_s", "decode_s")}}
        for runs in zip(*rounds, strict=True)
    ]


def compare(name: str, ours: dict, theirs: dict) -> dict:
    point = {"text": name, "bytes": ours["bytes"], "tokens": ours["tokens"]}
    for what in ("encode", "decode"):
        point[f"{what}_MB_s"] = round(ours["bytes"] / ours[f"{what}_s"] / 1e6, 1)
        point[f"{what}_MB_s_tiktoken"] = round(ours["bytes"] / theirs[f"{what}_s"] / 1e6, 1)
        point[f"{what}_ratio"] = round(theirs[f"{what}_s"] / ours[f"{what}_s"], 2)
    point["same_ids"] = ours["ids_sha256"] == theirs["ids_sha256"]
    point["pass"] = point["same_ids"] and min(point["encode_ratio"], point["decode_ratio"]) >= AIM
    return point


def main() -> int:
    work = Path(sys.argv[1])
    (work / "han.txt").write_text(han_text(400_000), encoding="utf-8")
    names = ["prose", "code", "han"]
    texts = [str(work / f"{name}.txt") for name in names]
    tokenizer = str(work / "tokenizer")
    train = [str(BIN / "furlong"), "tokenizer", "train", *texts, "--vocab", str(VOCABULARY), "--out", tokenizer]
    subprocess.run(train, check=True)
    ours, theirs = [], []
    for _ in range(ROUNDS):  # in turn, so that other load meets both
        ours.append(measured([str(BIN / "tokenizer_bench"), tokenizer, *texts]))
        theirs.append(measured([sys.executable, str(HERE / "tokenizer_tiktoken.py"), tokenizer, *texts]))
    points = [compare(*point) for point in zip(names, least(ours), least(theirs), strict=True)]
    for point in points:
        print(
            f"{'PASS' if point['pass'] else 'FAIL'} {point['text']:5s} "
            f"encode {point['encode_MB_s']} MB/s, {point['encode_ratio']} times tiktoken; "
            f"decode {point['decode_MB_s']} MB/s, {point['decode_ratio']} times; "
            f"ids {'equal' if point['same_ids'] else 'DIFFER'}"
        )
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")
    return 0 if all(point["pass"] for point in points) else 1


if __name__ == "__main__":
    sys.exit(main())
