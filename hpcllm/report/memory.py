"""Memory of tensors as it was measured, beside what was predicted: for each stage and its ranks."""

from __future__ import annotations

import math

from hpcllm.axes import coordinates
from hpcllm.printable import size_text
from hpcllm.ranks import name_ranks
from hpcllm.report import bars
from hpcllm.report.drawing import patch
from hpcllm.report.log import Record, number
from hpcllm.report.page import paragraph, picture, table
from hpcllm.report.runs import Run

MOST_DRAWN = 12  # stages; the table has all
WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "step": "activations and buffers",
}
Stage = tuple[str, dict[str, float], dict[str, float]]  # name, measured and predicted bytes by kind


def memory_section(run: Run) -> str:
    if not run.history.memory:
        return paragraph("The log does not say how much memory the ranks take.") if run.history.steps else ""
    record = run.history.memory[-1]
    kinds = [kind for kind in bars.MEMORY_COLOURS if f"{kind}_memory_bytes" in record]
    stages = _stages(run, record, kinds)
    rows, shown = [], []
    for name, found, told in stages:
        rows.append([name, *(f"{size_text(found[kind])} ({size_text(told[kind])})" for kind in kinds)])
        shown += [(f"{_short(name)}measured", found), (f"{_short(name)}predicted", told)]
    legend = [(patch(bars.MEMORY_COLOURS[kind]), WORDS[kind]) for kind in kinds]
    note = "Tensors, the most of any rank, in the first step of the last start: measured (predicted)."
    head = ["", *(WORDS[kind] for kind in kinds)]
    few = shown if len(shown) <= 2 * MOST_DRAWN else []
    return table(head, rows) + paragraph(note, faint=True) + picture(bars.memory_bars("memory", few), legend)


def _stages(run: Run, record: Record, kinds: list[str]) -> list[Stage]:
    """Each pipeline stage with its ranks, or all ranks as one where the log knows no stages."""
    stages = record.get("memory_stages")
    if not isinstance(stages, list) or len(stages) < 2:
        found = {kind: number(record[f"{kind}_memory_bytes"]) for kind in kinds}
        told = {kind: number(record.get(f"{kind}_memory_predicted_bytes")) for kind in kinds}
        return [("all ranks", found, told)]
    return [
        (
            f"stage {k} ({_ranks_of(run, k)})",
            {kind: number(stage[f"{kind}_memory_bytes"]) for kind in kinds},
            {kind: number(stage[f"{kind}_memory_predicted_bytes"]) for kind in kinds},
        )
        for k, stage in enumerate(stages)
    ]


def _ranks_of(run: Run, stage: int) -> str:
    sizes = run.history.starts[-1]["start"].get("mesh", {}) if run.history.starts else {}
    order = run.key("mesh", "order")
    if not (sizes and isinstance(order, str)):
        return "its ranks"
    ranks = range(math.prod(sizes.values()))
    return name_ranks((rank for rank in ranks if coordinates(rank, sizes, order)["pp"] == stage), 3)


def _short(name: str) -> str:
    return "" if name == "all ranks" else f"{name.split(' (')[0]} "
