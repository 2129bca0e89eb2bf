#!/usr/bin/env bash
# Fuzzing under address and undefined-behaviour sanitizers: builds tests/fuzz with clang and runs every program.
#
#   bash runs/fuzz.sh [SECONDS] [TARGET ...]    10 seconds each; targets: the names in tests/fuzz without _fuzz.cpp
#
# Starts from tests/fuzz/corpus/TARGET; what it learns stays in build/fuzz/corpus. An input that fails is kept in
# build/fuzz/findings and ends the script with status 1: bash runs/fuzz.sh 0 TARGET tries findings and corpus again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:-10}
[[ "$seconds" =~ ^[0-9]+$ ]] || { echo "fuzz.sh: '$seconds' is no number of seconds" >&2; exit 2; }
shift || true
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
  for source in tests/fuzz/*_fuzz.cpp; do targets+=("$(basename "$source" _fuzz.cpp)"); done
fi
for target in "${targets[@]}"; do
  [ -e "tests/fuzz/${target}_fuzz.cpp" ] || { echo "fuzz.sh: no target '$target' in tests/fuzz" >&2; exit 2; }
done

bash tools/bootstrap.sh --fuzz
mkdir -p build/fuzz
if [ ! -e build/fuzz/build.ninja ]; then
  compiler=$(command -v clang++-16 || command -v clang++)
  cmake --preset fuzz -DCMAKE_CXX_COMPILER="$compiler" >build/fuzz/configure.log 2>&1 || { cat build/fuzz/configure.log; exit 1; }
fi
cmake --build --preset fuzz

run() {
  local target=$1 seconds=$2 known="build/fuzz/corpus/$1" found="build/fuzz/findings/$1" limit=(-max_total_time="$2")
  mkdir -p "$known" "$found"
  [ "$seconds" -gt 0 ] || limit=(-runs=0)
  if "build/fuzz/bin/${target}_fuzz" "${limit[@]}" -timeout=10 -rss_limit_mb=2048 -artifact_prefix="$found/" \
    "$known" "tests/fuzz/corpus/$target" "$found" >"build/fuzz/$target.log" 2>&1; then
    echo "fuzz: $target: $(grep -oE '^#[0-9]+\s+DONE.*' "build/fuzz/$target.log" | tr -s '\t ' ' ' || echo "corpus tried")"
  else
    echo "fuzz: $target FAILED, see build/fuzz/$target.log and $found"
    grep -m 3 -E 'ERROR|SUMMARY|Uncaught|terminate' "build/fuzz/$target.log" || true
    return 1
  fi
}
export -f run
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -c "run {} $seconds"
