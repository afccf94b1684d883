"""The pipeline as it ran: each trace of the run drawn above its ideal, and explained."""

from __future__ import annotations

from html import escape
from pathlib import Path

from hpcllm.errors import HpcllmError
from hpcllm.pipeline import measured_report
from hpcllm.pipeline.explain import explain
from hpcllm.pipeline.measured import read_trace
from hpcllm.pipeline.picture import draw
from hpcllm.report.drawing import element
from hpcllm.report.page import paragraph, picture, text
from hpcllm.report.runs import Run

MOST_TRACES, MOST_BYTES, MOST_RANKS = 3, 16 << 20, 64
COLUMNS = 100


def trace_section(run: Run) -> str:
    """Of the newest traces; "" if the run wrote none."""
    return "\n".join(_trace(path, f"trace{k}") for k, path in enumerate(run.traces[-MOST_TRACES:]))


def _trace(path: Path, name: str) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            return paragraph(f"{path.name} is too large to be drawn here; `schedule --measured` draws it.")
        explanations = [explain(measured) for measured in read_trace(path)]
    except (HpcllmError, OSError) as error:
        return paragraph(f"{path.name}: {error}")
    lines = "\n".join(measured_report.lines(explanations, COLUMNS))
    told = f"<details><summary>{text(path.name)} explained</summary><pre>{escape(lines)}</pre></details>"
    panels = measured_report.panels(explanations)
    if len(panels[0].rows) > MOST_RANKS:
        return told
    return picture(element(draw(panels, "ms").svg(), name, f"pipeline, {path.name}"), wide=True) + told
