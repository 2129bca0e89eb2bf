#!/usr/bin/env bash
# Set-up and build shared by demo.sh and test.sh:  bash runs/build.sh PRESET [TARGET ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=$1
shift
bash tools/bootstrap.sh
mkdir -p "build/$preset"
if [ ! -e "build/$preset/build.ninja" ]; then
  cmake --preset "$preset" >"build/$preset/configure.log" 2>&1 || { cat "build/$preset/configure.log"; exit 1; }
fi
cmake --build --preset "$preset" ${*:+--target "$@"}
