"""Draw how the figures of tasks change over the checkpoints of a run, with their intervals of 95 %.

share     |      .--I--I        loss     |I.
right     |  .-I'               nats     |  `-I--.
          |-I                            |        `-I--I
          +------------ step             +-------------- step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcllm import plotting
from hpcllm.system.raw_files import writing

WIDTH_INCHES, PANEL_INCHES, MARGIN_INCHES = 9.0, 2.8, 0.8
PANELS = {
    "acc": "share that is right",
    "acc_norm": "share that is right, by length",
    "exact_match": "share of written answers that is right",
    "flexible_match": "share whose last number is right",
    "loss": "loss, nats",
    "bits_per_byte": "bits per byte",
}


def draw(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture of reports of `hpcllm evaluate`, one a checkpoint. Raises ConfigError."""
    names = list(dict.fromkeys(task["task"] for report in reports for task in report["tasks"]))
    there = dict.fromkeys(key for task in reports[0]["tasks"] for key in task["figures"])
    shares = {key: f"problems that pass, {key}" for key in there if key.startswith("pass@")}
    panels = {key: label for key, label in (PANELS | shares).items() if key in there}
    with plotting.figure(WIDTH_INCHES, [PANEL_INCHES] * len(panels), MARGIN_INCHES, share_x=True) as (made, axes):
        for (key, label), each in zip(panels.items(), axes, strict=True):
            for number, name in enumerate(names):
                _curve(each, reports, name, key, number)
            each.set_ylabel(label)
            plotting.legend_beside(each)
        axes[-1].set_xlabel("step")
        with writing(f"--plot {str(path)!r}"):
            plotting.save(made, path)


def _curve(axes: Any, reports: Sequence[Mapping[str, Any]], name: str, key: str, number: int) -> None:
    """Draw a figure of one task; a checkpoint whose name says no step stands at its place in the list."""
    points = [
        (place if report["step"] is None else report["step"], task["figures"][key])
        for place, report in enumerate(reports)
        for task in report["tasks"]
        if task["task"] == name and key in task["figures"]
    ]
    if not points:
        return
    x, values = [step for step, _ in points], [figure["value"] for _, figure in points]
    style = plotting.line_style(number)
    axes.plot(x, values, marker="o", markersize=3, label=name, **style)
    ends = [(step, figure["low"], figure["high"]) for step, figure in points if figure["low"] is not None]
    axes.vlines(*(zip(*ends, strict=True) if ends else ([], [], [])), color=style["color"], linewidth=0.8)
