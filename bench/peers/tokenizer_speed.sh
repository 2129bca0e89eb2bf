#!/usr/bin/env bash
# Encoding and decoding beside Python's tiktoken, on one thread, in one run: prose (the King James text), source code (this
# repository's) and Han text (made up), with a vocabulary trained on them. Ids must be equal. PASS: at least tiktoken's
# speed on every text.
#
#   bash bench/peers/tokenizer_speed.sh [OUT.json]
#
# tiktoken lives in an environment of its own, .cache/peers-tiktoken (about 30 MB to download).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

environment=.cache/peers-tiktoken
work=out/tokenizer_speed
if [ ! -e "$environment/.done" ]; then
  "${FURLONG_PYTHON:-.venv/bin/python}" -m venv "$environment"
  # shellcheck disable=SC2086  # FURLONG_PIP_ARGS is a list of words
  "$environment/bin/python" -m pip install -q ${FURLONG_PIP_ARGS:-} tiktoken==0.14.0 numpy
  touch "$environment/.done"
fi
mkdir -p "$work"
[ -e "$work/kjv" ] || bash runs/prepare_kjv.sh "$work/kjv"
cat "$work"/kjv/*/*.txt >"$work/prose.txt"
git ls-files '*.cpp' '*.h' '*.cu' '*.py' | xargs cat >"$work/code.txt"
"$environment/bin/python" bench/peers/tokenizer_points.py "$work" "$@"
