#!/usr/bin/env bash
# SIGKILL at random moments, some of them during a save, then --resume: the metrics (all but times and rates) must be
# those of the uninterrupted run, to the bit, and every step must stand exactly once. On the demo's config and data,
# shortened, across the borders of its stages, in fp32.
#
#   bash tests/integration/kill_resume.sh [KILLS] [DATA]     10 kills on out/demo/data/train by default
#
# At least three kills strike while the temporary folder of a checkpoint exists: for these the script waits for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

kills=${1:-10}
data=${2:-out/demo/data/train}
saves=3
work=out/kill_resume
furlong=build/cpu/bin/furlong
settings=(--set compute=fp32 --set "data.sources.0.path=$data" --set checkpoint.every_steps=2 --set log.detail_every=3
  --set stages.0.rows=2 --set stages.0.tokens=$((20 * 512))
  --set stages.1.rows=1 --set stages.1.tokens=$((8 * 1024))
  --set stages.2.context=2048 --set stages.2.tokens=$((4 * 2048)))
total=32
RANDOM=${SEED:-1}

train() { "$furlong" train configs/demo.toml "${settings[@]}" "$@"; }
timeless() { jq -cS 'del(.tokens_per_s, .seconds, .elapsed, .rss_bytes, .peak_rss_bytes)' "$1"; }
partial() { compgen -G "$work/killed/checkpoints/.step-??????.partial" >/dev/null; }
starts() { grep -c '^training:' "$work/killed.log" || true; }

rm -rf "$work"
mkdir -p "$work"
: >"$work/killed.log"
echo "the uninterrupted run ($total steps)"
begin=$(date +%s%N)
train --out "$work/whole" >"$work/whole.log" 2>&1
milliseconds=$((($(date +%s%N) - begin) / 1000000))

during_save=0
struck=0
for ((kill = 1; kill <= kills; kill++)); do
  resume=(); [ "$kill" -gt 1 ] && resume=(--resume)
  before=$(starts)
  "$furlong" train configs/demo.toml "${settings[@]}" --out "$work/killed" "${resume[@]}" >>"$work/killed.log" 2>&1 &
  pid=$!
  until [ "$(starts)" -gt "$before" ] || ! kill -0 $pid 2>/dev/null; do sleep 0.02; done
  if [ "$during_save" -lt "$saves" ]; then
    # Let some saves pass, then strike in the middle of one.
    for ((skip = RANDOM % 2; skip > 0; skip--)); do
      until partial || ! kill -0 $pid 2>/dev/null; do :; done
      while partial && kill -0 $pid 2>/dev/null; do :; done
    done
    until partial || ! kill -0 $pid 2>/dev/null; do :; done
    [ $((RANDOM % 2)) = 0 ] || sleep 0.0$((RANDOM % 4))
  else
    sleep "$(awk -v ms=$((milliseconds * (RANDOM % 100) / 800)) 'BEGIN { print ms / 1000 }')"
  fi
  if kill -KILL $pid 2>/dev/null; then struck=$((struck + 1)); fi
  wait $pid 2>/dev/null || true
  where=between
  if partial; then where="during a save"; during_save=$((during_save + 1)); fi
  echo "kill $kill: $where, $(wc -l <"$work/killed/metrics.jsonl" 2>/dev/null || echo 0) records," \
    "newest $(cat "$work/killed/checkpoints/latest" 2>/dev/null || echo none)"
done
train --out "$work/killed" --resume >>"$work/killed.log" 2>&1

timeless "$work/whole/metrics.jsonl" >"$work/whole.txt"
timeless "$work/killed/metrics.jsonl" >"$work/killed.txt"
steps=$(jq -r .step "$work/killed/metrics.jsonl" | tr '\n' ' ')
[ "$steps" = "$(seq 1 $total | tr '\n' ' ')" ] || { echo "FAIL: steps in metrics.jsonl: $steps"; exit 1; }
cmp -s "$work/whole.txt" "$work/killed.txt" || {
  echo "FAIL: metrics differ from step $(diff "$work/whole.txt" "$work/killed.txt" | sed -n 's/^< *//p' | head -1 | jq .step)"
  exit 1
}
for file in model optimizer; do
  last=$(printf 'step-%06d' $total)
  cmp -s "$work/whole/checkpoints/$last/$file.safetensors" "$work/killed/checkpoints/$last/$file.safetensors" \
    || { echo "FAIL: the last $file.safetensors differs"; exit 1; }
done
if grep -q 'is damaged' "$work/killed.log"; then echo "FAIL: a half checkpoint was taken for a whole one"; exit 1; fi
[ "$during_save" -ge "$saves" ] || { echo "FAIL: only $during_save kills during a save"; exit 1; }
echo "$struck kills, $during_save during a save: $total steps bit-identical to the uninterrupted run, each exactly once"
