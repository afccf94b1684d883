"""Rows of published training runs, for the planner to be held against: rows/*.toml, one file a table of a paper.

machine, confidence            of all rows
[groups.NAME]                  rows that differ in layout alone, or nearly
model, common, global_batch    what they share: a shape, the rest of their layouts, samples of a step (or per row)
rows = [{ id, layout, time_s, memory_gb, oom, note }]      an absent key was not published
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROWS = Path(__file__).resolve().parent / "rows"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run: what `hpcllm.plan.predict` takes, and what was measured."""

    table: str  # the file's name
    group: str
    id: str
    machine: str
    model: str
    layout: str
    global_batch: int  # samples
    time_s: float | None = None  # of a step
    memory_gb: float | None = None  # of the fullest device
    oom: bool = False  # it ran out of memory
    note: str = ""
    confidence: str = "read"

    @property
    def held_out(self) -> bool:
        """Whether no constant of the planner was chosen with this row in sight."""
        return self.table.endswith("held-out")


def read_rows(folder: Path = ROWS) -> list[Row]:
    """All rows, in the order of files and of their lines."""
    return [row for path in sorted(folder.glob("*.toml")) for row in read_table(path)]


def read_table(path: Path) -> list[Row]:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = []
    for name, group in table["groups"].items():
        for given in group["rows"]:
            values = {"global_batch": group.get("global_batch"), **given}
            values["layout"] = f"{given['layout']},{group['common']}"
            known = {
                "machine": group.get("machine", table["machine"]),
                "confidence": table["confidence"],
                "model": group["model"],
            }
            rows.append(Row(table=path.stem, group=name, **known, **values))
    return rows
