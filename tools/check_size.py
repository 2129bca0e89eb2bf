#!/usr/bin/env python3
"""Reports long files and functions.

Fails on a file above the limit (600 lines; 800 for device code) that is not in EXEMPT. Functions above 60 lines
(150 for kernels) are listed as outliers, which is a report and never a failure.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from repo_files import ROOT, repo_files

FILE_LIMIT = 600
DEVICE_FILE_LIMIT = 800
FUNCTION_AIM = 60
KERNEL_AIM = 150
DEVICE_SUFFIXES = (".cu", ".cuh")
SOURCE_SUFFIXES = (".h", ".cpp", ".py", ".sh", ".cmake", *DEVICE_SUFFIXES)

# Path: reason. This list should only shrink.
EXEMPT: dict[str, str] = {}

CPP_NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
NOT_A_FUNCTION = re.compile(r"^\s*(?:if|else|for|while|switch|do|try|catch|namespace|class|struct|union|enum|extern)\b")
FUNCTION_NAME = re.compile(r"([~\w:]+|operator\s*\S+?)\s*\(")


def blank_noise(text: str) -> str:
    """Comments and literals without their content, line breaks kept."""
    return CPP_NOISE.sub(lambda match: "\n" * match.group().count("\n") or " ", text)


def cpp_functions(text: str) -> list[tuple[str, int, int]]:
    """(name, first line, number of lines) of every outermost function body."""
    clean = blank_noise(text)
    functions: list[tuple[str, int, int]] = []
    open_braces: list[tuple[str, int] | None] = []  # None: a scope that is no function
    header_start, line = 0, 1
    for position, char in enumerate(clean):
        if char == "\n":
            line += 1
        elif char == "{":
            header = re.sub(r"(?m)^\s*#.*$", "", clean[header_start:position]).strip()
            inside = any(open_braces)
            name = FUNCTION_NAME.search(header)
            is_function = (
                bool(name) and not inside and not NOT_A_FUNCTION.match(header) and "=" not in header.split("(")[0]
            )
            open_braces.append((name.group(1), line - header.count("\n")) if is_function and name else None)
            header_start = position + 1
        elif char == "}":
            scope = open_braces.pop() if open_braces else None
            if scope:
                functions.append((scope[0], scope[1], line - scope[1] + 1))
            header_start = position + 1
        elif char == ";":
            header_start = position + 1
    return functions


def python_functions(text: str) -> list[tuple[str, int, int]]:
    import ast

    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return [(node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1) for node in nodes]


def check(root: Path, exempt: dict[str, str]) -> tuple[list[str], list[str]]:
    """(faults, outliers)."""
    faults, outliers = [], []
    for name in repo_files(root):
        if not name.endswith(SOURCE_SUFFIXES):
            continue
        text = (root / name).read_text()
        lines = text.count("\n")
        device = name.endswith(DEVICE_SUFFIXES)
        limit = DEVICE_FILE_LIMIT if device else FILE_LIMIT
        if lines > limit and name not in exempt:
            faults.append(f"{name}: {lines} lines, at most {limit}: split it")
        if lines <= limit and name in exempt:
            faults.append(f"{name}: {lines} lines, no longer needs its exemption in check_size.py")
        if name.endswith(".sh") or name.endswith(".cmake"):
            continue
        for function, first, length in python_functions(text) if name.endswith(".py") else cpp_functions(text):
            if length > (KERNEL_AIM if device else FUNCTION_AIM):
                outliers.append(f"{name}:{first}: {function}: {length} lines")
    faults.extend(f"{name}: exempt but does not exist" for name in exempt if not (root / name).exists())
    return faults, outliers


def main() -> int:
    faults, outliers = check(ROOT, EXEMPT)
    for line in outliers:
        print(f"outlier  {line}")
    for line in faults:
        print(line, file=sys.stderr)
    summary = f"{len(faults)} faults" if faults else "ok"
    print(f"check_size: {summary}, {len(outliers)} functions above {FUNCTION_AIM} lines ({KERNEL_AIM} in device code)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
