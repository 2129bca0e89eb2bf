#!/usr/bin/env bash
# SHA-256 of the sources that the CUDA kernels of KDA and its convolution are compiled from, tests and benches left out.
# Results of GPU runs carry it: figures belong to the kernels that were measured. Needs no git.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export LC_ALL=C
find furlong/ops/kda furlong/ops/short_conv furlong/ops/common \( -name '*.cu' -o -name '*.cuh' -o -path '*cuda*.h' \) \
  ! -name '*_test.cu' ! -name '*_bench.cu' ! -name '*test*' ! -name '*emulation*' -print | sort | xargs cat | sha256sum | cut -c1-16
