"""The command `schedule`: make or read a schedule, prove it, time it, print and draw it. It starts at once.

    NAME, or `custom` and --file    one schedule           what was proved, the grid, the numbers of each rank
    --compare                       all for one shape      a row each
    --measured TRACE                a step that was run    measured over ideal, the lost time explained

A text file goes by `custom --file FILE`, the words of a run file, so that a mistyped name is never taken for a file.
Imports neither torch nor mpi4py.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hpcllm.cli.options import count, options_given, spelled
from hpcllm.config.input_files import LARGEST_TABLE_BYTES, read_text
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
from hpcllm.pipeline.schedules import SCHEDULES, Schedule, make_schedule, read_schedule
from hpcllm.pipeline.timing import Times, simulate
from hpcllm.plotting import picture_path
from hpcllm.system.output import COLUMNS, add_output, show
from hpcllm.system.raw_files import writing

WIDE = 120  # columns of --wide where there is no terminal
UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
LARGEST_BYTES = 1 << 50
LONGEST_DURATION = 1e9
TIMES = ("F", "B", "W", "send")  # keys of --times
SHAPE = ("stages", "microbatches")
MORE = ("chunks", "times", "recompute", "bytes")
ALWAYS = ("plot", "json")
TAKES = {  # form of the command -> its options
    "NAME": ("name", *SHAPE, *MORE, "write", *ALWAYS),
    "custom": ("name", "file", "times", "recompute", "bytes", *ALWAYS),
    "--compare": ("compare", *SHAPE, *MORE, *ALWAYS),
    "--measured": ("measured", *ALWAYS),
}
NEEDS = {"NAME": ("name", *SHAPE), "custom": ("name", "file"), "--compare": SHAPE, "--measured": ("measured",)}


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
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help=f"{', '.join(SCHEDULES)}, or custom, with --file")
    add("--file", metavar="FILE", help="custom: the schedule as text, as --write writes it")
    add("--stages", type=count, metavar="P", help="ranks of one pipeline (mesh.pp)")
    add("--microbatches", type=count, metavar="M", help="of one step (pipeline.microbatches)")
    add("--chunks", type=count, metavar="V", help="pieces of the model on each rank (default: the schedule's own)")
    add(
        "--times",
        type=parse_times,
        metavar="F=1,B=2,W=1,send=0.1",
        help="of one microbatch, in any unit: forward, whole backward, its weight part, a message "
        "(default: F=1, B=2 F, W=B/2, send=0)",
    )
    add("--recompute", action="store_true", help="each backward pass does the forward pass again")
    words = "of one message, as in 4MiB: microbatch x sequence x hidden x 4"
    add("--bytes", type=parse_bytes, metavar="SIZE", help=words)
    add("--compare", action="store_true", help="all schedules side by side, without NAME")
    add("--measured", metavar="TRACE", help="explain a step that was run, from its trace, without NAME")
    add("--plot", type=picture_path, metavar="FILE", help="draw a picture, .svg or .png")
    add("--write", metavar="FILE", help="write the schedule as text, to change it and read it by --file")
    add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run one form of the command. Raises UserError."""
    form = "--compare" if arguments.compare else "--measured" if arguments.measured is not None else arguments.name
    form = form if form in TAKES else "NAME"
    given = options_given(arguments, "schedule", form, TAKES)
    if missing := [key for key in NEEDS[form] if key not in given]:
        raise ConfigError(f"schedule {form} needs {spelled(missing)}; it takes {spelled(TAKES[form])}")
    answer = FORMS[form](arguments)
    if arguments.plot:
        canvas = draw(answer.panels, answer.unit)
        with writing(repr(str(arguments.plot))):
            canvas.write(arguments.plot)
    show(arguments, answer.facts, answer.lines)
    return 0


def _one(arguments: argparse.Namespace) -> Answer:
    schedule = make_schedule(arguments.name, arguments.stages, arguments.microbatches, arguments.chunks)
    answer = _proved(schedule, arguments)
    if arguments.write is not None:
        with writing(repr(arguments.write)):
            Path(arguments.write).write_text(schedule.text(), encoding="utf-8")
    return answer


def _custom(arguments: argparse.Namespace) -> Answer:
    try:
        text = read_text(arguments.file, LARGEST_TABLE_BYTES)
    except ValueError as error:
        raise DataError(f"the schedule {arguments.file!r} cannot be read: {error}") from error
    return _proved(read_schedule(text), arguments)


def _proved(schedule: Schedule, arguments: argparse.Namespace) -> Answer:
    check(schedule)
    times = _times(arguments)
    timeline = simulate(schedule, times)
    lines = schedule_lines(timeline, times, _columns(arguments), arguments.bytes)
    return Answer(lines, schedule_facts(timeline, times, arguments.bytes), [schedule_panel(timeline)])


def _compare(arguments: argparse.Namespace) -> Answer:
    found = compare(arguments.stages, arguments.microbatches, arguments.chunks, _times(arguments))
    panels = [schedule_panel(entry.timeline) for entry in found.entries]
    return Answer(
        comparison_lines(found, arguments.bytes, _columns(arguments)), comparison_facts(found, arguments.bytes), panels
    )


def _measured(arguments: argparse.Namespace) -> Answer:
    explanations = [explain(measured) for measured in read_trace(Path(arguments.measured))]
    lines = explanation_lines(explanations, _columns(arguments))
    return Answer(lines, explanation_facts(explanations), explanation_panels(explanations), "ms")


FORMS = {"NAME": _one, "custom": _custom, "--compare": _compare, "--measured": _measured}


def _times(arguments: argparse.Namespace) -> Times:
    return replace(arguments.times or Times(), recompute=arguments.recompute)


def _columns(arguments: argparse.Namespace) -> int:
    """Return the columns of a drawing: those of the terminal, without --wide at most 80."""
    if arguments.wide:
        return shutil.get_terminal_size((WIDE, 24)).columns
    return min(shutil.get_terminal_size((COLUMNS, 24)).columns, COLUMNS)


def parse_times(text: str) -> Times:
    """Convert 'F=1,B=2,W=1,send=0.1'. Defaults: F=1, B = 2 F, W = B / 2, send=0."""
    given: dict[str, float] = {}
    for word in text.split(","):
        key, equals, value = word.strip().partition("=")
        if key not in TIMES or not equals or key in given:
            raise argparse.ArgumentTypeError(
                f"{text!r}: {word!r} is not one of {'=, '.join(TIMES)}=, each once, as in F=1,B=2,W=1"
            )
        given[key] = _duration(key, value)
    forward = given.get("F", 1.0)
    backward = given.get("B", 2 * forward)
    weight = given.get("W", backward / 2)
    if weight > backward:
        raise argparse.ArgumentTypeError(f"W={weight:g} is a part of B={backward:g}; it can be that at most")
    return Times(forward, backward, weight, given.get("send", 0.0))


def parse_bytes(text: str) -> int:
    """Convert '4194304', '4MiB' or '1.5 GiB', to bytes."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", text, re.ASCII)
    size = float(match[1]) * UNITS[match[2]] if match and match[2] in UNITS else 0.0
    if not 1 <= size <= LARGEST_BYTES or size != int(size):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size of a message; valid: 4194304, 512KiB, 4MiB, 1.5GiB, up to 1024TiB"
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
        valid = f"a number {least}, up to {LONGEST_DURATION:g}"
        raise argparse.ArgumentTypeError(f"{key}={text!r} is no time; valid: {valid}")
    return value
