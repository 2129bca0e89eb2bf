#!/usr/bin/env bash
# All set-up, then every check and test.
#
#   bash runs/test.sh          format, layers, size, docs; unit, golden and integration tests; some fuzzing
#   bash runs/test.sh --full   also clang-tidy and the whole suite under address and undefined-behaviour sanitizers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

full=false
case "${1:-}" in
  "") ;;
  --full) full=true ;;
  *) echo "test.sh: unknown argument '$1' (known: --full)" >&2; exit 2 ;;
esac

step() { printf '\n== %s\n' "$*"; }

step "set-up and build"
bash runs/build.sh cpu

step "format"
mapfile -t sources < <(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
.venv/bin/clang-format --dry-run --Werror "${sources[@]}"

step "layers, size, docs"
.venv/bin/python tools/tests/test_checks.py
.venv/bin/python tools/check_layers.py
.venv/bin/python tools/check_size.py
.venv/bin/python tools/check_docs.py

step "CUDA sources"
bash tools/compile_cuda.sh

step "tests"
ctest --preset cpu

step "fuzzing"
bash runs/fuzz.sh 20

step "Python package"
python="${FURLONG_PYTHON:-.venv/bin/python}"
if "$python" -c 'import pytest' 2>/dev/null; then
  FURLONG_OPS_LIBRARY="$PWD/build/cpu/lib/libfurlong_ops.so" PYTHONDONTWRITEBYTECODE=1 \
    "$python" -m pytest -q -p no:cacheprovider python/tests
else
  echo "SKIP: $python has no pytest"
fi

if $full; then
  step "clang-tidy"
  bash tools/bootstrap.sh --tidy
  git ls-files 'furlong/*.cpp' 'app/*.cpp' |
    xargs -P 2 -n 4 .venv/bin/clang-tidy -p build/cpu --quiet --extra-arg="-isystem$PWD/tools/tidy"
  step "sanitizers"
  bash runs/build.sh asan
  # LibTorch keeps memory until the process ends, which the leak checker cannot tell from a leak.
  ASAN_OPTIONS=detect_leaks=0 ctest --preset asan
fi
