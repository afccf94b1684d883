"""What `plan` is asked: which options go together, and their texts checked, before any work. Pure."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcllm.errors import ConfigError
from hpcllm.perf.arguments import picture_path
from hpcllm.pipeline.options import count

COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
ROWS, MOST_ROWS = ("top", "explain", "rank"), 1000
MORE = ("sequence", "tokens", "explain", "write", "plot")
TAKES = {  # what each form takes, beside --json; the first ones it needs
    "--devices": ("machine", "model", "devices", "global_batch", "constraints", "top", "rank", *MORE),
    "--layout": ("machine", "model", "layout", "global_batch", "devices", *MORE),
    "--calibrate": ("calibrate", "output"),
}
NEEDS = {"--devices": 4, "--layout": 3, "--calibrate": 1}
WHY = {
    "machine": "a name of hpcllm/machines, or a file like those",
    "model": "a preset, as gpt3-175b, or a shape, as layers=24,hidden=2048,heads=16,vocab=50304,sequence=2048",
    "devices": "how many there are to use, or --layout for one as given",
    "global_batch": "samples of a step over all devices; usual are 1 to 4 million tokens, as 1024 samples of 2048",
    "layout": "as in tp=8,pp=8,dp=2,micro_batch=1,recompute=full",
    "calibrate": "what `python -m hpcllm.perf step --calibrate` wrote",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, of one machine and one model."""

    machine: str
    model: str
    devices: int | None
    layout: str  # empty: search
    global_batch: int | None  # None: it stands in the layout
    sequence: int | None
    tokens: float | None  # to be trained on; None: a usual number for the model
    constraints: tuple[str, ...]
    top: int
    explain: int | None  # a rank of the table
    rank: int  # of the row that is written
    write: Path | None
    plot: Path | None


def form(arguments: argparse.Namespace) -> str:
    """Which form of the command this is, a key of TAKES. Raises ConfigError for what does not go together."""
    given = {key for keys in TAKES.values() for key in keys if getattr(arguments, key) not in (None, [])}
    found = "--calibrate" if "calibrate" in given else "--layout" if "layout" in given else "--devices"
    wrong = [_said(key) for key in sorted(given) if key not in TAKES[found]]
    if wrong:
        takes = ", ".join(map(_said, TAKES[found]))
        raise ConfigError(f"plan {found} does not take {', '.join(wrong)}; it takes {takes}, --json")
    if "rank" in given and "write" not in given:
        raise ConfigError("--rank is the row that --write takes; valid: with --write, or --explain RANK")
    missing = [key for key in TAKES[found][: NEEDS[found]] if key not in given]
    if missing:
        raise ConfigError(f"plan needs {_said(missing[0])}: {WHY[missing[0]]}")
    return found


def question(arguments: argparse.Namespace) -> Question:
    """Of a search or of one layout, every text checked by itself. Raises ConfigError."""
    if arguments.write is not None and Path(arguments.write).exists():
        raise ConfigError(f"--write {arguments.write!r} is there already; valid: the name of a new file")
    return Question(
        machine=arguments.machine,
        model=arguments.model,
        layout=arguments.layout or "",
        constraints=tuple(arguments.constraints),
        tokens=None if arguments.tokens is None else _tokens(arguments.tokens),
        top=_count(arguments, "top") or 10,
        rank=_count(arguments, "rank") or 1,
        write=None if arguments.write is None else Path(arguments.write),
        plot=None if arguments.plot is None else picture_path(arguments.plot),
        **{key: _count(arguments, key) for key in ("devices", "global_batch", "sequence", "explain")},
    )


def _count(arguments: argparse.Namespace, key: str) -> Any:
    text = getattr(arguments, key)
    if text is None:
        return None
    number = count(key.replace("_", "-"), text)
    if key in ROWS and number > MOST_ROWS:
        raise ConfigError(f"{_said(key)} {number} is out of range; valid: 1 to {MOST_ROWS}")
    return number


def _tokens(text: str) -> float:
    match = re.fullmatch(r"([0-9.]{1,20}(?:[eE][+]?[0-9]{1,2})?) ?([KMBT]?)", text, re.ASCII)
    try:
        value = float(match[1]) * COUNTS[match[2]] if match else math.nan
    except ValueError:  # as 1.2.3
        value = math.nan
    if not 1 <= value <= 1e18:
        raise ConfigError(f"--tokens {text!r} is no number of tokens; valid: 1 to 1e18, as 300e9, 300B or 1.4T")
    return value


def _said(key: str) -> str:
    return f"--{key.replace('_', '-')}"
