#!/usr/bin/env bash
# The acceptance points of the KDA operators, one line each: number, PASS / FAIL / SKIP with the reason, the figures.
#
#   bash tests/acceptance/kda.sh            every point
#   bash tests/acceptance/kda.sh 1 2 3      some points
#
# Points of a GPU read the newest bench/results/*-h200-kda.json (bash bench/gpu/kda.sh makes it) and fail if that file belongs
# to other kernels than the tree's. Logs: out/acceptance.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/acceptance/points.sh

result=$(ls bench/results/*-h200-kda.json 2>/dev/null | tail -n 1)
kernels=$(bash tools/kernel_hash.sh)

# gpu NUMBER PART [TEXT]: the point's line from one part of the result, after what the CPU gave.
gpu() {
  [ -n "$result" ] || { line "$1" SKIP "${3-}no GPU here and no bench/results/*-h200-kda.json"; return; }
  local text status=0
  text=$(python3 tests/acceptance/kda_points.py "$result" "$kernels" "$2") || status=$?
  if [ $status -eq 0 ]; then line "$1" PASS "${3-}$text"; else line "$1" FAIL "${3-}$text"; fi
}

# run_tests LOG PROGRAM FILTER: gtest of the CPU build; prints how many passed.
run_tests() {
  [ -x "$bin/$2" ] || bash runs/build.sh cpu "$2" >"$work/build.log" 2>&1 || { echo "build failed, see $work/build.log"; return 1; }
  "$bin/$2" --gtest_filter="$3" >"$work/$1" 2>&1 || { echo "see $work/$1"; return 1; }
  grep -oE '^\[  PASSED  \] .*' "$work/$1" | cut -c14- | tail -n 1
}

point_1() { gpu 1 forward; }
point_2() { gpu 2 training; }
point_3() { gpu 3 decode; }

point_4() {
  [ -e bench/peers/kda_cpu.sh ] || { line 4 SKIP "bench/peers/kda_cpu.sh is not there: the peers on the CPU are not measured"; return; }
  if bash bench/peers/kda_cpu.sh >"$work/kda_cpu.log" 2>&1; then
    line 4 PASS "$(tail -n 1 "$work/kda_cpu.log" | sed "s/^PASS //")"
  else
    line 4 FAIL "$(tail -n 1 "$work/kda_cpu.log" | sed "s/^FAIL //"), see $work/kda_cpu.log"
  fi
}

point_5() {
  local cpu conv
  cpu=$(run_tests kda_test.log kda_test '*') || { line 5 FAIL "CPU: $cpu"; return; }
  conv=$(run_tests short_conv_test.log short_conv_test '*') || { line 5 FAIL "CPU: $conv"; return; }
  gpu 5 error "CPU: kda $cpu, short_conv $conv; "
}

point_6() {
  local cpu conv filter='*Identity*:*Thread*:*Repeat*:*Neighbour*:*NeverRead*'
  cpu=$(run_tests kda_bits.log kda_test "$filter") || { line 6 FAIL "CPU: $cpu"; return; }
  conv=$(run_tests short_conv_bits.log short_conv_test "$filter") || { line 6 FAIL "CPU: $conv"; return; }
  gpu 6 checkers "CPU: kda $cpu, short_conv $conv; "
}

point_7() {
  local missing="" case
  for case in $(seq 24 35); do
    grep -rqE "\bT$case\b" furlong/ops/kda furlong/ops/short_conv furlong/ops/norm furlong/model --include='*_test.*' || missing="$missing T$case"
  done
  if [ -n "$missing" ]; then line 7 FAIL "no test names$missing"; else line 7 PASS "T24 to T35 stand in tests that point 5 runs"; fi
}

point_8() {
  local text
  text=$(bash tools/compile_cuda.sh 2>"$work/compile_cuda.log" | tail -n 1) || { line 8 FAIL "$text, see $work/compile_cuda.log"; return; }
  case "$text" in *SKIP*) line 8 SKIP "$text" ;; *) line 8 PASS "$text" ;; esac
}

points=("$@")
[ ${#points[@]} -eq 0 ] && points=(1 2 3 4 5 6 7 8)
for point in "${points[@]}"; do
  case "$point" in
    [1-8]) "point_$point" ;;
    *) echo "kda.sh: no point '$point' (1 to 8)" >&2; exit 2 ;;
  esac
done
exit $failed
