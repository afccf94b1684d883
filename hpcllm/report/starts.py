"""How often a run was started, where and with what, and the checkpoints that it wrote."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hpcllm.printable import size_text
from hpcllm.report import words
from hpcllm.report.log import History, number
from hpcllm.report.page import pairs, paragraph, table

MOST_ROWS = 12  # of checkpoints and starts, the newest
COLUMNS = {
    "checkpoint_bytes": size_text,
    "checkpoint_s": words.short,
    "checkpoint_wait_s": words.short,
    "checkpoint_gb_s": words.short,
}


def checkpoint_section(history: History) -> str:
    rows = [
        (f"step {record['step']:,}", *(_shown(record.get(key), show) for key, show in COLUMNS.items()))
        for record in history.checkpoints[-MOST_ROWS:]
    ]
    more = len(history.checkpoints) - len(rows)
    note = paragraph(f"and {more} before them", faint=True) if more else ""
    head = ["checkpoint", "size", "seconds", "of which steps waited", "GB/s"]
    return table(head, rows) + note + pairs(_starts(history))


def _shown(value: Any, show: Callable[[float], str]) -> str:
    """ "" for what an older version did not log."""
    return show(number(value)) if math.isfinite(number(value)) else ""


def _starts(history: History) -> list[tuple[str, str]]:
    """Each start, and how it ended as far as it said."""
    found = []
    for k, record in list(enumerate(history.starts))[-MOST_ROWS:]:
        start = record["start"]
        slurm = start.get("slurm") or {}
        job = f", Slurm job {slurm['job_id']}" if slurm.get("job_id") else ""
        where = f"{start.get('ranks', '?')} ranks on {start.get('hosts', '?')}{job}"
        found.append((f"start {k + 1}", f"from step {record['step']:,}, {start.get('time', '')}, {where}"))
    for record in history.ends[-1:]:
        end = record["end"]
        why = f", stopped by {end['stopped_by']}" if end.get("stopped_by") else ""
        found.append(("last end", f"after step {record['step']:,}, {end.get('time', '')}{why}"))
    return found


def machine_section(history: History) -> str:
    if not history.starts:
        return paragraph("The log does not say where the run was: an older version wrote it.") if history.steps else ""
    start = history.starts[-1]["start"]
    rows = [(key.replace("_", " "), words.mesh(value)) for key, value in start.items() if value not in ("", {}, None)]
    return paragraph("Of the last start.", faint=True) + pairs(rows)
