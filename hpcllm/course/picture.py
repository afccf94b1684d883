"""The picture of the races of a check: the student's line beside ours, the library's, and the bound.

s |              .-- yours          both axes logarithmic, a panel a race
  |         .--'' -- ours
  |   .--''  - - -  bound
  +-------------------- bytes
"""

from __future__ import annotations

from pathlib import Path

from hpcllm import plotting
from hpcllm.course.lab import Lab
from hpcllm.course.score import Grade
from hpcllm.errors import ConfigError

WIDTH_INCHES, PANEL_INCHES = 7.0, 3.2
LINES = {"student": "yours", "ours": "ours", "native": "", "bound": "bound"}


def draw(found: Grade, lab: Lab, path: Path) -> None:
    """Write the picture of a grade's races. Raises ConfigError if none was run, OSError."""
    raced = [(part, race) for part in found.parts for race in lab.races if part.name == race.name and part.rows]
    if not raced:
        raise ConfigError(f"nothing to draw in {str(path)!r}: no race was run, as races come after the laws")
    with plotting.figure(WIDTH_INCHES, [PANEL_INCHES] * len(raced)) as (made, panels):
        for panel, (part, race) in zip(panels, raced, strict=True):
            for number, (name, label) in enumerate(
                {**LINES, "ours": race.against, "native": race.native_label}.items()
            ):
                points = [(row.x, getattr(row, name)) for row in part.rows if getattr(row, name) is not None]
                if points:
                    style = plotting.line_style(number)
                    panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, **style)
            panel.set(title=race.name, xlabel=race.x_label, ylabel=race.unit)
            plotting.logarithmic(panel, "x", "y")
        plotting.legend_above(made)
        plotting.save(made, path)
