#!/usr/bin/env python3
"""Checks who includes whom against the rank table of ARCHITECTURE.md.

The table stands under the heading "Who may include whom":

    | rank | rooms | torch headers |

A file may include files of lower rank, and files of its own room with the same rank or lower. A room is a folder of
furlong/ (an operator's folder below furlong/ops/); `ops/**/layer*` and the like are patterns, and the most specific
pattern that matches a file gives its rank. Everyone may include `ops/common`; layer files may use other operators'
headers; tests and benches may include tests/support. Lines "- `A` includes `B`: reason" of that section are exceptions.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from repo_files import ROOT, repo_files

HEADING = "Who may include whom"
SOURCE_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
OURS = ("furlong/", "app/", "tests/", "bench/", "python/")
TORCH = re.compile(r"(torch|ATen|c10)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
# Sources of the operators' shared library may use only these parts of base, which need no linking.
HEADER_ONLY_BASE = {f"furlong/base/{name}.h" for name in ("error", "shape", "parallel", "rng", "clock", "result")}


@dataclass(frozen=True)
class Rule:
    rank: int
    pattern: str  # of a path from the repository's root
    torch_free: bool

    def matches(self, path: str) -> bool:
        if any(c in self.pattern for c in "*?"):
            return fnmatch(path, self.pattern)
        return path == self.pattern or path.startswith(self.pattern + "/")


@dataclass(frozen=True)
class Table:
    rules: list[Rule]
    exceptions: list[tuple[str, str]]

    def rule_of(self, path: str) -> Rule | None:
        """A pattern for a kind of file (`*_test.cpp`, `layer*`) beats a folder; a longer folder beats a shorter one."""
        found = [rule for rule in self.rules if rule.matches(path)]
        return max(found, key=lambda rule: (rule.pattern.startswith("*"), len(rule.pattern)), default=None)

    def excepted(self, source: str, target: str) -> bool:
        return any(fnmatch(source, a) and fnmatch(target, b) for a, b in self.exceptions)


def read_table(text: str) -> Table:
    """The rank table. Patterns are backticked; those that are no top-level folder are below furlong/."""
    if f"## {HEADING}" not in text:
        raise SystemExit(f"check_layers: ARCHITECTURE.md has no section '{HEADING}'")
    rules: list[Rule] = []
    exceptions: list[tuple[str, str]] = []
    for line in text.split(f"## {HEADING}", 1)[1].splitlines()[1:]:
        if line.startswith("#"):
            break
        if match := re.match(r"- `([^`]+)` includes `([^`]+)`: \w", line):
            exceptions.append((match.group(1), match.group(2)))
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) < 3 or not cells[0].isdigit():
            continue
        allowed = set(re.findall(r"`([^`]+)`", cells[2]))
        for name in re.findall(r"`([^`]+)`", cells[1]):
            pattern = name if name.startswith(OURS) or name + "/" in OURS or name.startswith("*") else f"furlong/{name}"
            rules.append(Rule(int(cells[0]), pattern, cells[2].startswith("no")))
        rules.extend(Rule(int(cells[0]), f"furlong/{name}", False) for name in allowed)
    if not rules:
        raise SystemExit(
            "check_layers: the rank table of ARCHITECTURE.md is empty or not of the form | rank | rooms | torch |"
        )
    return Table(rules, exceptions)


def room_of(path: str) -> str:
    parts = path.split("/")
    if parts[0] != "furlong":
        return parts[0]
    return "/".join(parts[:3] if parts[1] == "ops" else parts[:2])


def fault(source: str, target: str, table: Table) -> str | None:
    """Why `source` may not include `target` (both in the repository), or None."""
    mine, other = table.rule_of(source), table.rule_of(target)
    if mine is None:
        return "stands in no room of the rank table"
    if other is None:
        return f"{target} stands in no room of the rank table"
    if other.rank > mine.rank:
        return f"rank {mine.rank} may not include rank {other.rank}"
    own_room = room_of(source) == room_of(target)
    in_ops_library = source.startswith("furlong/ops/") and mine.rank == 1
    if in_ops_library and target.startswith("furlong/base/") and target not in HEADER_ONLY_BASE:
        return "the operator library uses only header-only parts of base"
    if other.rank < mine.rank or own_room or target.startswith("furlong/ops/common/"):
        return None
    layers = source.startswith("furlong/ops/") and target.startswith("furlong/ops/") and mine.rank == 2
    harness = room_of(target) in ("tests", "bench")
    if layers or harness or table.excepted(source, target):
        return None
    return f"sideways: {room_of(source)} and {room_of(target)} have the same rank {mine.rank}"


def check(root: Path) -> list[str]:
    table = read_table((root / "ARCHITECTURE.md").read_text())
    faults = []
    for source in repo_files(root):
        if not source.endswith(SOURCE_SUFFIXES) or not source.startswith(OURS):
            continue
        text = (root / source).read_text()
        rule = table.rule_of(source)
        if rule is None:
            faults.append(f"{source}: stands in no room of the rank table")
            continue
        for match in INCLUDE.finditer(text):
            quote, target = match.groups()
            where = f"{source}:{text.count(chr(10), 0, match.start(2)) + 1}"
            if target.startswith(OURS):
                why = fault(source, target, table)
            elif TORCH.match(target) and rule.torch_free:
                why = "this room includes no torch header"
            elif quote == '"' and (root / source).parent.joinpath(target).exists():
                why = "paths of includes start at the repository's root"
            else:
                why = None
            if why:
                faults.append(f"{where}: includes {target}: {why}")
    return faults


def main() -> int:
    faults = check(ROOT)
    for line in faults:
        print(line, file=sys.stderr)
    print(f"check_layers: {len(faults)} faults" if faults else "check_layers: ok")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
