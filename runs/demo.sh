#!/usr/bin/env bash
# From nothing to a trained hybrid model: set-up, build, corpus, tokenizer, training, evaluation, samples, report.
# About ten minutes of training on two cores. Everything lands in out/demo; the end is out/demo/summary.json.
# Ctrl-C saves, and the next start with the same settings and program goes on; after a whole demo a start trains anew.
#
#   bash runs/demo.sh                        the whole demo
#   bash runs/demo.sh --set stages.0.tokens=200000 ...    with changed training settings
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=out/demo
run=$out/run
furlong=build/cpu/bin/furlong
begin=$(date +%s)
step() { printf '\n== %s\n' "$*"; }

step "set-up and build"
bash runs/build.sh cpu furlong

step "the King James text, four books held out whole; tokenizer of 2,048 entries; token shards"
bash runs/demo_data.sh

step "training (configs/demo.toml)"
# What a stopped run was made of; gone when the demo has come to its end.
stamp=$( (cat configs/demo.toml configs/model/nano.toml "$furlong" build/cpu/lib/libfurlong_ops.so; printf '%s\n' "$@") | cksum)
resume=()
if [ -e "$run/checkpoints/latest" ] && [ "$(cat "$out/unfinished" 2>/dev/null)" = "$stamp" ]; then
  resume=(--resume)
else
  rm -rf "$run"
fi
printf '%s\n' "$stamp" >"$out/unfinished"
training=$(date +%s)
$furlong train configs/demo.toml --out "$run" "${resume[@]}" "$@" || {
  code=$?
  [ $code -ne 130 ] || echo "or start runs/demo.sh again in the same way: it goes on to evaluation and report" >&2
  exit $code
}
seconds=$(($(date +%s) - training))
# Of a run in parts: the steps' own time.
[ ${#resume[@]} -eq 0 ] || seconds=$(jq -s 'map(.seconds) | add | round' "$run/metrics.jsonl")

step "held-out text: bits per byte"
$furlong eval loss --checkpoint "$run" --data "$out/data/heldout" --out "$run/eval.json" >/dev/null
cat "$out"/text/heldout/*.txt >"$out/heldout.txt"
bytes=$(stat -c %s "$out/heldout.txt")
jq -n --argjson bytes "$bytes" --argjson gzip "$(gzip -9 -c "$out/heldout.txt" | wc -c)" \
  --argjson xz "$(xz -9e -c "$out/heldout.txt" | wc -c)" \
  '{bytes: $bytes, gzip_bits_per_byte: ($gzip * 8 / $bytes), xz_bits_per_byte: ($xz * 8 / $bytes)}' >"$run/baselines.json"

step "samples"
: >"$run/samples.jsonl"
seed=0
for prompt in "And it came to pass" "In the beginning" "The LORD is my" "And Jesus said unto them,"; do
  seed=$((seed + 1))
  text=$($furlong generate --checkpoint "$run" --prompt "$prompt" --max-tokens 80 --temperature 0.7 --top-p 0.95 --seed $seed)
  printf '%s\n\n' "$text"
  jq -cn --arg prompt "$prompt" --arg text "$text" '{prompt: $prompt, text: $text, temperature: 0.7}' >>"$run/samples.jsonl"
done

step "report"
$furlong report "$run" --out "$out/report.html"

jq -n --slurpfile eval "$run/eval.json" --slurpfile base "$run/baselines.json" \
  --slurpfile count <($furlong inspect "$run" --json) --slurpfile last <(tail -n 1 "$run/metrics.jsonl") \
  --argjson seconds "$seconds" --argjson total $(($(date +%s) - begin)) --arg report "$out/report.html" \
  '{val_bits_per_byte: $eval[0].bits_per_byte, gzip_bits_per_byte: $base[0].gzip_bits_per_byte,
    xz_bits_per_byte: $base[0].xz_bits_per_byte, parameters: $count[0].model.parameters,
    active_parameters: $count[0].model.active_parameters, train_tokens: $last[0].tokens, seconds: $seconds,
    tokens_per_s: ($last[0].tokens / ([$seconds, 1] | max)), max_vio_last: $last[0].max_vio,
    peak_rss_bytes: $last[0].peak_rss_bytes, total_seconds: $total, report: $report}' >"$out/summary.json"

step "summary ($out/summary.json)"
cat "$out/summary.json"
rm -f "$out/unfinished"
