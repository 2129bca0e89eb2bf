#!/usr/bin/env bash
# KDA on a GPU: torch-free tests of the kernels, then Furlong and FLA 0.6.0 in one process on the same tensors. One JSON file.
#
#   bash bench/gpu/kda.sh OUT.json [COMMIT]
#
#   FURLONG_BIN            folder of the test programs, build/cuda/bin by default
#   FURLONG_OPS_LIBRARY    the operator library, build/cuda/lib/libfurlong_ops.so by default
#   PYTHON                 an interpreter with a CUDA torch, fla-core 0.6.0 and einops; python3 by default
#   KDA_POINTS             parts of bench/peers/fla_kda.py to run, all by default
#
# COMMIT: for a machine without git. The file also holds the hash of the kernel sources (tools/kernel_hash.sh), every sample
# of both sides and the closing line of each test program, with compute-sanitizer where it is installed.
set -euo pipefail
out=$(realpath -m "$1")
commit=${2:-}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -n "$commit" ] || commit=$(git rev-parse --verify -q HEAD || echo unknown)
bin=${FURLONG_BIN:-build/cuda/bin}
export FURLONG_OPS_LIBRARY=${FURLONG_OPS_LIBRARY:-$PWD/build/cuda/lib/libfurlong_ops.so}
kernels=$(bash tools/kernel_hash.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

closing_line() { tail -n 1 "$1" | tr -d '"\\'; }
lines=()
for test in "$bin"/*_cuda_*_test; do
  [ -x "$test" ] || continue
  name=$(basename "$test")
  timeout 120 "$test" >"$work/$name.log" 2>&1 || true
  lines+=("\"$name\": \"$(closing_line "$work/$name.log")\"")
  echo "$name: $(closing_line "$work/$name.log")"
done
# The checkers slow a program down some hundred times: the small programs only.
if command -v compute-sanitizer >/dev/null; then
  for test in kda_cuda_gate_test "kda_cuda_forward_test --small"; do
    [ -x "$bin/${test%% *}" ] || continue
    for tool in memcheck racecheck initcheck; do
      # shellcheck disable=SC2086  # the name carries its options
      timeout 60 compute-sanitizer --tool "$tool" "$bin"/$test >"$work/$tool.log" 2>&1 || true
      lines+=("\"$tool $test\": \"$(closing_line "$work/$tool.log")\"")
    done
  done
fi
joined=$(IFS=,; echo "${lines[*]-}")

"${PYTHON:-python3}" bench/peers/fla_kda.py "$out" --commit "$commit" --kernels "$kernels" \
  --points "${KDA_POINTS:-forward,training,decode,error,short}"
"${PYTHON:-python3}" - "$out" "{$joined}" <<'PY'
import json, sys
path, tests = sys.argv[1:]
result = json.load(open(path))
result["tests"] = json.loads(tests)
json.dump(result, open(path, "w"), indent=1)
PY
