"""KDA on one GPU: Furlong's operators and flash-linear-attention (FLA) 0.6.0 in one process, on the same tensors.

    python bench/peers/fla_kda.py OUT.json [--sides ours,fla] [--commit HASH] [--kernels HASH]
                                           [--points forward,short,training,decode,error,gradient_error]

Both sides are called with the same arguments: gate, L2 norm and beta's sigmoid inside the kernel, safe_gate, lower
bound -5, bf16 inputs (the gate's input too), final state out. FLA runs its Triton kernels and no other backend
(FLA_FLASH_KDA=0, FLA_TILELANG=0). Needs fla-core 0.6.0 and einops beside torch; nothing of FLA is copied here.

OUT.json holds every sample in milliseconds, between CUDA events: forward and training as rows of calls, decode and
short inputs replayed from CUDA graphs. Peak memory is that of torch, inputs included. Most of a run is FLA tuning (25 s a
shape on 16 cores); with a kept TRITON_CACHE_DIR it is done once.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["FLA_FLASH_KDA"] = "0"
os.environ["FLA_TILELANG"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import torch

K = V = 128
LOWER_BOUND = -5.0
RAGGED = [1024, 1000, 1048, 17, 2031, 1023, 1025, 1024]  # sums to 8192
SAMPLES = 15
ERROR_TOKENS, ERROR_HEADS = 384, 32  # heads of a shape that is timed anyway: tuning takes FLA most of its time
ERROR_SEEDS = range(3, 7)  # the error of d_A_log alone is that of 32 numbers: several draws are pooled
ERROR_KINDS = (
    "gaussian",
    "gate open",
    "gate at zero",
    "gate at the bound",
    "mixed gates",
    "repeated keys",
    "outliers",
)
FORWARD = {
    "T 8192 H 96": ([8192], 96),
    "T 8192 H 32": ([8192], 32),
    "T 65536 H 32": ([65536], 32),
    "8 ragged of 8192 H 96": (RAGGED, 96),
    "T 131072 H 8": ([131072], 8),
}
# Compared with another of our own times; FLA would tune its kernels once more.
OURS_ONLY = {"8 ragged of 8192 H 96"}
SHORT = {f"T {t} H 32": ([t], 32) for t in (1, 2, 16, 64, 128, 256, 512)}
TRAINING = {"T 8192 H 96": ([8192], 96), "T 8192 H 32": ([8192], 32), "T 65536 H 32": ([65536], 32)}
DECODE = {"32 x 96": (32, 96), "128 x 32": (128, 32), "1 x 96": (1, 96)}


def make_inputs(tokens: int, heads: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)

    return {
        "q": normal(1, tokens, heads, K),
        "k": normal(1, tokens, heads, K),
        "v": normal(1, tokens, heads, V),
        "g": normal(1, tokens, heads, K),
        "beta": normal(1, tokens, heads),
        "A_log": 0.3 * normal(heads, dtype=torch.float32),
        "dt_bias": normal(heads * K, dtype=torch.float32) - 2,
    }


FUSED = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "lower_bound": LOWER_BOUND,
    "output_final_state": True,
}


def offsets_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Arguments for packed sequences; none for a single one."""
    if len(lengths) == 1:
        return {}
    host = torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
    return {"cu_seqlens": host.cuda(), "cu_seqlens_cpu": host}


