#!/usr/bin/env bash
# KDA on a GPU: Furlong and FLA 0.6.0 in one process on the same tensors, then the torch-free tests of the kernels. One
# JSON file, which holds what there is so far if the script is cut short.
#
#   bash bench/gpu/kda.sh OUT.json [COMMIT]
#
#   FURLONG_BIN            folder of the test programs, build/cuda/bin by default
#   FURLONG_OPS_LIBRARY    the operator library, build/cuda/lib/libfurlong_ops.so by default
#   PYTHON                 an interpreter with a CUDA torch, fla-core 0.6.0 and einops; python3 by default
#   KDA_POINTS             parts of bench/peers/fla_kda.py to run, all by default; empty: none
#   TEST_SECONDS           limit of the test programs, which run side by side: 120 by default
#   CHECK_SECONDS          limit of the small sets under compute-sanitizer, which run side by side: 140 by default
#
# COMMIT: for a machine without git. The file also holds the hash of the kernel sources (tools/kernel_hash.sh), every sample
# of both sides and how each test program ended, with compute-sanitizer where it is installed: its closing line, or that it
# ran past its limit, or its exit status.
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

# begin NAME SECONDS COMMAND...: starts a program; its line in $work/ends once it has ended.
begin() {
  local name=$1 seconds=$2 log text refusal status=0
  log=$(mktemp -p "$work")
  shift 2
  (
    timeout -k 5 "$seconds" "$@" >"$log" 2>&1 || status=$?
    text=$(tail -n 1 "$log" | tr '\t' ' ')
    refusal=$(grep -m 1 -i 'device not supported' "$log" || true)
    case $status in
      0) ;;
      124 | 137) text="timed out after $seconds s" ;;
      *) text="exit status $status: $text" ;;
    esac
    [ -z "$refusal" ] || text="SKIP: $refusal"
    printf '%s\t%s\n' "$name" "$text" | tee -a "$work/ends"
  ) &
}

# keep_ends: what has ended so far, into the result.
keep_ends() {
  "${PYTHON:-python3}" - "$out" "$work/ends" <<'PY'
import json, sys
path, ends = sys.argv[1:]
result = json.load(open(path))
result["tests"] = dict(sorted(line.rstrip("\n").split("\t", 1) for line in open(ends)))
json.dump(result, open(path, "w"), indent=1)
PY
}

touch "$work/ends"
"${PYTHON:-python3}" bench/peers/fla_kda.py "$out" --commit "$commit" --kernels "$kernels" \
  --points "${KDA_POINTS-forward,training,decode,error,gradient_error,short}"
for test in "$bin"/*_cuda_*_test; do
  [ -x "$test" ] || continue
  begin "$(basename "$test")" "${TEST_SECONDS:-120}" "$test"
done
wait
keep_ends
# The checkers slow a program down some hundred times: small sets only. initcheck would take the NaN that the tests write
# into workspaces and results for their first value: --unset leaves them as they were allocated.
if command -v compute-sanitizer >/dev/null; then
  export OMP_NUM_THREADS=2
  for test in kda_cuda_gate_test "kda_cuda_forward_test --small" "kda_cuda_backward_test --small" \
    "kda_cuda_step_test --small" "short_conv_cuda_conv_test --small"; do
    read -ra command <<<"$test"
    [ -x "$bin/${command[0]}" ] || continue
    for tool in memcheck racecheck initcheck; do
      options=("${command[@]:1}")
      case "$tool $test" in "initcheck kda_cuda_forward"* | "initcheck kda_cuda_backward"*) options+=(--unset) ;; esac
      begin "$tool ${command[0]}" "${CHECK_SECONDS:-140}" \
        compute-sanitizer --tool "$tool" "$bin/${command[0]}" "${options[@]}"
    done
  done
  wait
  unset OMP_NUM_THREADS
fi
keep_ends
