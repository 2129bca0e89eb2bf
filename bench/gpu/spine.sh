#!/usr/bin/env bash
# The spine on a GPU (preset cuda): golden vectors on CUDA tensors, 20 training steps of nano on GPU and CPU, host waits
# of one step. Prints the log and writes one JSON file.
#
#   bash bench/gpu/spine.sh OUT.json [BIN_FOLDER]      BIN_FOLDER: build/cuda/bin by default
#
# Needs the demo's token shards in out/demo/data (runs/demo.sh makes them).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$1
bin=${2:-build/cuda/bin}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$bin/golden_test" --dir tests/golden --device cuda >"$work/golden.log" || true
tail -n 1 "$work/golden.log"
# Newton-Schulz in fp32: its bf16 form turns differences of the last bit into differences of a percent. 35 steps of 2,048
# tokens (the two later stages get one each) are the demo's own warm-up, step for step; the first twenty are compared.
short=(--set compute=fp32 --set optimizer.muon.bf16=false --set stages.0.tokens=67584 --set stages.1.tokens=2048
  --set stages.2.tokens=4096 --set schedule.warmup_ratio=1.0 --set log.every_steps=5)
train() { "$bin/furlong" train configs/demo.toml --out "$work/$1" --set "device=$2" "${short[@]}"; }
train cpu cpu
train cuda cuda
# What rounding alone does: the same steps on the CPU with the library held to another instruction set.
MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 train cpu_avx2 cpu
"$bin/sync_bench" configs/model/nano.toml | tee "$work/sync.json"
python3 - "$work" "$out" "${FURLONG_COMMIT:-$(git rev-parse --verify -q HEAD || echo unknown)}" <<'PY'
import json, re, subprocess, sys
work, out, commit = sys.argv[1:]
passed, failed, unknown = map(int, re.findall(r"\d+", open(f"{work}/golden.log").read().splitlines()[-1]))
losses = {d: [json.loads(line)["loss"] for line in open(f"{work}/{d}/metrics.jsonl")][:20] for d in ("cpu", "cuda", "cpu_avx2")}
worst = lambda other: max(abs(a - b) for a, b in zip(losses["cpu"], losses[other]))
sync = json.load(open(f"{work}/sync.json"))
gpu = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()
result = {"command": "bash bench/gpu/spine.sh", "commit": commit, "machine": gpu, "golden_passed": passed,
          "golden_failed": failed, "golden_unknown": unknown, "steps": 20, "worst_loss_difference": worst("cuda"), "worst_loss_difference_cpu_avx2": worst("cpu_avx2"),
          "losses_cpu": losses["cpu"], "losses_cuda": losses["cuda"],
          "host_waits": {k: sync[k] for k in ("forward", "loss", "backward", "whole_step")}}
json.dump(result, open(out, "w"), indent=1)
print(json.dumps({k: v for k, v in result.items() if not k.startswith("losses")}))
PY
