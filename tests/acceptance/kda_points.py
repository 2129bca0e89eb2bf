"""One GPU point of tests/acceptance/kda.sh: prints figures of a result of bench/gpu/kda.sh; exit code 1 if one fails.

python3 tests/acceptance/kda_points.py RESULT.json KERNEL_HASH forward|training|decode|error|checkers
"""

from __future__ import annotations

import json
import re
import statistics
import sys

# At most this share of FLA's time.
FORWARD = {"T 8192 H 96": 0.26, "T 8192 H 32": 0.35, "T 65536 H 32": 0.33, "T 131072 H 8": 0.2}
TRAINING = {"T 8192 H 96": 0.4, "T 65536 H 32": 0.4}
TRAINING_PEAK = 0.5
DECODE_SHARE = {"32 x 96": 0.85, "128 x 32": 0.85}  # of the copy bandwidth
DECODE_ONE_MS = 0.012
# Ragged packs against one sequence of as many tokens: no slower, within what two runs of the same differ by.
NOISE = 1.02
# Ours of FLA's root-mean-square error, of each output and gradient, for each kind of input.
ERROR_SHARE = 1.0
ERROR_KINDS = (
    "gaussian",
    "gate open",
    "gate at zero",
    "gate at the bound",
    "mixed gates",
    "repeated keys",
    "outliers",
)
ERROR_PARTS = {
    "error": ("out", "final_state"),
    "gradient_error": ("d_q", "d_k", "d_v", "d_g", "d_beta", "d_A_log", "d_dt_bias"),
}
PROGRAMS = (
    "kda_cuda_forward_test",
    "kda_cuda_backward_test",
    "kda_cuda_step_test",
    "kda_cuda_gate_test",
    "short_conv_cuda_conv_test",
)
CHECKERS = {"memcheck": r"\b0 errors", "initcheck": r"\b0 errors", "racecheck": r"\b0 hazards"}


def median(entry: dict, side: str = "ours") -> float:
    return statistics.median(entry["ms"][side])


class Report:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.good = True

    def add(self, name: str, text: str, good: bool) -> None:
        self.parts.append(f"{name}: {text}{'' if good else ' (fails)'}")
        self.good &= good


def ratios(report: Report, part: dict, limits: dict[str, float]) -> None:
    for name, limit in limits.items():
        if name not in part:
            report.add(name, "not measured", False)
            continue
        if "fla" not in part[name]["ms"]:
            report.add(name, f"{median(part[name]):.3f} ms, FLA not measured in this run", False)
            continue
        ours, fla = median(part[name]), median(part[name], "fla")
        report.add(name, f"{ours:.3f} / {fla:.3f} ms = {ours / fla:.3f} of {limit}", ours <= limit * fla)


def forward(report: Report, result: dict) -> None:
    part = result["forward"]
    ratios(report, part, FORWARD)
    ragged, whole = median(part["8 ragged of 8192 H 96"]), median(part["T 8192 H 96"])
    report.add("8 ragged", f"{ragged:.3f} ms beside {whole:.3f}", ragged <= NOISE * whole)


def training(report: Report, result: dict) -> None:
    part = result["training"]
    ratios(report, part, TRAINING)
    for name in TRAINING:
        if "fla" in part.get(name, {}).get("peak_bytes", {}):
            ours, fla = part[name]["peak_bytes"]["ours"], part[name]["peak_bytes"]["fla"]
            report.add(f"peak {name}", f"{ours / 1e9:.2f} / {fla / 1e9:.2f} GB", ours <= TRAINING_PEAK * fla)


def decode(report: Report, result: dict) -> None:
    copy = result["copy"]["tb_per_s"]
    for name, limit in DECODE_SHARE.items():
        entry = result["decode"][name]
        share = entry["bytes"] / median(entry) / 1e9 / copy
        report.add(name, f"{median(entry):.4f} ms, {share:.3f} of the copy's {copy:.2f} TB/s", share >= limit)
    one = median(result["decode"]["1 x 96"])
    report.add("1 x 96", f"{1000 * one:.2f} us", one < DECODE_ONE_MS)


def error(report: Report, result: dict) -> None:
    for measure, parts in ERROR_PARTS.items():
        for kind in ERROR_KINDS:
            entry = result.get(measure, {}).get(kind, {})
            if any(part not in entry.get(side, {}) for side in ("ours", "fla") for part in parts):
                report.add(f"{measure}, {kind}", "not measured for both sides in this run", False)
                continue
            pairs = {part: (entry["ours"][part], entry["fla"][part]) for part in parts}
            worse = [part for part, (a, b) in pairs.items() if not (a < 1 and a <= ERROR_SHARE * b)]
            shown = worse or parts[:1]
            text = "; ".join(f"{part} {pairs[part][0]:.2e}, FLA's {pairs[part][1]:.2e}" for part in shown)
            report.add(f"{measure}, {kind}", text, not worse)
    for name in PROGRAMS:
        text = result.get("tests", {}).get(name, "not run")
        report.add(name, text, re.fullmatch(r"[1-9]\d* passed, 0 failed", text) is not None)


def checkers(report: Report, result: dict) -> None:
    """A program that timed out or ended with another status than 0 says so instead of the checker's summary."""
    for name in PROGRAMS:
        for checker, clean in CHECKERS.items():
            text = result.get("tests", {}).get(f"{checker} {name}", "not run").strip("= ")
            good = text.startswith("SKIP") or (
                re.search(clean, text) is not None and not text.startswith(("exit status", "timed out"))
            )
            report.add(f"{checker} {name}", text, good)


def main() -> int:
    path, kernels, part = sys.argv[1:]
    with open(path) as file:
        result = json.load(file)
    report = Report()
    if result["kernels"] != kernels:
        report.add("kernels", f"measured {result['kernels']}, the tree has {kernels}: run bench/gpu/kda.sh", False)
    parts = {"forward": forward, "training": training, "decode": decode, "error": error, "checkers": checkers}
    parts[part](report, result)
    print(f"{path}: " + ", ".join(report.parts))
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
