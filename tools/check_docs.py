#!/usr/bin/env python3
"""Checks that documents speak of what exists.

In every .md file: each path in backticks or in a link exists; each `bash FILE` and `python3 FILE` names a file; each
`furlong COMMAND --option` is a command and an option that the program declares (app/*.cpp). Documents may use
placeholders: capitals (DIR, NAME), `x` for any operator, `...`, and globs, which must match something.

In every text file: no absolute path of the machine it was written on and no host name of the package mirrors that this
machine is set up to use.
"""

from __future__ import annotations

import configparser
import os
import re
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from repo_files import ROOT, repo_files

SOURCE_ENDINGS = (".md", ".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake")
# Made by a build or a run, or outside of the repository.
MADE = ("build/", "out/", ".venv/", ".cache/", "http:", "https:", "mailto:", "~/", "/")
PLACEHOLDER = re.compile(r"(^|[/_.{-])(x|[A-Z][A-Z_]*)([/_.}-]|$)|\.\.\.|[<>$]")
PATH = re.compile(r"^[\w.*?{},+/-]+$")
MACHINE_PATH = re.compile(r"(?<![\w.$})\]/*-])/(?:work|opt|root)(?=/|\b(?![\w-]))")
SHELL_WORDS = re.compile(r"[;&|#]|\s>")


def expand_braces(name: str) -> list[str]:
    match = re.search(r"\{([^{}]*)\}", name)
    if not match:
        return [name]
    return [
        out
        for part in match.group(1).split(",")
        for out in expand_braces(name[: match.start()] + part + name[match.end() :])
    ]


class Tree:
    """Files and folders of the repository and the commands of the program."""

    def __init__(self, root: Path):
        self.root = root
        self.files = repo_files(root)
        self.paths = set(self.files)
        for name in self.files:
            self.paths.update(str(parent) for parent in Path(name).parents)
        self.tops = {name.split("/")[0] for name in self.paths}
        app = {
            name: (root / name).read_text()
            for name in self.files
            if name.startswith("app/") and name.endswith((".cpp", ".h"))
        }
        self.options = set(re.findall(r"--[a-z][\w-]*", "\n".join(app.values()))) | {"--help", "--version"}
        self.commands: dict[str, set[str]] = {}
        for name, text in app.items():
            names = re.findall(r'add_subcommand\(\s*"([\w-]+)"', text)
            if names:
                # cmd_NAME.cpp declares NAME, and in any order what stands below it.
                own = Path(name).stem.removeprefix("cmd_")
                command = own if own in names else names[0]
                self.commands[command] = set(names) - {command}
        self.programs = {"furlong", "golden_test", "integration_test"}
        for name in self.files:
            parts = name.split("/")
            if name.endswith("_bench.cpp"):
                self.programs.add(parts[-1][: -len(".cpp")])
            if name.endswith("_test.cpp") and len(parts) > 2:
                self.programs.add((parts[2] if parts[1] == "ops" else parts[1]) + "_test")

    @cache
    def has(self, name: str, folder: str) -> bool:
        """A path from the root, from the document's folder or from furlong/; a bare file name: anywhere."""
        for base in ("", folder, "furlong"):
            candidate = os.path.normpath(os.path.join(base, name))
            if (
                candidate in self.paths
                or any(c in name for c in "*?")
                and any(fnmatch(p, candidate) for p in self.paths)
            ):
                return True
        return "/" not in name and any(path.endswith("/" + name) or fnmatch(path, "*/" + name) for path in self.files)


def path_fault(token: str, tree: Tree, folder: str) -> str | None:
    token = re.sub(r":\d+$", "", token).rstrip("/")
    if program := re.fullmatch(r"build/[\w-]+/bin/([\w-]+)", token):
        return (
            None
            if program.group(1) in tree.programs or PLACEHOLDER.search(token)
            else f"no program '{program.group(1)}'"
        )
    if token.startswith(MADE) or PLACEHOLDER.search(token) or not PATH.match(token):
        return None
    if "/" in token and token.split("/")[0] in tree.tops or token.endswith(SOURCE_ENDINGS):
        missing = [name for name in expand_braces(token) if not tree.has(name, folder)]
        return f"no such path '{missing[0]}'" if missing else None
    return None