def sample_ms(call, samples: int = SAMPLES, warm_up: int = 3) -> list[float]:
    """Milliseconds of a call. A sample is a row of calls of some 3 ms: the host's launches hide behind the work."""
    times, calls = [], 1
    for i in range(warm_up + samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        ms = begin.elapsed_time(end) / calls
        if i >= warm_up:
            times.append(ms)
        elif i == warm_up - 1:
            calls = max(1, min(32, round(3 / ms)))
    return times


def copy_bandwidth() -> dict[str, float]:
    """TB/s, read + written, of a device copy of 2 GiB."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    ms = statistics.median(sample_ms(lambda: target.copy_(source)))
    return {"tb_per_s": 2 * source.numel() * 4 / ms / 1e9, "ms": ms, "bytes": 2 * source.numel() * 4}


def flops(tokens: int, heads: int) -> float:
    """6 T d^2 + 3 T C d + T C^2 a head at C = 64, whatever chunk a kernel uses."""
    return heads * tokens * (6.0 * K * K + 3 * 64 * K + 64 * 64)


def forward_bytes(tokens: int, heads: int, sequences: int) -> float:
    """q, k, v, gate and out in bf16 once, beta, final states in fp32."""
    return heads * (tokens * (5 * K + 1) * 2.0 + sequences * K * V * 4)


def measure_forward(functions, cases: dict, result: dict) -> None:
    for name, (lengths, heads) in cases.items():
        tokens = sum(lengths)
        inputs, packed = make_inputs(tokens, heads), offsets_of(lengths)
        entry = {"flops": flops(tokens, heads), "bytes": forward_bytes(tokens, heads, len(lengths)), "ms": {}}
        for side, (chunk, _) in functions.items():
            if side == "fla" and name in OURS_ONLY:
                continue
            with torch.no_grad():
                entry["ms"][side] = sample_ms(lambda: chunk(**inputs, **packed, **FUSED, safe_gate=True))
        result[name] = entry
        print_entry(name, entry)


def measure_training(functions, result: dict) -> None:
    for name, (lengths, heads) in TRAINING.items():
        inputs = make_inputs(sum(lengths), heads)
        for leaf in inputs.values():
            leaf.requires_grad_()
        d_out = torch.randn_like(inputs["v"])
        entry = {"flops": 3 * flops(sum(lengths), heads), "ms": {}, "peak_bytes": {}, "input_bytes": 0}
        entry["input_bytes"] = sum(x.numel() * x.element_size() for x in [*inputs.values(), d_out])
        for side, (chunk, _) in functions.items():

            def step():
                for leaf in inputs.values():
                    leaf.grad = None
                chunk(**inputs, **FUSED, safe_gate=True)[0].backward(d_out)

            step()  # compilation and tuning stay out of the peak
            for leaf in inputs.values():
                leaf.grad = None
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            entry["ms"][side] = sample_ms(step)
            entry["peak_bytes"][side] = torch.cuda.max_memory_allocated()
        result[name] = entry
        print_entry(name, entry)


def replay_ms(steps) -> list[float]:
    """Milliseconds of one step when all of them are replayed from one graph: the host does not count."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warm-up beside the capture's stream, as capturing asks for
        for step in steps[:3]:
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return [ms / len(steps) for ms in sample_ms(graph.replay)]


def measure_short(functions, result: dict) -> None:
    """Forward of short inputs, replayed: at these lengths eager calls measure the host."""
    for name, (lengths, heads) in SHORT.items():
        inputs = make_inputs(sum(lengths), heads)
        entry = {"bytes": forward_bytes(sum(lengths), heads, 1), "ms": {}}
        for side, (chunk, _) in functions.items():
            with torch.no_grad():
                entry["ms"][side] = replay_ms([lambda: chunk(**inputs, **FUSED, safe_gate=True)] * 8)
        result[name] = entry
        print_entry(name, entry)


def measure_decode(functions, result: dict) -> None:
    """Steps in place, replayed: several states of one sequence, so that they are not in cache; else two rounds."""
    for name, (sequences, heads) in DECODE.items():
        inputs = make_inputs(sequences, heads)
        inputs = {key: x.transpose(0, 1).contiguous() if x.dim() > 2 else x for key, x in inputs.items()}
        pools = 2 if sequences > 1 else 32
        states = torch.randn(pools, sequences, heads, K, V, device="cuda") * 0.1
        entry = {"bytes": 2.0 * sequences * heads * K * V * 4, "ms": {}}
        for side, (_, make_step) in functions.items():
            steps = [make_step(inputs, states[i]) for i in range(pools)]
            with torch.no_grad():
                entry["ms"][side] = replay_ms(steps)
        result[name] = entry
        print_entry(name, entry)


def reference(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence token by token in fp64 on the bf16 inputs, differentiable."""
    x = {key: value.double() for key, value in inputs.items()}
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (x["q"][0], x["k"][0]))
    a = x["A_log"].exp()[:, None]
    decay = (LOWER_BOUND * (a * (x["g"][0] + x["dt_bias"].view(-1, K))).sigmoid()).exp()
    beta, v = x["beta"][0].sigmoid(), x["v"][0]
    state = torch.zeros(q.shape[1], K, V, dtype=torch.double, device="cuda")
    out = []
    for t in range(q.shape[0]):
        state = state * decay[t][:, :, None]
        write = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * write[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * K**-0.5)
    return torch.stack(out)[None], state[None]


def hard_inputs(kind: str, tokens: int, heads: int, seed: int) -> dict[str, torch.Tensor]:
    inputs = make_inputs(tokens, heads, seed)
    if kind == "gate open":  # long memory: what is written stays
        inputs["g"] = inputs["g"] - 8
    elif kind == "gate at zero":  # nothing at all is forgotten
        inputs["g"] = torch.full_like(inputs["g"], -1000)
    elif kind == "gate at the bound":
        inputs["g"] = inputs["g"] + 8
    elif kind == "mixed gates":  # neighbouring channels remember everything and nothing
        inputs["g"] = torch.where(inputs["g"] > 0, 10.0, -10.0).to(torch.bfloat16)
    elif kind == "repeated keys":  # few directions, beta near 1: large entries of (I + A)^-1
        inputs["k"] = inputs["k"][:, :4].repeat(1, tokens // 4, 1, 1)
        inputs["beta"] = inputs["beta"] + 4
        inputs["g"] = inputs["g"] - 8
    elif kind == "outliers":  # one value in 64 is 100 times as large
        generator = torch.Generator("cuda").manual_seed(1000 + seed)
        large = torch.rand(inputs["v"].shape, generator=generator, device="cuda") < 1 / 64
        inputs["v"] = torch.where(large, 100 * inputs["v"], inputs["v"])
    return inputs


class Pool:
    """Root-mean-square error over the root mean square of what is exact, over all that was added."""

    def __init__(self) -> None:
        self.error = self.size = 0.0

    def add(self, got: torch.Tensor, exact: torch.Tensor) -> None:
        exact = exact.detach()
        self.error += float((got.detach().double() - exact).square().sum())
        self.size += float(exact.square().sum())

    def value(self) -> float:
        """Infinite where something is not finite, so that the result stays JSON that others read."""
        return (self.error / max(self.size, 1e-300)) ** 0.5 if math.isfinite(self.error) else 1e300


def forward_errors(functions, inputs: dict, pools: dict) -> None:
    with torch.no_grad():
        out, state = reference(inputs)
        for side, (chunk, _) in functions.items():
            got, got_state = chunk(**inputs, **FUSED, safe_gate=True)
            pools[side]["out"].add(got, out)
            pools[side]["final_state"].add(got_state, state)


def gradient_errors(functions, inputs: dict, pools: dict) -> None:
    exact = {key: x.double().requires_grad_() for key, x in inputs.items()}
    out, state = reference(exact)
    generator = torch.Generator("cuda").manual_seed(100)
    d_out, d_state = (torch.randn(x.shape, generator=generator, device="cuda") for x in (out, state))
    d_out = d_out.bfloat16()
    gradients = torch.autograd.grad((out * d_out).sum() + (state * d_state).sum(), list(exact.values()))
    for side, (chunk, _) in functions.items():
        mine = {key: x.detach().clone().requires_grad_() for key, x in inputs.items()}
        results = chunk(**mine, **FUSED, safe_gate=True)
        got = torch.autograd.grad(results, list(mine.values()), [d_out, d_state])
        for leaf, g, e in zip(inputs, got, gradients, strict=True):
            pools[side][f"d_{leaf}"].add(g, e)


def measure_error(functions, measure, result: dict) -> None:
    """Root-mean-square errors over the root mean square of the fp64 result, for every kind of input."""
    for kind in ERROR_KINDS:
        pools = {side: collections.defaultdict(Pool) for side in functions}
        for seed in ERROR_SEEDS:
            measure(functions, hard_inputs(kind, ERROR_TOKENS, ERROR_HEADS, seed), pools)
        result[kind] = {side: {name: pool.value() for name, pool in named.items()} for side, named in pools.items()}
        for side, errors in result[kind].items():
            print(f"{kind}, {side}: {', '.join(f'{name} {e:.2e}' for name, e in errors.items())}", flush=True)


def print_entry(name: str, entry: dict) -> None:
    medians = {side: statistics.median(ms) for side, ms in entry["ms"].items()}
    parts = [f"{side} {ms:.4f} ms" for side, ms in medians.items()]
    if "ours" in medians and "fla" in medians:
        parts.append(f"ratio {medians['ours'] / medians['fla']:.3f}")
    if "ours" in medians and "bytes" in entry:
        parts.append(f"{entry['bytes'] / medians['ours'] / 1e9:.2f} TB/s")
    if "ours" in medians and "flops" in entry:
        parts.append(f"{entry['flops'] / medians['ours'] / 1e9:.0f} TFLOP/s")
    for side, peak in entry.get("peak_bytes", {}).items():
        parts.append(f"{side} peak {peak / 1e9:.2f} GB")
    print(f"{name}: {', '.join(parts)}", flush=True)


def compile_in_parallel() -> None:
    """FLA tunes its kernels over some 170 configurations a shape: all cores compile them before they are timed."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def prune_and_compile(self, kwargs, *rest):
        configs = prune(self, kwargs, *rest)
        arguments = list(self.nargs.values())

        def compile_one(config):
            try:
                self.fn.run(*arguments, **{**kwargs, **config.all_kwargs(), "warmup": True})
            except Exception:  # the tuner meets it again and drops the configuration
                pass

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, configs))
        return configs

    Autotuner.prune_configs = prune_and_compile


