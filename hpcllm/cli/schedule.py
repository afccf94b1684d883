"""The command `schedule`: make or read a schedule, prove it, time it, print and draw it. It starts at once.

    NAME, or `custom` and --file    one schedule           what was proved, the grid, the numbers of each rank
    --compare                       all for one shape      a row each
    --measured TRACE                a step that was run    measured over ideal, the lost time explained

A text file goes by `custom --file FILE`, the words of a run file, so that a mistyped name is never taken for a file.
Imports neither torch nor mpi4py.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from hpcllm.cli.options import add_json, parse_count
from hpcllm.errors import ConfigError, DataError
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.explain import explain, explanation_facts, explanation_lines, explanation_panels
from hpcllm.pipeline.measured import read_trace
from hpcllm.pipeline.picture import Panel, draw
from hpcllm.pipeline.report import (
    compare,
    comparison_facts,
    comparison_lines,
    schedule_facts,
    schedule_lines,
    schedule_panel,
)
from hpcllm.pipeline.schedules import Schedule, make_schedule, read_schedule
from hpcllm.pipeline.timing import Times, simulate
from hpcllm.plotting import picture_path

COLUMNS = 120  # where there is no terminal
UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
LARGEST_BYTES = 1 << 50
LONGEST_DURATION = 1e9
TIMES = ("F", "B", "W", "send")  # keys of --times
SHAPE = ("stages", "microbatches")
MORE = ("chunks", "times", "recompute", "bytes")
TAKES = {  # form of the command -> its options, beside --json and --draw
    "NAME": ("name", *SHAPE, *MORE, "write"),
    "custom": ("name", "file", "times", "recompute", "bytes"),
    "--compare": ("compare", *SHAPE, *MORE),
    "--measured": ("measured",),
}


class Answer(NamedTuple):
    """The answer in three shapes: text, JSON, picture."""

    lines: list[str]
    facts: Any  # for --json
    panels: list[Panel]
    unit: str = "ticks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Prove that a pipeline schedule runs to its end, and show how much of the time its ranks idle and what they "
        "hold. Nothing is run, so it answers at once on a login node."
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="gpipe, 1f1b, interleaved, zb-h1, zb-v, or custom, with --file"
    )
    parser.add_argument("--file", metavar="FILE", help="custom: the schedule as text, as --write writes it")
    parser.add_argument("--stages", metavar="P", help="ranks of one pipeline (mesh.pp)")
    parser.add_argument("--microbatches", metavar="M", help="of one step (pipeline.microbatches)")
    parser.add_argument("--chunks", metavar="V", help="pieces of the model on each rank (default: the schedule's own)")
    parser.add_argument(
        "--times",
        metavar="F=1,B=2,W=1,send=0.1",
        help="of one microbatch, in any unit: forward, whole backward, its weight part, a message "
        "(default: F=1, B=2 F, W=B/2, send=0)",
    )
    parser.add_argument("--recompute", action="store_true", help="each backward pass does the forward pass again")
    parser.add_argument(
        "--bytes", metavar="SIZE", help="of one message, as in 4MiB: microbatch x sequence x hidden x 4"
    )
    parser.add_argument("--compare", action="store_true", help="all schedules side by side, without NAME")
    parser.add_argument("--measured", metavar="TRACE", help="explain a step that was run, from its trace, without NAME")
    parser.add_argument("--draw", metavar="FILE", help="draw a picture, .svg or .png")
    parser.add_argument(
        "--write", metavar="FILE", help="write the schedule as text, to change it and read it by --file"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run one form of the command. Raises UserError."""
    form = form_of(arguments)
    picture = None if arguments.draw is None else picture_path(arguments.draw)
    answer = FORMS[form](arguments)
    if picture:
        canvas = draw(answer.panels, answer.unit)
        _write(picture, lambda: canvas.write(picture))
    print(json.dumps(answer.facts) if arguments.json else "\n".join(answer.lines))
    return 0


def _one(arguments: argparse.Namespace) -> Answer:
    schedule = make_schedule(arguments.name, *_shape(arguments))
    answer = _proved(schedule, arguments)
    if arguments.write is not None:
        path = Path(arguments.write)
        _write(path, lambda: path.write_text(schedule.text(), encoding="utf-8"))
    return answer


