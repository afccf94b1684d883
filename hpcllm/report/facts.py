"""The numbers of a run, by name, unit in the name: for --json and the tables. What is not known is absent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from hpcllm.config import from_tables
from hpcllm.energy.account import HOURS
from hpcllm.errors import HpcllmError
from hpcllm.laps import BETWEEN, PARTS
from hpcllm.model.shapes import parameter_count
from hpcllm.policy import TRAFFIC
from hpcllm.report.log import History, Record, number
from hpcllm.report.runs import Run

TIMES = tuple(f"time_{part}_s" for part in (*PARTS, *BETWEEN))
SUMS = ("node_hours", *HOURS.values(), "energy_kwh", "energy_gpus_kwh", "tokens_per_kwh", "cost")


def facts(run: Run) -> dict[str, Any]:
    """Of one run; JSON can say them."""
    history = run.history
    found = {"run": run.name, "folder": str(run.folder), **_progress(run), **_size(run)}
    found |= _loss(history) | _speed(history) | _taken(history)
    found |= {"time": time_split(history), "traffic": traffic(history)}
    found |= _checkpoints(history) | {"starts": len(history.starts), "overflows": history.overflows}
    return {key: value for key, value in found.items() if _is_known(value)}


def time_split(history: History) -> dict[str, float]:
    """Mean seconds a step by part, over what was logged without the first record, in which things are compiled."""
    records = [record for record in history.steps if TIMES[0] in record]
    records = records[1:] if len(records) > 1 else records
    parts = {key[5:-2]: _mean([number(record.get(key)) for record in records]) for key in TIMES}
    return {part: time_s for part, time_s in parts.items() if math.isfinite(time_s)}


def traffic(history: History) -> dict[str, dict[str, float]]:
    """Kind -> bytes of a step over all ranks, before and after the codec, and their ratio; over the last half."""
    found = {}
    for kind in TRAFFIC:
        keys = f"{kind}_plain_bytes", f"{kind}_bytes"
        records = [record for record in history.steps if keys[1] in record]
        plain, sent = (_mean([number(record.get(key)) for record in records[len(records) // 2 :]]) for key in keys)
        if sent > 0 and plain > 0:
            found[kind] = {"plain_bytes": plain, "bytes": sent, "ratio": plain / sent}
    return found


def state(run: Run) -> str:
    """'finished: 1000 steps', or how far it is and why it is not further, for people."""
    step, steps, ends = last_step(run.history), run.key("run", "steps"), run.history.ends
    of = f"{step:,} of {steps:,} steps" if isinstance(steps, int) else f"{step:,} steps"
    if isinstance(steps, int) and step >= steps:
        return f"finished: {of}"
    ended = ends and number(ends[-1]["step"]) >= max([step, *(start["step"] for start in run.history.starts)])
    after_start = len(ends) >= len(run.history.starts)
    if ended and after_start:
        return f"stopped after {of}: {ends[-1]['end'].get('stopped_by') or 'no reason was given'}"
    return f"{of}; the log was last written {ago(run.age_s)} ago, so it still runs, or ended without a word"


def last_step(history: History) -> int:
    steps = [record["step"] for records in (history.steps[-1:], history.ends[-1:]) for record in records]
    return max(steps, default=0)


def ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"


def _progress(run: Run) -> dict[str, Any]:
    step, data = last_step(run.history), (run.key("data", "global_batch"), run.key("data", "sequence_length"))
    tokens = step * data[0] * data[1] if all(isinstance(size, int) for size in data) else None
    return {"state": state(run), "step": step, "steps": run.key("run", "steps"), "tokens": tokens}


def _size(run: Run) -> dict[str, Any]:
    start = run.history.starts[-1]["start"] if run.history.starts else {}
    try:
        parameters = parameter_count(from_tables(run.tables).model) if run.tables else None
    except HpcllmError:
        parameters = None  # a run file of another version
    keys = ("ranks", "nodes", "devices", "device", "device_name", "mesh", "bubble")
    return {"parameters": parameters} | {key: start[key] for key in keys if key in start}


def _loss(history: History) -> dict[str, Any]:
    losses = [loss for loss in history.loss[1] if math.isfinite(loss)]
    checked = [record for record in history.validations if math.isfinite(number(record["validation_loss"]))]
    found: dict[str, Any] = {"loss": losses[-1] if losses else None}
    if checked:
        best = min(checked, key=lambda record: number(record["validation_loss"]))
        found |= {
            "validation_loss": checked[-1]["validation_loss"],
            "bits_per_byte": checked[-1].get("bits_per_byte"),
            "best_validation_loss": best["validation_loss"],
            "best_validation_step": best["step"],
        }
    return found


def _speed(history: History) -> dict[str, Any]:
    keys = ("step_s", "tokens_per_s", "tflops_per_device", "mfu", "communication_share")
    found = {f"median_{key}": _median(history.column(key)[1]) for key in keys}
    memory = [value for value in history.column("memory_gb")[1] if math.isfinite(value)]
    return found | {"memory_gb": max(memory, default=None)}


def _taken(history: History) -> dict[str, Any]:
    """The newest sums over all starts, and what of the energy was measured."""
    records: Sequence[Record] = [*history.steps[-1:], *history.ends[-1:]]
    newest = max((r for r in records if "node_hours" in r), key=lambda r: number(r["node_hours"]), default={})
    scopes = [start["start"].get("energy_scope") for start in history.starts]
    scope = ", then ".join(dict.fromkeys(filter(None, scopes)))
    return {key: number(newest[key]) for key in SUMS if key in newest} | {"energy_scope": scope or None}


def _checkpoints(history: History) -> dict[str, Any]:
    if not history.checkpoints:
        return {"checkpoints": 0}
    return {
        "checkpoints": len(history.checkpoints),
        "checkpoint_bytes": history.checkpoints[-1].get("checkpoint_bytes"),
        "median_checkpoint_gb_s": _median([number(r.get("checkpoint_gb_s")) for r in history.checkpoints]),
        "checkpoint_waits_s": sum(number(r.get("checkpoint_wait_s", 0)) for r in history.checkpoints),
    }


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _median(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else None


def _is_known(value: Any) -> bool:
    return value is not None and value != {} and not (isinstance(value, float) and not math.isfinite(value))
