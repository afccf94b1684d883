"""Several runs in one page: curves over each other, one table with the best marked, the keys that differ.

A run has a letter in the pictures, and a colour with it; its name stands in the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcllm.report.facts import QUANTITIES
from hpcllm.report.figures import Curve, Panel, curves, raw_and_smoothed
from hpcllm.report.page import Block, Section, Table, Text
from hpcllm.report.run_folder import History, Run, number
from hpcllm.report.sections import TRAFFIC_HEAD, time_blocks, traffic_rows

Column = Callable[[History], tuple[Sequence[float], Sequence[float]]]


def comparison(runs: Sequence[Run], facts: Sequence[Mapping[str, Any]], log_x: bool) -> list[Section]:
    """All sections of several runs. facts: of each run."""
    names = [f"{letter(k)}  {run.name}" for k, run in enumerate(runs)]

    def panel(label: str, column: Column, from_zero: bool = True, dots: bool = False) -> Panel:
        lines = [Curve(*column(run.history), k, letter(k), dots) for k, run in enumerate(runs)]
        return Panel(label, lines, from_zero)

    def logged(label: str, key: str) -> Panel:
        return panel(label, lambda history: history.column(key))

    def figure(alt: str, *panels: Panel) -> Sequence[Block]:
        return curves(alt, panels, log_x=log_x, caption="; ".join(names))

    loss = [
        _loss_panel(runs),
        panel("validation loss", _validation, from_zero=False, dots=True),
    ]
    speed = [
        logged("tokens/s, all ranks", "tokens_per_s"),
        logged("TFLOP/s a rank", "tflops_per_device"),
        logged("MFU", "mfu"),
    ]
    bytes_sent = [row for run, name in zip(runs, names, strict=True) for row in traffic_rows(run.history, f"{name}, ")]
    return [
        Section("Summary", _summary(names, facts)),
        Section("What differs in the run files", [_differing(runs)]),
        Section("Loss", figure("loss of each run over the steps", *loss)),
        Section("Throughput", figure("speed of each run over the steps", *speed)),
        Section("Gradient norm", figure("gradient norm of each run", logged("gradient norm", "grad_norm"))),
        Section("Communication", [Table(["run and kind of traffic", *TRAFFIC_HEAD], bytes_sent)] if bytes_sent else []),
        Section("Where the time goes", time_blocks({letter(k): run.history for k, run in enumerate(runs)})),
        Section("Energy", figure("energy of each run", logged("kWh, so far", "energy_kwh"))),
    ]


def _loss_panel(runs: Sequence[Run]) -> Panel:
    lines = [curve for k, run in enumerate(runs) for curve in raw_and_smoothed(*run.history.loss, k, letter(k))]
    return Panel("training loss, nats", lines)


def letter(number: int) -> str:
    """A, B, .., Z, A2, ..: the name of a run in a picture."""
    return chr(ord("A") + number % 26) + (str(number // 26 + 1) if number >= 26 else "")


def _validation(history: History) -> tuple[list[float], list[float]]:
    found = history.validations
    return [float(record["step"]) for record in found], [number(record["validation_loss"]) for record in found]


def _summary(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> list[Block]:
    """A row a quantity that any run has, a column a run; the best of each is marked."""
    rows, best = list[list[str]](), set[tuple[int, int]]()
    for quantity in QUANTITIES:
        values = [fact.get(quantity.key) for fact in facts]
        if all(value is None for value in values) or quantity.key == "state":  # a sentence; `step` is enough here
            continue
        if (found := best_of(values, quantity.better)) is not None:
            best |= {(len(rows), 1 + k) for k, value in enumerate(values) if value == values[found]}
        rows.append([quantity.label, *("" if value is None else quantity.show(value) for value in values)])
    return [Table(["", *names], rows, frozenset(best)), Text("Marked: the best of each row.", faint=True)]


def best_of(values: Sequence[Any], better: str) -> int | None:
    """Index of the best value; None where no two differ, or where nothing is better than another."""
    known = {k: value for k, value in enumerate(values) if isinstance(value, int | float) and math.isfinite(value)}
    if not better or len(set(known.values())) < 2:
        return None
    return (min if better == "lower" else max)(known, key=known.__getitem__)


def _differing(runs: Sequence[Run]) -> Block:
    """Keys whose values differ between the run files."""
    tables = [_flat(run.tables) for run in runs]
    rows = [
        [key, *(repr(found[key]) if key in found else "" for found in tables)]
        for key in sorted(set().union(*tables))
        if key not in ("run.name", "run.folder") and len({repr(found.get(key)) for found in tables}) > 1
    ]
    return Table(["key", *(letter(k) for k in range(len(runs)))], rows) if rows else Text("Nothing but their names.")


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, keys in tables.items()
        for key, value in (keys.items() if isinstance(keys, dict) else [])
    }