def fla_functions():
    compile_in_parallel()
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    fused = {key: value for key, value in FUSED.items() if key != "output_final_state"}

    def make_step(inputs, state):
        return lambda: fused_recurrent_kda_fwd(**inputs, **fused, initial_state=state, inplace_final_state=True)

    return chunk_kda, make_step


def our_functions():
    import furlong_ops

    furlong_ops.load()

    def make_step(inputs, state):
        rows = {key: x.squeeze(1) if x.dim() > 2 else x for key, x in inputs.items()}
        slots = torch.arange(state.shape[0], device="cuda")
        return lambda: furlong_ops.kda_step_fused_(state, lower_bound=LOWER_BOUND, slots=slots, **rows)

    return furlong_ops.chunk_kda, make_step


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--sides", default="ours,fla")
    parser.add_argument("--points", default="forward,short,training,decode,error,gradient_error")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--kernels", default="unknown")
    options = parser.parse_args()
    begin = time.monotonic()
    if not torch.cuda.is_available():
        print("fla_kda: SKIP: no CUDA device")
        return 0
    functions = {}
    for side in options.sides.split(","):
        functions[side] = {"ours": our_functions, "fla": fla_functions}[side]()
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    result = {"command": "bash bench/gpu/kda.sh", "commit": options.commit, "kernels": options.kernels, "machine": gpu}
    result |= {"torch": torch.__version__, "copy": copy_bandwidth()}
    print(f"copy {result['copy']['tb_per_s']:.3f} TB/s", flush=True)
    measures = {
        "forward": lambda into: measure_forward(functions, FORWARD, into),
        "short": lambda into: measure_short(functions, into),
        "training": lambda into: measure_training(functions, into),
        "decode": lambda into: measure_decode(functions, into),
        "error": lambda into: measure_error(functions, forward_errors, into),
        "gradient_error": lambda into: measure_error(functions, gradient_errors, into),
    }
    for point in filter(None, options.points.split(",")):
        print(f"-- {point} at {time.monotonic() - begin:.0f} s", flush=True)
        measures[point](result.setdefault(point, {}))
        torch.cuda.empty_cache()
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
