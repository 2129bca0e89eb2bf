#!/usr/bin/env bash
# Training speed on this CPU, one run: Furlong's train_bench, a plain transformer of equal active parameters, and the
# kimi_linear model of transformers at the same shape (hidden 256, 8 layers 3:1, 4 heads of 64, 32 experts, 4 chosen,
# expert width 96, vocabulary 2,048, 16 x 256 tokens; forward + backward + step). Prints one JSON line a program, the
# ratios, and PASS or FAIL against the aims: 10 times kimi_linear, 0.4 of the transformer, peak memory below 2 GB.
#
#   bash bench/peers/train_speed.sh [fp32] [bf16]     both by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

dtypes=("$@")
[ "${#dtypes[@]}" -gt 0 ] || dtypes=(fp32 bf16)
bash bench/peers/setup.sh
peers=.cache/peers/bin/python
failed=0
summary=()

field() { jq -r "$2" <<<"$1"; }
at_least() { awk -v got="$1" -v need="$2" 'BEGIN { exit !(got >= need) }'; }

for dtype in "${dtypes[@]}"; do
  ours=$(build/cpu/bin/train_bench --dtype "$dtype" | tail -n 1)
  echo "$ours"
  active=$(field "$ours" ".active_parameters | floor")
  plain=$($peers bench/peers/transformer_baseline.py --dtype "$dtype" --active-parameters "$active")
  echo "$plain"
  kimi=$($peers bench/peers/kimi_linear_transformers.py --dtype "$dtype" --steps 1 2>/dev/null)
  echo "$kimi"
  rate=$(field "$ours" .tokens_per_s)
  to_plain=$(field "$plain" "$rate / .tokens_per_s")
  to_kimi=$(field "$kimi" "$rate / .tokens_per_s")
  peak=$(field "$ours" .peak_rss_bytes)
  at_least "$to_plain" 0.4 && at_least "$to_kimi" 10 && at_least 2e9 "$peak" || failed=1
  summary+=("$(printf '%s: %.0f tokens/s, %.2f of the transformer, %.1f times kimi_linear, peak %.2f GB' \
    "$dtype" "$rate" "$to_plain" "$to_kimi" "$(awk -v b="$peak" 'BEGIN { print b / 1e9 }')")")
done
printf '%s\n' "${summary[@]}"
if [ "$failed" = 0 ]; then verdict=PASS; else verdict=FAIL; fi
echo "$verdict (aims: 0.4 of the transformer, 10 times kimi_linear, peak below 2 GB): $(IFS=';'; echo "${summary[*]}")"
exit "$failed"
