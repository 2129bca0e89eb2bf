"""The files of the repository, as the checks see them: tracked or new, never ignored ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def repo_files(root: Path) -> list[str]:
    """Paths relative to `root`, in order. Outside a git work tree (self-tests): every file below it."""
    listing = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0 and (root / ".git").exists():
        names = {name for name in listing.stdout.split("\0") if name}
    else:
        names = {str(path.relative_to(root)) for path in root.rglob("*")}
    return sorted(name for name in names if (root / name).is_file())
