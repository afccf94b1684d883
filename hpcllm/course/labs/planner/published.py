"""Published runs, predicted by a student's formula after one of their rows has calibrated it.

published.toml --> groups of rows that differ in layout alone
    first row       seconds --sustained_efficiency--> efficiency
    other rows      step_seconds --> beside what was measured, and what `hpcllm plan` says
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcllm.course.lab import Row, Trial
from hpcllm.course.labs.planner.given import Layout, Machine, Model
from hpcllm.plan import predict
from hpcllm.plan.interval import rank_correlation
from hpcllm.plan.layouts import parse_pairs

FILE = Path(__file__).with_name("published.toml")
RATES = ("peak_flops_per_s", "node", "latency_s", "near_bytes_per_s", "far_bits_per_s")
MEMORY_BYTES = 80e9  # nothing here asks whether it is enough


@dataclass(frozen=True)
class Run:
    """One published step."""

    id: str
    layout: Layout
    text: str  # of the layout, as hpcllm.plan reads it
    batch: int
    seconds: float


@dataclass(frozen=True)
class Group:
    """Runs of one model on one machine. The first calibrates."""

    name: str
    model: Model
    machine: Machine
    plan: tuple[str, str]  # machine and model, as hpcllm.plan reads them
    runs: tuple[Run, ...]
    ordered: bool  # the order of its layouts is judged


def read_groups() -> list[Group]:
    """Read the groups of published.toml."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return [_group(name, given) for name, given in table["groups"].items()]


def _group(name: str, given: dict[str, Any]) -> Group:
    shape = parse_pairs("model", given["model"])
    sizes = {key: shape[key] for key in ("layers", "hidden", "heads", "ffn", "sequence")}
    model = Model(**sizes, vocabulary=shape["vocab"], gated=shape.get("gated", False))
    rates = {key: given[key] for key in RATES}
    machine = Machine(efficiency=1.0, memory_bytes=MEMORY_BYTES, **rates)
    runs = (_run(row, f"{row['layout']},{given['common']}") for row in given["rows"])
    return Group(name, model, machine, (given["plan"], given["model"]), tuple(runs), given.get("ordered", False))


def _run(row: dict[str, Any], text: str) -> Run:
    keys = parse_pairs("layout", text)
    sizes = {key: keys[key] for key in ("dp", "tp", "pp", "micro_batch")}
    layout = Layout(**sizes, recompute=keys["recompute"] == "full", shard=keys.get("shard") == "states")
    return Run(row["id"], layout, text, row["batch"], row["seconds"])


def predicted(student: Any, group: Group) -> list[float]:
    """Predict the seconds of all runs but the first, by which the efficiency is found."""
    first, *others = group.runs
    found = student.sustained_efficiency(group.model, first.layout, group.machine, first.batch, first.seconds)
    machine = replace(group.machine, efficiency=float(found))
    return [float(student.step_seconds(group.model, run.layout, machine, run.batch)) for run in others]


def planned(group: Group) -> list[float]:
    """Predict them by `hpcllm plan`, which no row of these calibrates."""
    return [predict(*group.plan, run.text, run.batch).iteration_time_s for run in group.runs[1:]]


def times_race(trial: Trial) -> Iterator[Row]:
    """Compare the seconds of all published runs but those that calibrate, short steps first."""
    rows = []
    for group in read_groups():
        both = zip(group.runs[1:], predicted(trial.student, group), planned(group), strict=True)
        for run, seconds, plan in both:
            keys = run.layout
            label = f"{group.name}, dp={keys.dp} tp={keys.tp} pp={keys.pp} micro_batch={keys.micro_batch}"
            rows.append(Row(label, run.seconds, seconds, run.seconds, native=plan))
    yield from sorted(rows, key=lambda row: row.x)


def order_race(trial: Trial) -> Iterator[Row]:
    """Compare the order of layouts: 2 less Spearman's rank correlation, 1 where it is the measured one."""
    for group in read_groups():
        if group.ordered:
            measured = [run.seconds for run in group.runs[1:]]
            both = predicted(trial.student, group), planned(group)
            mine, plan = (2 - rank_correlation(measured, each) for each in both)
            yield Row(group.name, len(group.runs), mine, 1.0, native=plan)
