"""Steps of a small run, predicted by a student's formula after one layout has calibrated it, all in one run by turns.

2 ranks     replicas           seconds --sustained_efficiency--> efficiency      |  the other ranks sleep
            sum of gradients   seconds --> bytes a second                                |
            short sum          seconds --> latency                                       |
            other layouts      seconds  <-->  step_seconds
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcllm.course.lab import Row, Trial
from hpcllm.course.labs.planner import ours
from hpcllm.course.labs.planner.given import Layout, Machine, Model
from hpcllm.course.small_run import make_store, one_step, small_config
from hpcllm.perf.timing import Case, in_turns
from hpcllm.training.setup import open_run

RANKS = 2  # that train: a laptop has as many cores
MODEL = Model(layers=4, hidden=128, heads=4, ffn=512, vocabulary=280, sequence=64)
PEAK = 1e12  # FLOPs a second; any number: the run says which share of it is sustained
ROUNDS, WARMUP = 9, 1
PAUSE_S = 0.01  # between looks of ranks that do not train
FLOAT_BYTES = 4  # of a value here; the formula's have 2
FIRST = (Layout(dp=2, micro_batch=4), 16)  # calibrates
OTHERS = (
    ("twice the batch", Layout(dp=2, micro_batch=4), 32),
    ("recomputed", Layout(dp=2, micro_batch=4, recompute=True), 16),
    ("layers split", Layout(tp=2, micro_batch=4), 16),
    ("2 stages, 2 microbatches", Layout(pp=2, micro_batch=4), 8),
    ("2 stages, 8 microbatches", Layout(pp=2, micro_batch=4), 32),
)
QUARTER = 25  # percentile of the rounds that counts: what other programs take of the machine comes and goes


def tables(layout: Layout, batch: int, name: str) -> dict[str, dict[str, Any]]:
    """Make the tables of the run file of a layout."""
    m = ours.microbatches(layout, batch)
    shape = {key: getattr(MODEL, key) for key in ("layers", "hidden", "heads", "ffn")}
    return {
        "run": {"name": name},
        "model": {**shape, "activation": "gelu", "tied": False, "max_sequence": MODEL.sequence},
        "data": {"sequence_length": MODEL.sequence, "global_batch": batch},
        "mesh": {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp},
        "pipeline": {
            "microbatches": m,
            "recompute": "full" if layout.recompute else "none",
            "layers": [MODEL.layers // layout.pp] * layout.pp,
        },
    }


def seconds_of(trial: Trial, comm: MPI.Intracomm) -> list[float]:
    """Time steps of all layouts, and a long and a short sum, in turns. Collective over comm."""
    store = make_store(trial.folder, comm)
    values = np.zeros(int(ours.parameters(MODEL)), np.float32)
    with ExitStack() as stack:
        steps = []
        for number, (_, layout, batch) in enumerate((("", *FIRST), *OTHERS)):
            config = small_config(store, 1000, **tables(layout, batch, f"layout {number}"))
            run = stack.enter_context(open_run(config, comm))
            steps.append(Case(partial(one_step, run, 1, 0)))
        sums = [Case(partial(comm.Allreduce, MPI.IN_PLACE, x)) for x in (values, values[:2])]
        timed = in_turns(comm, [*steps, *sums], ROUNDS, WARMUP, lambda: False)
    return [float(np.percentile(each.samples, QUARTER)) for each in timed]


def seconds_on_all(trial: Trial) -> list[float]:
    """Time them on two ranks while the others sleep, and tell all. Collective over the trial's ranks."""
    control = trial.control
    comm: Any = control.Split(int(control.rank >= RANKS), control.rank)
    found = seconds_of(trial, comm) if control.rank < RANKS else []
    meeting = control.Ibarrier()
    while not meeting.Test():
        time.sleep(PAUSE_S)
    comm.Free()
    return list(control.bcast(found))


def machine_of(long_s: float, short_s: float) -> Machine:
    """Make the machine of the measured sums: a ring over two sends as much as there is, in two messages."""
    rate = 2 * ours.parameters(MODEL) / max(long_s - short_s, short_s)
    return Machine(PEAK, 1.0, 1e9, RANKS, short_s / 2, rate, 8 * rate)


def predicted(student: Any, seconds: Sequence[float]) -> list[float]:
    """Predict the seconds of all layouts but the first."""
    machine, (layout, batch) = machine_of(*seconds[-2:]), FIRST
    found = float(student.sustained_efficiency(MODEL, layout, machine, batch, seconds[0]))
    calibrated = replace(machine, efficiency=found)
    return [float(student.step_seconds(MODEL, layout, calibrated, batch)) for _, layout, batch in OTHERS]


def race(trial: Trial) -> Iterator[Row]:
    """Compare seconds of steps on two ranks of this machine."""
    seconds = seconds_on_all(trial)
    both = zip(OTHERS, seconds[1:-2], predicted(trial.student, seconds), strict=True)
    for number, ((label, _, _), measured_s, predicted_s) in enumerate(both, start=1):
        yield Row(label, number, predicted_s, measured_s)
