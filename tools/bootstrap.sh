#!/usr/bin/env bash
# Installs what Furlong needs to build and test: system packages (Debian 12+/Ubuntu 24.04+) and a Python environment
# in .venv with the pinned torch, whose LibTorch the program links. Safe to run again: done parts are skipped.
#
#   bash tools/bootstrap.sh           everything that building, testing and the demo need
#   bash tools/bootstrap.sh --tidy    clang-tidy as well (runs/test.sh --full)
#   bash tools/bootstrap.sh --fuzz    clang as well (runs/fuzz.sh)
#
#   FURLONG_PYTHON=/path/python3   use this interpreter, and the torch (2.11 or newer) that it already has
#   FURLONG_PIP_ARGS="..."         extra arguments for pip, for example --index-url of a CPU-only torch mirror
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_VERSION=2.13.0
packages=(g++ make cmake ninja-build ccache git python3-venv libhwy-dev libtomlplusplus-dev nlohmann-json3-dev
  libcli11-dev libfmt-dev libgtest-dev libgmock-dev libbenchmark-dev libpcre2-dev bible-kjv xz-utils gzip jq)
tools=("clang-format==18.1.8" "numpy>=1.26" "pytest>=8")
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

for argument in "$@"; do
  case "$argument" in
    --tidy) tools+=("clang-tidy==18.1.8") ;;
    --fuzz) # the release that the findings were judged with, or the distribution's own
      command -v clang++-16 >/dev/null || as_root apt-get update -qq
      if [ -n "$(apt-cache -q search --names-only '^clang-16$' 2>/dev/null)" ]; then
        packages+=(clang-16 libclang-rt-16-dev)
      else
        packages+=(clang libclang-rt-dev)
      fi
      ;;
    *) echo "bootstrap.sh: unknown argument '$argument' (known: --tidy, --fuzz)" >&2; exit 2 ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
  echo "bootstrap: installing ${#missing[@]} system packages (at most about 350 MB to download): ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  as_root apt-get update -qq
  as_root apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

has_torch() { "$1" -c "import torch; v=tuple(int(x) for x in torch.__version__.split('+')[0].split('.')[:2]); assert v >= (2, 11)" 2>/dev/null; }

if [ -n "${FURLONG_PYTHON:-}" ]; then
  has_torch "$FURLONG_PYTHON" || { echo "bootstrap: FURLONG_PYTHON=$FURLONG_PYTHON has no torch 2.11 or newer" >&2; exit 1; }
fi
[ -x .venv/bin/python ] || /usr/bin/python3 -m venv .venv
stamp=".venv/.furlong-$(printf '%s' "$TORCH_VERSION ${tools[*]} ${FURLONG_PYTHON:-}" | cksum | cut -d' ' -f1)"
if [ ! -e "$stamp" ]; then
  # shellcheck disable=SC2086  # FURLONG_PIP_ARGS is a list of words
  .venv/bin/python -m pip install -q ${FURLONG_PIP_ARGS:-} "${tools[@]}"
  if [ -z "${FURLONG_PYTHON:-}" ] && ! has_torch .venv/bin/python; then
    echo "bootstrap: installing torch $TORCH_VERSION (a CPU wheel is about 200 MB to download, a CUDA wheel with its libraries about 3 GB;" \
      "FURLONG_PIP_ARGS chooses the index, FURLONG_PYTHON uses a torch that is already there)"
    # shellcheck disable=SC2086
    .venv/bin/python -m pip install -q ${FURLONG_PIP_ARGS:-} "torch==$TORCH_VERSION"
  fi
  touch "$stamp"
fi
