"""Finds the operator library that was built against the installed torch, or builds it, and loads it.

Searched in this order:
    FURLONG_OPS_LIBRARY   a path; used as it is
    build/*/lib           libraries of the source tree whose torch is the installed one
    build/python-TORCH    built now by CMake (operators only: a C++20 compiler, Ninja, Highway and OpenMP are needed)

A library built against another torch does not load: C++ symbols differ between releases. Tried with 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).resolve().parents[2]
NAME = "libfurlong_ops.so"
OLDEST = (2, 11)


def _torch_folder() -> Path:
    return Path(torch.__file__).resolve().parent


def _torch_of(build: Path) -> Path | None:
    """The torch folder that a CMake build folder links, or None."""
    cache = build / "CMakeCache.txt"
    if not cache.exists():
        return None
    values = {}
    for line in cache.read_text().splitlines():
        name, _, value = line.partition("=")
        values[name.split(":")[0]] = value
    return Path(values["FURLONG_TORCH_LINKED"]).resolve() if "FURLONG_TORCH_LINKED" in values else None


def _existing() -> Path | None:
    """The newest library of the source tree's builds that links the installed torch."""
    found = [
        library
        for library in (SOURCE / "build").glob(f"*/lib/{NAME}")
        if "asan" not in library.parts[-3] and _torch_of(library.parents[1]) == _torch_folder()
    ]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _build() -> Path:
    folder = SOURCE / "build" / f"python-{torch.__version__}"
    nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/nvcc"
    cuda = torch.version.cuda is not None and (nvcc.exists() or shutil.which("nvcc") is not None)
    configure = ["cmake", "-S", str(SOURCE), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DFURLONG_OPS_ONLY=ON", f"-DFURLONG_TORCH_DIR={_torch_folder()}"]
    configure += [f"-DFURLONG_CUDA={'ON' if cuda else 'OFF'}"]
    for command in (configure, ["cmake", "--build", str(folder), "--target", "furlong_ops"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            output = done.stdout[-4000:] + done.stderr[-4000:]
            raise RuntimeError(f"furlong_ops: `{' '.join(command)}` failed:\n{output}")
    return folder / "lib" / NAME


@functools.cache
def library_path() -> Path:
    """Where the library lies; builds it if it is nowhere."""
    if "FURLONG_OPS_LIBRARY" in os.environ:
        return Path(os.environ["FURLONG_OPS_LIBRARY"])
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        raise RuntimeError(f"furlong_ops: got torch {torch.__version__}, need {OLDEST[0]}.{OLDEST[1]} or newer")
    return _existing() or _build()


@functools.cache
def load() -> None:
    """Registers torch.ops.furlong. Safe to call again."""
    torch.ops.load_library(str(library_path()))
