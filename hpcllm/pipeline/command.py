"""The command `schedule`: make or read a schedule, prove it, time it, print and draw it. Pure; it starts at once.

    NAME, or `custom` and --file    one schedule           what was proved, the grid, the numbers of each rank
    --compare                       all for one shape      a row each
    --measured TRACE                a step that was run    measured over ideal, the lost time explained

A text file goes by `custom --file FILE`, the words of a run file, so that a mistyped name is never taken for a file.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from hpcllm.errors import ConfigError, DataError
from hpcllm.pipeline import comparison, measured_report, options, report
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.explain import explain
from hpcllm.pipeline.measured import read_trace
from hpcllm.pipeline.picture import Panel, draw
from hpcllm.pipeline.schedules import Schedule, make_schedule, read_schedule
from hpcllm.pipeline.timing import simulate

COLUMNS = 120  # where there is no terminal


class Answer(NamedTuple):
    """The same three ways."""

    lines: list[str]
    facts: Any  # for --json
    panels: list[Panel]
    unit: str = "ticks"


def run(arguments: argparse.Namespace) -> int:
    """One form of the command. Raises UserError."""
    form = options.form(arguments)
    picture = None if arguments.draw is None else options.picture(arguments.draw)
    answer = FORMS[form](arguments)
    if picture:
        canvas = draw(answer.panels, answer.unit)
        _written(picture, lambda: canvas.write(picture))
    print(json.dumps(answer.facts) if arguments.json else "\n".join(answer.lines))
    return 0


def _one(arguments: argparse.Namespace) -> Answer:
    schedule = make_schedule(arguments.name, *_shape(arguments))
    answer = _proved(schedule, arguments)
    if arguments.write is not None:
        path = Path(arguments.write)
        _written(path, lambda: path.write_text(schedule.text(), encoding="utf-8"))
    return answer


def _custom(arguments: argparse.Namespace) -> Answer:
    try:
        text = Path(arguments.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the schedule {arguments.file!r} cannot be read: {error}") from error
    return _proved(read_schedule(text), arguments)


def _proved(schedule: Schedule, arguments: argparse.Namespace) -> Answer:
    check(schedule)
    times = options.times(arguments.times, arguments.recompute)
    size = None if arguments.bytes is None else options.message_bytes(arguments.bytes)
    timeline = simulate(schedule, times)
    lines = report.lines(timeline, times, _columns(), size)
    return Answer(lines, report.as_dict(timeline, times, size), [report.panel(timeline)])


def _compare(arguments: argparse.Namespace) -> Answer:
    times = options.times(arguments.times, arguments.recompute)
    size = None if arguments.bytes is None else options.message_bytes(arguments.bytes)
    found = comparison.compare(*_shape(arguments), times)
    panels = [report.panel(entry.timeline) for entry in found.entries]
    return Answer(comparison.lines(found, size), comparison.as_dict(found, size), panels)


def _measured(arguments: argparse.Namespace) -> Answer:
    explanations = [explain(measured) for measured in read_trace(Path(arguments.measured))]
    lines = measured_report.lines(explanations, _columns())
    return Answer(lines, measured_report.as_dict(explanations), measured_report.panels(explanations), "ms")


FORMS = {"NAME": _one, "custom": _custom, "--compare": _compare, "--measured": _measured}


def _shape(arguments: argparse.Namespace) -> tuple[int, int, int | None]:
    ranks, microbatches = (options.count(name, getattr(arguments, name)) for name in options.SHAPE)
    return ranks, microbatches, None if arguments.chunks is None else options.count("chunks", arguments.chunks)


def _columns() -> int:
    return shutil.get_terminal_size((COLUMNS, 24)).columns


def _written(path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
