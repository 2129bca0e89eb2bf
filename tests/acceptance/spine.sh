#!/usr/bin/env bash
# The acceptance points of the spine, one line each: number, PASS / FAIL / SKIP with the reason, the figure.
#
#   bash tests/acceptance/spine.sh            every point (about an hour and a half on two cores)
#   bash tests/acceptance/spine.sh 2 5 8      some points
#
# Logs and intermediate files: out/acceptance.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/acceptance/points.sh

# A trained model of the demo's architecture with every text mechanism on: the demo's, or 60 steps made here.
trained_run() {
  if [ -e out/demo/run/checkpoints/latest ]; then echo out/demo/run; return; fi
  if [ ! -e "$work/nano/checkpoints/latest" ]; then
    bash runs/demo_data.sh >/dev/null
    rm -rf "$work/nano"
    "$bin/furlong" train configs/demo.toml --out "$work/nano" --set compute=fp32 --set stages.0.tokens=250000 \
      --set stages.1.tokens=20000 --set stages.2.tokens=20000 >"$work/nano.log" 2>&1
  fi
  echo "$work/nano"
}

point_1() { # a fresh clone: demo, second start, tests
  local clone="$work/clone" begin demo tests again bpb status=PASS
  rm -rf "$clone" && git clone -q . "$clone"
  begin=$(date +%s)
  (cd "$clone" && bash runs/demo.sh) >"$work/demo.log" 2>&1 || { line 1 FAIL "demo.sh failed, see $work/demo.log"; return; }
  demo=$(($(date +%s) - begin))
  bpb=$(jq .val_bits_per_byte "$clone/out/demo/summary.json")
  begin=$(date +%s)
  (cd "$clone" && timeout 120 bash runs/demo.sh) >"$work/demo_again.log" 2>&1 &
  until [ -s "$clone/out/demo/run/metrics.jsonl" ] && [ "$(stat -c %Y "$clone/out/demo/run/metrics.jsonl")" -ge "$begin" ]; do
    sleep 0.2
    [ $(($(date +%s) - begin)) -gt 100 ] && break
  done
  again=$(($(date +%s) - begin))
  pkill -P $! 2>/dev/null; wait $! 2>/dev/null
  begin=$(date +%s)
  (cd "$clone" && bash runs/test.sh) >"$work/test.log" 2>&1 || status=FAIL
  tests=$(($(date +%s) - begin))
  jq -en --argjson b "$bpb" --argjson d $demo --argjson a $again --argjson t $tests \
    '$b <= 1.45 and $d < 1800 and $a <= 15 and $t < 1500' >/dev/null || status=FAIL
  line 1 $status "held-out $bpb bits per byte; demo ${demo} s; second run trains after ${again} s; tests ${tests} s"
}

point_2() {
  local tail
  if "$bin/golden_test" --dir tests/golden >"$work/golden.log" 2>&1; then
    tail=$(tail -n 1 "$work/golden.log")
    line 2 PASS "$tail"
  else
    line 2 FAIL "$(tail -n 1 "$work/golden.log"), see $work/golden.log"
  fi
}

point_3() {
  local run
  run=$(trained_run)
  if "$bin/split_check" --checkpoint "$run" --data out/demo/data/heldout --tokens 200 >"$work/split.log" 2>&1; then
    line 3 PASS "$(tail -n 1 "$work/split.log")"
  else
    line 3 FAIL "$(tail -n 1 "$work/split.log"), see $work/split.log"
  fi
}

point_4() {
  bash runs/demo_data.sh >/dev/null
  if bash tests/integration/kill_resume.sh >"$work/kill_resume.log" 2>&1; then
    line 4 PASS "$(tail -n 1 "$work/kill_resume.log")"
  else
    line 4 FAIL "$(tail -n 1 "$work/kill_resume.log"), see $work/kill_resume.log"
  fi
}

point_5() {
  local figures='/noise floor/ { floor = $NF } /^quantile, 1000 bins/ { five = $(NF - 2); late = $(NF - 1) }'
  if "$bin/balance_bench" >"$work/balance.log" 2>&1 &&
    awk "$figures"' END { exit !(floor > 0 && five > 0 && five < 2 * floor && late < floor) }' "$work/balance.log" &&
    "$bin/moe_test" --gtest_filter='*Balanc*' >"$work/balance_test.log" 2>&1; then
    line 5 PASS "$(grep -E '^(experts|none|sign rule|quantile)' "$work/balance.log" | tr -s ' ' | paste -sd ';') (step 5 worst, late mean, late worst)"
  else
    line 5 FAIL "see $work/balance.log and $work/balance_test.log"
  fi
}

point_6() {
  if bash bench/peers/train_speed.sh >"$work/train_speed.log" 2>&1; then
    line 6 PASS "$(tail -n 1 "$work/train_speed.log")"
  else
    line 6 FAIL "$(tail -n 1 "$work/train_speed.log"), see $work/train_speed.log"
  fi
}

point_7() {
  if "$bin/tasks_bench" >"$work/tasks.log" 2>&1; then
    line 7 PASS "$(tail -n 1 "$work/tasks.log")"
  else
    line 7 FAIL "$(tail -n 1 "$work/tasks.log"), see $work/tasks.log"
  fi
}

point_8() {
  bash runs/demo_data.sh >/dev/null
  if ! bash tests/integration/bad_input.sh >"$work/bad_input.log" 2>&1; then
    line 8 FAIL "$(tail -n 1 "$work/bad_input.log"), see $work/bad_input.log"
  elif bash runs/build.sh asan >"$work/asan.log" 2>&1 && ASAN_OPTIONS=detect_leaks=0 ctest --preset asan >>"$work/asan.log" 2>&1; then
    line 8 PASS "$(tail -n 1 "$work/bad_input.log"); asan: $(grep 'tests passed' "$work/asan.log")"
  else
    line 8 FAIL "asan: see $work/asan.log"
  fi
}

point_9() { # a machine with a GPU writes the file: bash bench/gpu/spine.sh
  local file
  file=$(ls bench/results/*-h200-spine.json 2>/dev/null | tail -n 1)
  if [ -z "$file" ]; then
    line 9 SKIP "no GPU here and no bench/results/*-h200-spine.json"
  else
    local status=FAIL
    jq -e '.golden_failed == 0 and .golden_passed > 0 and .worst_loss_difference <= 1e-3' "$file" >/dev/null && status=PASS
    line 9 $status "$(jq -r '"\(.machine), commit \(.commit): golden \(.golden_passed) passed, \(.golden_failed) failed; worst loss difference over \(.steps) steps \(.worst_loss_difference), of rounding alone \(.worst_loss_difference_cpu_avx2); host waits forward \(.host_waits.forward), step \(.host_waits.whole_step)"' "$file")"
  fi
}

points=("$@")
[ ${#points[@]} -eq 0 ] && points=(1 2 3 4 5 6 7 8 9)
[ -x "$bin/furlong" ] || bash runs/build.sh cpu >"$work/build.log" 2>&1 || { echo "build failed, see $work/build.log"; exit 1; }
for point in "${points[@]}"; do
  case "$point" in
    [1-9]) "point_$point" ;;
    *) echo "spine.sh: no point '$point' (1 to 9)" >&2; exit 2 ;;
  esac
done
exit $failed