def _custom(arguments: argparse.Namespace) -> Answer:
    try:
        text = Path(arguments.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the schedule {arguments.file!r} cannot be read: {error}") from error
    return _proved(read_schedule(text), arguments)


def _proved(schedule: Schedule, arguments: argparse.Namespace) -> Answer:
    check(schedule)
    times, size = _times_and_bytes(arguments)
    timeline = simulate(schedule, times)
    lines = schedule_lines(timeline, times, _columns(), size)
    return Answer(lines, schedule_facts(timeline, times, size), [schedule_panel(timeline)])


def _compare(arguments: argparse.Namespace) -> Answer:
    times, size = _times_and_bytes(arguments)
    found = compare(*_shape(arguments), times)
    panels = [schedule_panel(entry.timeline) for entry in found.entries]
    return Answer(comparison_lines(found, size), comparison_facts(found, size), panels)


def _measured(arguments: argparse.Namespace) -> Answer:
    explanations = [explain(measured) for measured in read_trace(Path(arguments.measured))]
    lines = explanation_lines(explanations, _columns())
    return Answer(lines, explanation_facts(explanations), explanation_panels(explanations), "ms")


FORMS = {"NAME": _one, "custom": _custom, "--compare": _compare, "--measured": _measured}


def _shape(arguments: argparse.Namespace) -> tuple[int, int, int | None]:
    ranks, microbatches = (parse_count(name, getattr(arguments, name)) for name in SHAPE)
    return ranks, microbatches, None if arguments.chunks is None else parse_count("chunks", arguments.chunks)


def _times_and_bytes(arguments: argparse.Namespace) -> tuple[Times, int | None]:
    times = parse_times(arguments.times, arguments.recompute)
    return times, None if arguments.bytes is None else parse_bytes(arguments.bytes)


def _columns() -> int:
    return shutil.get_terminal_size((COLUMNS, 24)).columns


def _write(path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def form_of(arguments: argparse.Namespace) -> str:
    """Find the form of the command, a key of TAKES. Raises ConfigError for options that do not go together."""
    found = "--compare" if arguments.compare else "--measured" if arguments.measured is not None else arguments.name
    found = found if found in TAKES else "NAME"
    needed = ("name", *SHAPE) if found == "NAME" else SHAPE if found == "--compare" else TAKES[found][:2]
    every = dict.fromkeys(option for options in TAKES.values() for option in options)
    given = [option for option in every if getattr(arguments, option) not in (None, False)]
    wrong = [_option_name(option) for option in given if option not in TAKES[found]]
    missing = [_option_name(option) for option in needed if option not in given]
    if wrong or missing:
        problem = f"does not take {', '.join(wrong)}" if wrong else f"needs {', '.join(missing)}"
        raise ConfigError(
            f"schedule {found} {problem}; it takes {', '.join(map(_option_name, TAKES[found]))}, --draw, --json"
        )
    return found


def parse_times(text: str | None, recompute: bool) -> Times:
    """Parse 'F=1,B=2,W=1,send=0.1'. Defaults: F=1, B = 2 F, W = B / 2, send=0. Raises ConfigError."""
    given: dict[str, float] = {}
    for word in text.split(",") if text is not None else ():
        key, equals, value = word.strip().partition("=")
        if key not in TIMES or not equals or key in given:
            raise ConfigError(
                f"--times {text!r}: {word!r} is not one of {'=, '.join(TIMES)}=, each once, as in F=1,B=2,W=1"
            )
        given[key] = _duration(key, value)
    forward = given.get("F", 1.0)
    backward = given.get("B", 2 * forward)
    weight = given.get("W", backward / 2)
    if weight > backward:
        raise ConfigError(f"--times: W={weight:g} is a part of B={backward:g}; it can be that at most")
    return Times(forward, backward, weight, given.get("send", 0.0), recompute)


def parse_bytes(text: str) -> int:
    """Parse '4194304', '4MiB' or '1.5 GiB', in bytes. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", text, re.ASCII)
    size = float(match[1]) * UNITS[match[2]] if match and match[2] in UNITS else 0.0
    if not 1 <= size <= LARGEST_BYTES or size != int(size):
        raise ConfigError(
            f"--bytes {text!r} is no size of a message; valid: 4194304, 512KiB, 4MiB, 1.5GiB, up to 1024TiB"
        )
    return int(size)


def _duration(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    positive = key in ("F", "B")
    if not 0 <= value <= LONGEST_DURATION or (positive and value == 0):
        least = "above 0" if positive else "from 0"
        raise ConfigError(f"--times: {key}={text!r} is no time; valid: a number {least}, up to {LONGEST_DURATION:g}")
    return value


def _option_name(option: str) -> str:
    return "NAME" if option == "name" else f"--{option}"
