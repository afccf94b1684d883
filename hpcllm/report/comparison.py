"""Several runs in one page: curves over each other, one table with the best marked, the keys that differ.

A run has a letter in the pictures, and a colour with it; its name stands in the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcllm.printable import size_text
from hpcllm.report import words
from hpcllm.report.curves import Curve, Panel, draw
from hpcllm.report.drawing import swatch
from hpcllm.report.facts import traffic
from hpcllm.report.log import History, number
from hpcllm.report.page import Section, paragraph, picture, table
from hpcllm.report.runs import Run
from hpcllm.report.times import letter, time_section

Column = Callable[[History], tuple[Sequence[float], Sequence[float]]]


def comparison(runs: Sequence[Run], facts: Sequence[Mapping[str, Any]], log_x: bool) -> list[Section]:
    legend = [(swatch(k), f"{letter(k)}  {run.name}") for k, run in enumerate(runs)]

    def curves(name: str, told: str, panels: Sequence[Panel]) -> str:
        return picture(draw(name, told, panels, log_x=log_x), legend)

    loss = [
        _panel(runs, "training loss, nats a token", lambda history: history.loss),
        _panel(runs, "validation loss", _validation, dots=True),
    ]
    speed = [
        _panel(runs, "tokens/s, all ranks", lambda h: h.column("tokens_per_s"), from_zero=True),
        _panel(runs, "TFLOP/s a rank", lambda h: h.column("tflops_per_device"), from_zero=True),
        _panel(runs, "MFU", lambda h: h.column("mfu"), from_zero=True),
    ]
    return [
        Section("Summary", _summary(runs, facts)),
        Section("What differs in the run files", _differing(runs)),
        Section("Loss", curves("loss", "loss of each run over the steps", loss)),
        Section("Throughput", curves("throughput", "speed of each run over the steps", speed)),
        Section("Gradient norm", curves("norm", "gradient norm of each run", [_norm(runs)])),
        Section("Communication", _traffic(runs)),
        Section("Where the time goes", time_section({run.name: run.history for run in runs})),
        Section("Energy", curves("energy", "energy of each run", [_energy(runs)])),
    ]


def _panel(runs: Sequence[Run], label: str, column: Column, from_zero: bool = False, dots: bool = False) -> Panel:
    return Panel(label, [Curve(*column(run.history), k, dots) for k, run in enumerate(runs)], from_zero)


def _norm(runs: Sequence[Run]) -> Panel:
    return _panel(runs, "gradient norm", lambda history: history.column("grad_norm"), from_zero=True)


def _energy(runs: Sequence[Run]) -> Panel:
    return _panel(runs, "kWh, so far", lambda history: history.column("energy_kwh"), from_zero=True)


def _validation(history: History) -> tuple[list[float], list[float]]:
    found = history.validations
    return [float(record["step"]) for record in found], [number(record["validation_loss"]) for record in found]


def _summary(runs: Sequence[Run], facts: Sequence[Mapping[str, Any]]) -> str:
    """A row a quantity that any run has, a column a run; the best of each is marked."""
    rows, best = list[list[str]](), set[tuple[int, int]]()
    for quantity in words.QUANTITIES:
        values = [fact.get(quantity.key) for fact in facts]
        if all(value is None for value in values) or quantity.key == "state":  # a sentence; `step` is enough here
            continue
        if (found := best_of(values, quantity.better)) is not None:
            best |= {(len(rows), 1 + k) for k, value in enumerate(values) if value == values[found]}
        rows.append([quantity.label, *("" if value is None else quantity.show(value) for value in values)])
    head = ["", *(f"{letter(k)}  {run.name}" for k, run in enumerate(runs))]
    return _wide(table(head, rows, frozenset(best))) + paragraph("Marked: the best of each row.", faint=True)


def best_of(values: Sequence[Any], better: str) -> int | None:
    """Which value is best; None where no two differ, or where nothing is better than another."""
    known = {k: value for k, value in enumerate(values) if isinstance(value, int | float) and math.isfinite(value)}
    if not better or len(set(known.values())) < 2:
        return None
    return (min if better == "lower" else max)(known, key=known.__getitem__)


def _differing(runs: Sequence[Run]) -> str:
    tables = [_flat(run.tables) for run in runs]
    keys = sorted(set().union(*tables))
    rows = [
        [key, *(repr(found[key]) if key in found else "" for found in tables)]
        for key in keys
        if key not in ("run.name", "run.folder") and len({repr(found.get(key)) for found in tables}) > 1
    ]
    head = ["key", *(letter(k) for k in range(len(runs)))]
    return _wide(table(head, rows)) if rows else paragraph("Nothing but their names.")


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, keys in tables.items()
        for key, value in (keys.items() if isinstance(keys, dict) else [])
    }


def _traffic(runs: Sequence[Run]) -> str:
    rows = []
    for k, run in enumerate(runs):
        for kind, found in traffic(run.history).items():
            sizes = (size_text(found["plain_bytes"]), size_text(found["bytes"]))
            rows.append([f"{letter(k)}  {kind}", *sizes, f"{found['ratio']:.2f}"])
    return table(["run and kind of traffic", "bytes a step, all ranks", "as sent", "ratio"], rows)


def _wide(body: str) -> str:
    return f'<div style="overflow-x: auto">{body}</div>'
