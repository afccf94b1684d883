"""Section of a run that learns from preferences: are chosen answers preferred, by how much, which rewards move."""

from __future__ import annotations

import math

from hpcllm.report.facts import Progress
from hpcllm.report.figures import Curve, Panel, curves
from hpcllm.report.page import Block, Table
from hpcllm.report.run_folder import History, number

FIGURES = (
    "rewards/accuracies",
    "rewards/margins",
    "rewards/chosen",
    "rewards/rejected",
    "logps/chosen",
    "logps/rejected",
)
HEAD = ("", "training, last logged", "held-out, last")


def preferences(history: History, resumes: list[float], log_x: bool, along: Progress) -> list[Block]:
    """Draw and list the figures of DPO; [] where the log has none."""
    if FIGURES[0] not in history.last:
        return []
    panels = [
        Panel("share of pairs, chosen preferred", _both(history, FIGURES[0])),
        Panel("margin of the rewards", _both(history, FIGURES[1]), from_zero=True),
        Panel("rewards", [Curve(*history.column(name), k, name) for k, name in enumerate(FIGURES[2:4])]),
    ]
    held_out = history.validations[-1] if history.validations else {}
    rows = [[name, _text(history.last.get(name)), _text(held_out.get(f"validation_{name}"))] for name in FIGURES]
    return [*curves("preferences over the steps", panels, resumes, log_x, progress=along), Table(HEAD, rows)]


def _both(history: History, name: str) -> list[Curve]:
    checked = [record for record in history.validations if f"validation_{name}" in record]
    steps, values = [r["step"] for r in checked], [number(r[f"validation_{name}"]) for r in checked]
    held_out = [Curve(steps, values, 1, "validation", dots=True)] if checked else []
    return [Curve(*history.column(name), 0, "training"), *held_out]


def _text(value: object) -> str:
    found = number(value)
    return f"{found:.4f}" if math.isfinite(found) else ""
