"""Section of a run that was measured by tasks: shares, losses and bits per byte over its steps."""

from __future__ import annotations

import math

from hpcllm.report.facts import Progress
from hpcllm.report.figures import Curve, Panel, curves
from hpcllm.report.page import Block, Table
from hpcllm.report.run_folder import TASKS, History, number

PANELS = {"acc": "share that is right", "loss": "loss, nats", "bits_per_byte": "bits per byte"}
HEAD = ("task", "figure", "step", "last", "standard error", "first")
MOST_ROWS = 200
NONE: tuple[list[float], list[float]] = ([], [])
Columns = dict[tuple[str, str], tuple[list[float], list[float]]]  # (task, figure) -> steps and values


def tasks(history: History, resumes: list[float], log_x: bool, along: Progress) -> list[Block]:
    """Draw and list the figures of tasks; [] where the log has none."""
    found = _columns(history)
    if not found:
        return []
    numbers = {task: k for k, task in enumerate(dict.fromkeys(task for task, _ in found))}
    panels = [
        Panel(label, [Curve(*xy, numbers[task], task, dots=True) for (task, name), xy in found.items() if name == key])
        for key, label in PANELS.items()
    ]
    rows = [
        [
            task,
            name,
            f"{steps[-1]:,.0f}",
            *map(_text, (values, found.get((task, f"{name}_stderr"), NONE)[1], values[:1])),
        ]
        for (task, name), (steps, values) in found.items()
        if not name.endswith("_stderr")
    ]
    return [*curves("tasks over the steps", panels, resumes, log_x, progress=along), Table(HEAD, rows[:MOST_ROWS])]


def _columns(history: History) -> Columns:
    found: Columns = {}
    for record in history.tasks:
        for key, value in record.items():
            task, _, name = key.removeprefix(TASKS).rpartition("/")
            if key.startswith(TASKS) and task:
                steps, values = found.setdefault((task, name), ([], []))
                steps.append(float(record["step"]))
                values.append(number(value))
    return found


def _text(values: list[float]) -> str:
    """Return the last of the values; "" where there is none."""
    return f"{values[-1]:.4f}" if values and math.isfinite(values[-1]) else ""