def command_faults(line: str, tree: Tree) -> list[str]:
    """What is wrong with one shell line."""
    faults = []
    for part in SHELL_WORDS.split(line):
        words = part.split()
        while words and (re.match(r"^[A-Z_]+=", words[0]) or words[0] in ("$", "time", "sudo")):
            words.pop(0)
        if len(words) > 1 and words[0] in ("bash", "python3") and not words[1].startswith("-"):
            if fault := path_fault(words[1], tree, ""):
                faults.append(fault)
        if len(words) > 1 and (words[0] == "furlong" or words[0].endswith("/bin/furlong")):
            faults.extend(furlong_faults(words[1:], tree))
    return faults


def furlong_faults(words: list[str], tree: Tree) -> list[str]:
    faults = []
    command = words[0].rstrip(":,.")
    if re.fullmatch(r"[a-z][\w-]*", command):
        if command not in tree.commands:
            return [f"furlong has no command '{command}'"]
        inner = tree.commands[command]
        second = words[1].rstrip(":,.") if len(words) > 1 else ""
        if inner and re.fullmatch(r"[a-z][a-z-]*", second) and second not in inner:
            faults.append(f"furlong {command} has no command '{second}'")
    for word in words:
        option = re.match(r"\[?(--[a-z][\w-]*)", word)
        if option and option.group(1) not in tree.options:
            faults.append(f"furlong {command} has no option '{option.group(1)}'")
    return faults


def check_document(name: str, tree: Tree) -> list[str]:
    folder = str(Path(name).parent)
    faults, fenced, carried = [], False, ""
    for number, line in enumerate((tree.root / name).read_text().splitlines(), start=1):
        found: list[str] = []
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced:
            carried += line.rstrip("\\") + " "
            if not line.endswith("\\"):
                found, carried = command_faults(carried, tree), ""
        else:
            for span in re.findall(r"`([^`]+)`", line):
                found.extend(command_faults(span, tree))
                if " " not in span and (fault := path_fault(span, tree, folder)):
                    found.append(fault)
            for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", line):
                if not link.startswith(MADE) and not tree.has(link.rstrip("/"), folder):
                    found.append(f"link to '{link}', which does not exist")
        faults.extend(f"{name}:{number}: {fault}" for fault in found)
    return faults


def mirror_hosts() -> set[str]:
    """Hosts of the package mirrors configured on this machine, read where pip and apt read them."""
    texts = [value for key, value in os.environ.items() if key.startswith("PIP_") or key == "UV_INDEX_URL"]
    for path in (Path("/etc/pip.conf"), Path.home() / ".pip/pip.conf", Path.home() / ".config/pip/pip.conf"):
        config = configparser.RawConfigParser()
        try:
            config.read(path)
        except configparser.Error:
            continue
        texts += [value for section in config.sections() for _, value in config.items(section)]
    for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
        if path.is_file():
            texts.append(path.read_text(errors="replace"))
    return {host for text in texts for host in re.findall(r"https?://(?:[^@/\s]*@)?([\w.-]+\.[\w-]+)", text)}


def check_private_names(name: str, text: str, hosts: set[str]) -> list[str]:
    faults = []
    for number, line in enumerate(text.splitlines(), start=1):
        if match := MACHINE_PATH.search(line):
            faults.append(f"{name}:{number}: a path of one machine: '{line[match.start() :].split()[0]}'")
        faults.extend(f"{name}:{number}: names the package host '{host}'" for host in hosts if host in line)
    return faults


def check(root: Path, hosts: set[str]) -> list[str]:
    tree = Tree(root)
    faults = []
    for name in tree.files:
        if name.endswith(".md"):
            faults.extend(check_document(name, tree))
        try:
            text = (root / name).read_text()
        except UnicodeDecodeError:
            continue
        faults.extend(check_private_names(name, text, hosts))
    return faults


def main() -> int:
    faults = check(ROOT, mirror_hosts())
    for line in faults:
        print(line, file=sys.stderr)
    print(f"check_docs: {len(faults)} faults" if faults else "check_docs: ok")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
