#!/usr/bin/env bash
# The demo's corpus, tokenizer of 2,048 entries and token shards, in out/demo; nothing to do when they are there.
# Needs the built program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=out/demo
furlong=build/cpu/bin/furlong

bash runs/prepare_kjv.sh "$out/text"
[ -e "$out/data/heldout/meta.json" ] && exit 0
rm -rf "$out/tokenizer" "$out/data"
$furlong tokenizer train "$out/text/train" --vocab 2048 --out "$out/tokenizer"
for part in train heldout; do
  $furlong data prepare "$out/text/$part" --tokenizer "$out/tokenizer" --out "$out/data/$part"
done
