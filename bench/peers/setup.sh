#!/usr/bin/env bash
# The peers' own Python environment, .cache/peers: transformers (about 60 MB to download). torch is not installed twice:
# the environment reads the one that the project uses (.venv or FURLONG_PYTHON), the library that `furlong` links.
# The project's own environment is left alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

project_python="${FURLONG_PYTHON:-.venv/bin/python}"
torch_site="$("$project_python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).resolve().parent.parent)')"
environment=.cache/peers
stamp="$environment/.done-$(cat bench/peers/requirements.txt bench/peers/setup.sh | cksum | cut -d' ' -f1)"
if [ ! -e "$stamp" ]; then
  "$project_python" -m venv "$environment"
  # shellcheck disable=SC2086  # FURLONG_PIP_ARGS is a list of words
  "$environment/bin/python" -m pip install -q ${FURLONG_PIP_ARGS:-} -r bench/peers/requirements.txt
  touch "$stamp"
fi
site="$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
echo "$torch_site" > "$site/project_torch.pth"
"$environment/bin/python" -c 'import torch, transformers; print(f"peers: torch {torch.__version__}, transformers {transformers.__version__}")'
