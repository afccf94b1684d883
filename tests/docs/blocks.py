"""Blocks of Markdown pages, and how they are run: in order, in one folder a page, as a reader would type them.

    ```bash          run as it stands                          <!-- not run: WHY -->   above a block: it is only shown
    ```console       `$ ` lines run; lines below are output    <!-- output varies: WHY -->   run, output not compared
    ```python        run, on N ranks with <!-- ranks: N -->    <!-- exit code: 0 or 1 -->
    ```toml          a run file, with <!-- save as NAME --> kept for the blocks below

`mpirun` is jobscripts/local/launch.sh, so that more ranks than cores start with any MPI and as root.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "jobscripts/README.md"]
)
FENCE = re.compile(r"((?:<!--(?:(?!-->).)*-->\n+)*)^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTE = re.compile(r"<!-- (not run|output varies|save as|ranks|exit code)(?::)? (.*?) -->")
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
TOLERANCE = 0.02
MPIRUN = """#!/usr/bin/env bash
PATH=${{PATH#*:}}
. {root}/jobscripts/local/launch.sh
hpcllm_say() {{ :; }}
shift
hpcllm_mpirun "$@"
"""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    notes: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "console", "python") and "not run" not in self.notes


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[2], found[3], dict(NOTE.findall(found[1])))
        for found in FENCE.finditer(text)
    ]


def commands_and_output(block: Block) -> list[tuple[str, list[str]]]:
    """Split a console block into commands, each with the lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\") and not found[-1][1]:
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        else:
            found[-1][1].append(line)
    return found


def shows(shown: str, line: str) -> bool:
    """Say whether a line of output is the one that is shown: words alike, numbers within 2 %, `...` for anything."""
    whole = not shown.rstrip().endswith("...")
    wanted, words = shown.removesuffix("...").split(), line.split()
    if len(words) < len(wanted) or (whole and len(words) != len(wanted)):
        return False
    return all(alike(a, b) for a, b in zip(wanted, words, strict=False))


def alike(shown: str, word: str) -> bool:
    if shown == word or shown == "...":
        return True
    if NUMBER.sub("#", shown) != NUMBER.sub("#", word):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(word), strict=True)
    return all(abs(number(a) - number(b)) <= TOLERANCE * abs(number(a)) for a, b in pairs)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def missing(shown: list[str], output: str) -> list[str]:
    """List the lines shown that do not come, in their order."""
    lines = iter(output.splitlines())
    return [each for each in shown if each.strip(" .") and not any(shows(each, line) for line in lines)]


class Folder:
    """A folder in which the blocks of one page run, with the repository's own folders beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("jobscripts", "docs", "perf", "README.md"):
            (path / name).symlink_to(ROOT / name)
        tools = path / ".tools"
        tools.mkdir()
        self.script(tools / "mpirun", MPIRUN.format(root=shlex.quote(str(ROOT))))
        path_before = f"{tools}:{Path(sys.executable).parent}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HPCLLM_", "PYTEST_"))}
        self.environment = kept | {
            "PATH": f"{path_before}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "80",
        }

    @staticmethod
    def script(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def run(self, block: Block) -> list[str]:
        """Run a block; return what is wrong with it, nothing if all is well."""
        if block.language == "console":
            return [
                wrong for command, shown in commands_and_output(block) for wrong in self.shell(block, command, shown)
            ]
        if block.language == "python":
            (self.path / "block.py").write_text(block.text, encoding="utf-8")
            return self.shell(block, f"mpirun -n {block.notes.get('ranks', '1')} python block.py", [])
        return self.shell(block, block.text, [])

    def shell(self, block: Block, command: str, shown: list[str]) -> list[str]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.path,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=110,
        )
        valid = {int(code) for code in re.findall(r"\d+", block.notes.get("exit code", "0"))}
        if done.returncode not in valid:
            return [
                f"{block.place}: exit code {done.returncode}\n{command}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
            ]
        if "output varies" in block.notes:
            return []
        return [
            f"{block.place}: this line does not come: {line}\n{done.stdout}" for line in missing(shown, done.stdout)
        ]
