"""The numbers of a run, by name, with the unit in the name: for --json, and with labels for the tables.

Facts that are not known are absent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpcllm.config.policies import TRAFFIC
from hpcllm.config.schema import from_tables
from hpcllm.errors import HpcllmError
from hpcllm.model.shapes import parameter_count
from hpcllm.report.run_folder import History, Record, Run, number, unit_of
from hpcllm.system.energy.account import HOURS, WORDS
from hpcllm.system.text import percent, size_text
from hpcllm.training.step_timer import BETWEEN, PARTS


@dataclass(frozen=True)
class Progress:
    """Tokens of a step, and hours since the start: exact at `steps`, between them a line."""

    tokens_per_step: int | None
    steps: Sequence[float]
    hours: Sequence[float]


TIMES = tuple(f"time_{part}_s" for part in (*PARTS, *BETWEEN))
SUMS = ("node_hours", *HOURS.values(), "energy_kwh", "energy_gpus_kwh", "tokens_per_kwh", "cost")


def facts(run: Run) -> dict[str, Any]:
    """All facts of one run, as JSON can hold them."""
    history = run.history
    found = {"run": run.name, "folder": str(run.folder), **_progress(run), **_size(run)}
    found |= _loss(history) | _speed(history) | _taken(history)
    found |= {"time": time_split(history), "traffic": traffic(history)}
    found |= _checkpoints(history) | {"starts": len(history.starts), "overflows": history.overflows}
    return {key: value for key, value in found.items() if _is_known(value)}


def settled(history: History) -> list[Record]:
    """Logged steps without the first of each start, in which libraries load and kernels compile; else all."""
    found, starts = list[Record](), [0, *(start["step"] for start in history.starts)]
    begun = -1  # starts whose first record has come
    for record in history.steps:
        since = sum(start < record["step"] for start in starts)
        if since == begun:
            found.append(record)
        begun = since
    return found or history.steps


def progress(history: History, tokens_per_step: int | None) -> Progress:
    """Tokens and hours at each logged step. The clock counts all starts, with what was lost between two of them."""
    steps, hours, passed, before = [0.0], [0.0], 0.0, {"step": 0, "node_hours": 0.0}
    for record in history.steps:
        if "node_hours" in record:
            starts = [start["start"] for start in history.starts if start["step"] < record["step"]]
            nodes = number(starts[-1].get("nodes", 1)) if starts else 1.0
            passed += max(0.0, number(record["node_hours"]) - before["node_hours"]) / nodes
        else:
            passed += number(record.get("step_s", 0)) * max(0, record["step"] - before["step"]) / 3600
        if math.isfinite(passed):
            steps.append(float(record["step"]))
            hours.append(passed)
        before = {"step": record["step"], "node_hours": number(record.get("node_hours", 0))}
    return Progress(tokens_per_step, steps, hours)


def tokens_of(run: Run) -> int | None:
    """Tokens of a step; None if the run file does not say."""
    sizes = (run.key("data", "global_batch"), run.key("data", "sequence_length"))
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def time_split(history: History) -> dict[str, float]:
    """Mean seconds a step by part, without the start-up."""
    records = [record for record in settled(history) if TIMES[0] in record]
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
    """Number of steps made; 0 before the first."""
    steps = [record["step"] for records in (history.steps[-1:], history.ends[-1:]) for record in records]
    return max(steps, default=0)


def ago(seconds: float) -> str:
    """'3 hours': an age in whole units of which there are at least two."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"


def _progress(run: Run) -> dict[str, Any]:
    step, size = last_step(run.history), tokens_of(run)
    tokens, hours = size and step * size, progress(run.history, None).hours[-1]
    keys = {"state": state(run), "step": step, "steps": run.key("run", "steps"), "tokens": tokens}
    return keys | {"hours": hours or None}


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
    found: dict[str, Any] = {"loss": losses[-1] if losses else None, "loss_unit": unit_of(history)}
    if checked:
        best = min(checked, key=lambda record: number(record["validation_loss"]))
        found |= {
            "validation_loss": checked[-1]["validation_loss"],
            "bits_per_byte": checked[-1].get("bits_per_byte"),
            "validation_accuracy": number(checked[-1].get("validation_rewards/accuracies")),
            "validation_reward": number(checked[-1].get("validation_reward")),
            "best_validation_loss": best["validation_loss"],
            "best_validation_step": best["step"],
        }
    return found


