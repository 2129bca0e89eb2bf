"""The figures of bench/peers/kda_cpu.sh against acceptance point 4.

    kda_cpu_points.py SAMPLES_FOLDER OUT.json

Reads NAME-ROUND.json files of samples in seconds, writes all of them with commit and machine to OUT.json, prints a line a
figure and ends with PASS or FAIL in one line.
"""

import json
import pathlib
import re
import subprocess
import sys
from datetime import datetime, timezone


def load(folder: pathlib.Path) -> dict[str, dict[str, list[float]]]:
    """{program: {what: samples of all rounds}}."""
    merged: dict[str, dict[str, list[float]]] = {}
    for path in sorted(folder.glob("*.json")):
        program = merged.setdefault(re.sub(r"-\d+$", "", path.stem), {})
        for what, values in json.loads(path.read_text()).items():
            program.setdefault(what, []).extend(values)
    return merged


def best(program: dict[str, list[float]], what: str) -> float:
    return min(program[what])


def chunk_flops(tokens: int, heads: int, size: int, chunk: int = 64) -> float:
    return heads * tokens * (6 * size**2 + 3 * chunk * size + chunk**2)


def points(samples: dict) -> list[tuple[str, float, float, str]]:
    """(what, figure, least allowed, how it comes about)."""
    ours, decode, threads = samples["forward"], samples["decode"], samples["threads"]
    forward, training, product = (best(ours, what) for what in ("forward", "training", "sgemm_1024"))
    ggml, naive = best(samples["ggml"], "4096"), best(samples["naive"], "naive_chunk_16")
    rate, sgemm = chunk_flops(4096, 8, 128) / forward / 1e9, 2 * 1024**3 / product / 1e9
    short = {int(t): min(v) / best(samples["short"], t) for t, v in samples["ggml_short"].items()}
    worst = min(short, key=short.get)
    state = 2 * 512 * 32 * 128 * 128 * 4 / 1e9
    step, scale = best(decode, "step"), best(decode, "scale")
    one, two = best(threads, "forward_1"), best(threads, "forward_2")
    return [
        ("ggml / forward", ggml / forward, 4.0, f"{ggml * 1e3:.1f} / {forward * 1e3:.1f} ms"),
        ("naive_chunk_kda / forward", naive / forward, 12.0, f"{naive * 1e3:.0f} / {forward * 1e3:.1f} ms"),
        ("forward / sgemm", rate / sgemm, 0.5, f"{rate:.0f} / {sgemm:.0f} GFLOP/s"),
        ("3.5 forward / (forward + backward)", 3.5 * forward / training, 1.0,
         f"{training * 1e3:.1f} ms, {training / forward:.2f} forwards"),
        ("ggml / ours, worst of T 1..64", short[worst], 1.0,
         f"T {worst}; T 1 {short[1]:.1f}, T 16 {short[16]:.1f}, T 64 {short[64]:.1f}"),
        ("decode / in-place scale", scale / step, 0.8, f"{state / step:.1f} / {state / scale:.1f} GB/s"),
        ("1 to 2 threads, one head", one / two, 1.8,
         f"{one * 1e3:.1f} to {two * 1e3:.1f} ms; with gradient {best(threads, 'training_1') / best(threads, 'training_2'):.2f}"),
    ]  # fmt: skip


def main() -> int:
    samples = load(pathlib.Path(sys.argv[1]))
    run = lambda *command: subprocess.run(command, capture_output=True, text=True).stdout.strip()
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    rows = points(samples)
    document = {
        "command": "bash bench/peers/kda_cpu.sh",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": run("git", "rev-parse", "HEAD"),
        "changed_files": run("git", "status", "--porcelain", "-uno").splitlines(),
        "machine": {"cpu": model.group(1) if model else "unknown", "cores": int(run("nproc"))},
        "statistic": "smallest of all samples; programs in turn",
        "figures": {what: {"figure": figure, "least": least, "text": text} for what, figure, least, text in rows},
        "seconds": samples,
    }
    out = re.sub(r"(?<=[\d]),\n\s+(?=[\d-])", ", ", json.dumps(document, indent=1))
    pathlib.Path(sys.argv[2]).write_text(out + "\n")
    verdict = "PASS"
    for what, figure, least, text in rows:
        if figure < least:
            verdict = "FAIL"
        print(f"{'ok  ' if figure >= least else 'MISS'} {what}: {figure:.2f} (at least {least:g}): {text}")
    print(f"{verdict} " + "; ".join(f"{what} {figure:.2f} ({text})" for what, figure, _, text in rows))
    return verdict == "FAIL"


sys.exit(main())
