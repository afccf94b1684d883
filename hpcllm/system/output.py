"""Output of commands: lines for people in 80 columns, or facts as JSON; colour on a terminal; whole files.

                 standard output                       FILE
    (nothing)    lines, folded at 80 columns
    --json       JSON alone
    --json FILE  lines                                 JSON, written beside and renamed
    --wide       lines as long as they are

A line of more than 80 columns is folded at spaces; words such as paths stay whole. Tables leave out columns first
(`narrowed` in text.py). Pure: imports neither torch nor mpi4py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpcllm.config.input_files import fault_of
from hpcllm.config.names import shown
from hpcllm.errors import ConfigError
from hpcllm.system.text import TableLine, harmless, stacked

COLUMNS = 80
STANDARD_OUTPUT = Path("-")
COLOURS = {"BREAKS": "1;31", "SLOW": "1;33", "NOT ENOUGH MEMORY": "1;31", "damaged": "31"}  # word -> of ANSI
_COLOURED = re.compile("|".join(rf"\b{word}\b" for word in COLOURS))


def add_output(parser: argparse._ActionsContainer, about: str = "the answer as JSON") -> None:
    """Add --json [FILE] and --wide."""
    words = f"{about}: on standard output alone, or in FILE.json beside the text"
    parser.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, type=json_file, metavar="FILE", help=words)
    parser.add_argument("--wide", action="store_true", help="whole tables and lines (default: 80 columns)")


def json_file(text: str) -> Path:
    """Convert the FILE of --json. Raises ConfigError for one that cannot be written."""
    path = Path(text or "-")
    check_writable(path)
    return path


def is_json_alone(arguments: argparse.Namespace) -> bool:
    """Return True if standard output is for JSON alone."""
    return bool(arguments.json == STANDARD_OUTPUT)


def show(arguments: argparse.Namespace, facts: Any, lines: Iterable[str], wide: bool = False) -> None:
    """Print the lines, or the facts as JSON; write the file of --json. wide: never fold. Raises ConfigError."""
    if arguments.json:
        write_json(arguments, facts)
    if not is_json_alone(arguments):
        say(lines, wide or arguments.wide)


def write_json(arguments: argparse.Namespace, facts: Any) -> None:
    """Print the facts of --json, or write its FILE whole. Raises ConfigError."""
    import json  # not for --help, which has no time for it

    if is_json_alone(arguments):
        print(json.dumps(facts), flush=True)
    else:
        write_whole(arguments.json, json.dumps(facts, indent=1) + "\n")


def say(lines: Iterable[str], wide: bool = False) -> None:
    """Print lines for people, folded at 80 columns unless wide, with colour on a terminal."""
    lines, coloured = list(lines) if wide else list(_narrow(lines)), has_colour(sys.stdout)
    parts = (part for each in lines for part in harmless(each).split("\n"))
    text = "\n".join(line for part in parts for line in ([part] if wide else folded(part)))
    if lines:
        print(_COLOURED.sub(_paint, text) if coloured else text, flush=True)


def _narrow(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines; each table that is wider than 80 columns in parts, one under the other."""
    for _, group in itertools.groupby(lines, lambda line: id(getattr(line, "whole", None))):
        of_group = list(group)
        first = of_group[0]
        if isinstance(first, TableLine) and max(map(len, of_group)) > COLUMNS:
            yield from stacked(first, COLUMNS)
        else:
            yield from of_group


def folded(line: str, columns: int = COLUMNS) -> list[str]:
    """Fold one line at spaces; what follows is indented two columns more than its beginning, a comment stays one."""
    if len(line) <= columns:
        return [line]
    import textwrap  # not for --help, which has no time for it

    indent = "#   " if line.startswith("# ") else " " * min(len(line) - len(line.lstrip()) + 2, columns // 2)
    return textwrap.wrap(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def has_colour(stream: Any) -> bool:
    """Return True for a terminal, unless NO_COLOR or TERM=dumb says otherwise; FORCE_COLOR makes it true anywhere."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(stream and stream.isatty() and os.environ.get("TERM") != "dumb")


def error_line(message: str) -> str:
    """Write 'hpcllm: error: ...': one line in a log, so that a search finds it whole; folded on a terminal."""
    text = harmless(f"hpcllm: error: {message}")
    if sys.stderr and sys.stderr.isatty():
        text = "\n".join(folded(text))
    return text.replace("error", "\x1b[1;31merror\x1b[0m", 1) if has_colour(sys.stderr) else text


def _paint(found: re.Match[str]) -> str:
    return f"\x1b[{COLOURS[found[0]]}m{found[0]}\x1b[0m"


def write_whole(path: Path, text: str) -> None:
    """Write beside the path, then rename: whoever reads sees a whole file. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def check_writable(*paths: Path | None) -> None:
    """Raise ConfigError for a file that could not be written, before the work that it is to hold."""
    for path in paths:
        if path is None or path == STANDARD_OUTPUT:
            continue
        if fault := fault_of(path):
            raise ConfigError(f"cannot write {shown(str(path))}: {fault}")
        if path.is_dir():
            raise ConfigError(f"cannot write {str(path)!r}: it is a folder; valid: the name of a file")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(f"cannot write {str(path)!r}: folder {str(path.parent)!r} is not there or not writable")
