#!/usr/bin/env bash
# The acceptance points of published checkpoints, one line each: number, PASS / FAIL / SKIP with the reason, the figure.
#
#   bash tests/acceptance/checkpoints.sh          every point
#   bash tests/acceptance/checkpoints.sh 1 3      some points
#
# Logs and intermediate files: out/acceptance.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/acceptance/points.sh

point_1() { # complete small checkpoints, tokenizer, prompts, packed weights: every golden case
  if "$bin/golden_test" --dir tests/golden >"$work/checkpoint_golden.log" 2>&1; then
    local cases
    cases=$(grep -c '\[checkpoint\.' "$work/checkpoint_golden.log")
    line 1 PASS "$(tail -n 1 "$work/checkpoint_golden.log"); $cases of them complete checkpoints"
  else
    line 1 FAIL "$(tail -n 1 "$work/checkpoint_golden.log"), see $work/checkpoint_golden.log"
  fi
}

# measured LOG COMMAND...: seconds and peak resident bytes of a command on standard output
measured() {
  local log=$1; shift
  /usr/bin/time -f '%e %M' -o "$log.time" "$@" >"$log" 2>&1 || return 1
  tail -n 1 "$log.time"
}

point_3() { # the real size in sparse files
  local folder="$work/sparse-k3" seconds kilobytes status=PASS text=""
  command -v /usr/bin/time >/dev/null || { line 3 SKIP "no /usr/bin/time"; return; }
  python3 tools/sparse_checkpoint.py "$folder" >"$work/sparse.log" 2>&1 || { line 3 FAIL "see $work/sparse.log"; return; }
  for command in "inspect $folder" "plan $folder --context 1048576 --batch 1 --compute bf16"; do
    # shellcheck disable=SC2086
    if ! read -r seconds kilobytes < <(measured "$work/sparse_${command%% *}.log" "$bin/furlong" $command); then
      line 3 FAIL "${command%% *}: see $work/sparse_${command%% *}.log"
      return
    fi
    awk -v s="$seconds" -v k="$kilobytes" 'BEGIN { exit !(s < 20 && k < 2 * 1048576) }' || status=FAIL
    text="$text; ${command%% *} $seconds s, $((kilobytes / 1024)) MiB"
  done
  grep -q '^497220 tensors' "$work/sparse_inspect.log" || status=FAIL
  rm -rf "$folder"
  line 3 $status "497,220 tensors in 96 shards$text"
}

point_8() {
  local tests='PublishedCheckpoint.*:PublishedConfig.*'
  if "$bin/model_test" --gtest_filter="$tests" >"$work/user_cases.log" 2>&1 &&
    "$bin/checkpoint_test" >>"$work/user_cases.log" 2>&1; then
    line 8 PASS "$(grep -c '^\[       OK' "$work/user_cases.log") tests of loading, names, configs and dtypes"
  else
    line 8 FAIL "see $work/user_cases.log"
  fi
}

not_yet() { line "$1" SKIP "not built yet: $2"; }

points=("$@")
[ ${#points[@]} -eq 0 ] && points=(1 2 3 4 5 6 7 8)
[ -x "$bin/furlong" ] || bash runs/build.sh cpu >"$work/build.log" 2>&1 || { echo "build failed, see $work/build.log"; exit 1; }
for point in "${points[@]}"; do
  case "$point" in
    2) not_yet 2 "training from a converted checkpoint, and its export in transformers" ;;
    4) not_yet 4 "experts streamed from disk" ;;
    5) not_yet 5 "CPU inference beside llama.cpp" ;;
    6) not_yet 6 "MXFP4 products beside the read bandwidth" ;;
    7) not_yet 7 "fuzz targets" ;;
    [138]) "point_$point" ;;
    *) echo "checkpoints.sh: no point '$point' (1 to 8)" >&2; exit 2 ;;
  esac
done
exit $failed
