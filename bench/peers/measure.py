"""What the peers share: arguments, the optimizer, the clock, and one JSON line of output."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable

import torch

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 2048, 256, 8, 4, 64
ROWS, CONTEXT = 16, 256


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast over fp32 weights")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one untimed")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    return parser


def make_optimizers(model: torch.nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers and AdamW for the rest, or AdamW for everything."""
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if kind == "muon" and parameter.ndim == 2 and "embed" not in name and "head" not in name
    ]
    chosen = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.1, fused=True)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def measure(
    name: str,
    options: argparse.Namespace,
    model: torch.nn.Module,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    extra: dict[str, float],
) -> None:
    """Times forward + backward + optimizer step on random rows and prints one JSON line. The median step counts."""
    if options.threads:
        torch.set_num_threads(options.threads)
    optimizers = make_optimizers(model, options.optimizer)
    generator = torch.Generator().manual_seed(1)
    seconds, loss = [], torch.tensor(0.0)
    for _ in range(options.steps + 1):
        tokens = torch.randint(VOCAB_SIZE, (ROWS, CONTEXT + 1), generator=generator)
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = loss_of(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begin)
    result = {
        "peer": name,
        "dtype": options.dtype,
        "optimizer": options.optimizer,
        "threads": torch.get_num_threads(),
        "tokens_per_step": ROWS * CONTEXT,
        "tokens_per_s": ROWS * CONTEXT / statistics.median(seconds[1:]),
        "seconds": seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loss": loss.item(),
        **extra,
    }
    print(json.dumps(result))
