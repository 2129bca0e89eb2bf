#!/usr/bin/env bash
# KDA on two CPU cores, fp32, K = V = 128, one run: Furlong's operators, ggml's GATED_DELTA_NET in its per-channel form
# (built from llama-cpp-python's source distribution), FLA's naive_chunk_kda at chunk 16, the machine's fp32 product and
# its in-place scale. Prints figures and ratios, PASS or FAIL against the aims of acceptance point 4; raw samples go to
# bench/results/DATE-cpu-kda.json (or the file given).
#
#   bash bench/peers/kda_cpu.sh [OUT.json]
#
# Programs take turns for ROUNDS rounds (6) and the smallest sample of each counts: other load only ever adds time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=${1:-bench/results/$(date +%F)-cpu-kda.json}
rounds=${ROUNDS:-6}
ours=build/cpu/bin/kda_cpu_bench
llama=llama-cpp-python==0.3.36
cache=.cache/peers/kda
short=(1 2 3 4 6 8 9 12 16 17 24 32 33 48 64)

[ -x "$ours" ] || bash runs/build.sh cpu kda_cpu_bench
bash bench/peers/setup.sh
mkdir -p "$cache"
# shellcheck disable=SC2086  # FURLONG_PIP_ARGS is a list of words
pip() { .cache/peers/bin/python -m pip "$1" -q ${FURLONG_PIP_ARGS:-} "${@:2}"; }
if [ ! -e "$cache/.fla" ]; then
  pip install --no-deps fla-core==0.6.0
  pip install einops
  touch "$cache/.fla"
fi
if [ ! -x "$cache/ggml_kda" ] || [ bench/peers/ggml_kda.cpp -nt "$cache/ggml_kda" ]; then
  if [ ! -e "$cache/build/src/libggml.a" ]; then
    pip download --no-deps --no-binary llama-cpp-python -d "$cache" "$llama"
    tar xzf "$cache"/llama_cpp_python-*.tar.gz -C "$cache" --strip-components=4 --wildcards '*/vendor/llama.cpp/ggml/*'
    touch "$cache/ggml.pc.in"  # its CMake wants one, the distribution lacks it
    cmake -S "$cache" -B "$cache/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS="-O3 -march=native" \
      -DCMAKE_CXX_FLAGS="-O3 -march=native" -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
      -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF >"$cache/build.log"
    cmake --build "$cache/build" -j "${JOBS:-1}" >>"$cache/build.log"
  fi
  g++ -std=c++20 -O3 -march=native -fopenmp -I"$cache/include" bench/peers/ggml_kda.cpp -o "$cache/ggml_kda" \
    "$cache"/build/src/libggml.a "$cache"/build/src/libggml-cpu.a "$cache"/build/src/libggml-base.a -ldl -lpthread
fi

samples="$cache/samples"
rm -rf "$samples" && mkdir -p "$samples"
take() { # take NAME ROUND program...
  echo "$1, round $2 (load $(cut -d' ' -f1 /proc/loadavg))"
  "${@:3}" 2>"$samples/$1.err" | tail -n 1 >"$samples/$1-$2.json" || { cat "$samples/$1.err"; exit 1; }
}
for ((round = 1; round <= rounds; ++round)); do
  take forward "$round" "$ours" forward 4
  take ggml "$round" "$cache/ggml_kda" 2 6 8 4096
  take naive "$round" .cache/peers/bin/python bench/peers/naive_kda.py 2
  take ggml_short "$round" "$cache/ggml_kda" 2 8 8 "${short[@]}"
  take short "$round" "$ours" short 8
  take decode "$round" "$ours" decode 3
  take threads "$round" "$ours" threads 3
done
python3 bench/peers/kda_cpu_points.py "$samples" "$out"
