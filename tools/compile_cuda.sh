#!/usr/bin/env bash
# Compiles every CUDA source for sm_90a, without a GPU and without torch: nvcc on the PATH, in CUDA_HOME or /usr/local/cuda,
# or from the nvidia-cuda-nvcc wheel of .venv. Without any of them it says SKIP. Objects: build/cuda_check, made anew only
# where a source is newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_nvcc() {
  command -v nvcc && return
  local place
  for place in "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" .venv/lib/python3*/site-packages/nvidia/cu*/bin/nvcc; do
    [ -x "$place" ] && { echo "$place"; return; }
  done
}

nvcc=$(find_nvcc || true)
if [ -z "$nvcc" ]; then
  echo "compile_cuda: SKIP: no nvcc (pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-runtime)"
  exit 0
fi
out=build/cuda_check
mkdir -p "$out"
newest=$(find furlong/ops \( -name '*.cuh' -o -path '*cuda*.h' \) -newer "$out/.stamp" -print -quit 2>/dev/null || echo all)
count=0
while read -r source; do
  object="$out/$(echo "$source" | tr / _).o"
  count=$((count + 1))
  if [ -z "$newest" ] && [ "$object" -nt "$source" ]; then continue; fi
  "$nvcc" -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I. -Xcompiler -fopenmp -c "$source" -o "$object" ||
    { echo "compile_cuda: $source does not compile"; exit 1; }
done < <(find furlong/ops -name '*.cu' | sort)
touch "$out/.stamp"
echo "compile_cuda: $count sources compile with $("$nvcc" --version | grep -o 'release [0-9.]*')"