def _speed(history: History) -> dict[str, Any]:
    keys = ("step_s", "tokens_per_s", "targets", "tflops_per_device", "mfu", "communication_share")
    records = settled(history)
    found = {f"median_{key}": _median([number(record.get(key)) for record in records]) for key in keys}
    memory = [value for value in history.column("memory_gb")[1] if math.isfinite(value)]
    return found | {"memory_gb": max(memory, default=None)}


def _taken(history: History) -> dict[str, Any]:
    """The newest sums over all starts, and which part of the energy was measured."""
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


@dataclass(frozen=True)
class Quantity:
    """One row of the tables: which fact, what it is called, how it is shown."""

    key: str
    label: str
    show: Callable[[Any], str] = str
    better: Literal["", "lower", "higher"] = ""  # "" too where runs of different length would not compare


def count(value: float) -> str:
    """'12,345'."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Three digits, and all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def time_text(hours: float) -> str:
    """'2.5 minutes'."""
    unit, size = time_unit(hours)
    return f"{short(hours / size)} {unit}"


def time_unit(hours: float) -> tuple[str, float]:
    """Unit that suits a time, and its length in hours."""
    units = (("days", 24.0), ("hours", 1.0), ("minutes", 1 / 60))
    return next(((unit, size) for unit, size in units if hours >= 2 * size), ("seconds", 1 / 3600))


def _digits4(value: float) -> str:
    return f"{value:.4f}"


def large(value: float) -> str:
    """'1.32 M'."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:,}"


def mesh_text(value: Any) -> str:
    """'dp=4 pp=2 tp=1' of a mapping, any other value as it is."""
    return " ".join(f"{axis}={size}" for axis, size in value.items()) if isinstance(value, Mapping) else str(value)


QUANTITIES = (
    Quantity("state", "state"),
    Quantity("step", "steps made", count),
    Quantity("parameters", "parameters", large),
    Quantity("tokens", "tokens trained on", large),
    Quantity("hours", "time, all starts", time_text),
    Quantity("ranks", "ranks", count),
    Quantity("mesh", "mesh", mesh_text),
    Quantity("nodes", "nodes", count),
    Quantity("device_name", "device"),
    Quantity("loss", "training loss, last", _digits4, "lower"),
    Quantity("loss_unit", "unit of losses"),
    Quantity("validation_loss", "validation loss, last", _digits4, "lower"),
    Quantity("best_validation_loss", "validation loss, best", _digits4, "lower"),
    Quantity("best_validation_step", "validation loss, best, at step", count),
    Quantity("bits_per_byte", "bits a byte of held-out text", _digits4, "lower"),
    Quantity("validation_accuracy", "held-out pairs in which the chosen answer is preferred", percent, "higher"),
    Quantity("median_tokens_per_s", "tokens/s, median", short, "higher"),
    Quantity("median_targets", "targets a step that count, median", short),
    Quantity("median_step_s", "seconds a step, median", short, "lower"),
    Quantity("median_tflops_per_device", "TFLOP/s a rank, median", short, "higher"),
    Quantity("median_mfu", "MFU, median", percent, "higher"),
    Quantity("median_communication_share", "share of a step spent waiting, median", percent, "lower"),
    Quantity("memory_gb", "memory, the most of any rank, GB", short, "lower"),
    Quantity("node_hours", WORDS["node_hours"], short),
    Quantity("gpu_hours", WORDS["gpu_hours"], short),
    Quantity("core_hours", WORDS["core_hours"], short),
    Quantity("energy_kwh", "energy, kWh", short),
    Quantity("energy_gpus_kwh", "energy of GPUs among it, kWh", short),
    Quantity("energy_scope", "energy was measured of"),
    Quantity("tokens_per_kwh", "tokens a kWh", short, "higher"),
    Quantity("cost", "cost, by the prices of [energy]", lambda value: f"{value:,.2f}"),
    Quantity("checkpoints", "checkpoints written", count),
    Quantity("checkpoint_bytes", "bytes of one", size_text),
    Quantity("median_checkpoint_gb_s", "checkpoints, GB/s, median", short, "higher"),
    Quantity("checkpoint_waits_s", "seconds waited for checkpoints, all together", short),
    Quantity("starts", "starts", count),
    Quantity("overflows", "logged steps skipped, as gradients overflowed", count),
)


def summary_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of all known facts of a run; the steps made are in its state."""
    shown = [quantity for quantity in QUANTITIES if quantity.key in found and quantity.key != "step"]
    return [(quantity.label, quantity.show(found[quantity.key])) for quantity in shown]
