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
# Newton-Schulz in fp32: its bf16 form turns differences of the last bit into differences of a percent.
short=(--set compute=fp32 --set optimizer.muon.bf16=false --set stages.0.tokens=40960 --set stages.1.tokens=2048 --set stages.2.tokens=4096
  --set log.every_steps=5)
# Twenty steps of 2,048 tokens; the two other stages get one step each, which is not compared.
for device in cpu cuda; do
  "$bin/furlong" train configs/demo.toml --out "$work/$device" --set "device=$device" "${short[@]}"
done
"$bin/sync_bench" configs/model/nano.toml | tee "$work/sync.json"
python3 - "$work" "$out" "$(git rev-parse --verify -q HEAD || echo unknown)" <<'PY'
import json, re, subprocess, sys
work, out, commit = sys.argv[1:]
passed, failed, unknown = map(int, re.findall(r"\d+", open(f"{work}/golden.log").read().splitlines()[-1]))
losses = {d: [json.loads(line)["loss"] for line in open(f"{work}/{d}/metrics.jsonl")][:20] for d in ("cpu", "cuda")}
worst = max(abs(a - b) for a, b in zip(losses["cpu"], losses["cuda"]))
sync = json.load(open(f"{work}/sync.json"))
gpu = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()
result = {"command": "bash bench/gpu/spine.sh", "commit": commit, "machine": gpu, "golden_passed": passed,
          "golden_failed": failed, "golden_unknown": unknown, "steps": 20, "worst_loss_difference": worst,
          "losses_cpu": losses["cpu"], "losses_cuda": losses["cuda"],
          "host_waits": {k: sync[k] for k in ("forward", "loss", "backward", "whole_step")}}
json.dump(result, open(out, "w"), indent=1)
print(json.dumps({k: v for k, v in result.items() if not k.startswith("losses")}))
PY
