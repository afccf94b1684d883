"""Does the engine do what the clock of schedules predicts? Stages that sleep let 8 ranks be measured on 2 cores.

    mpiexec -n 8 python perf/pipeline_sleep.py [--ranks 4,6,8] [--microbatches 4,8,16] [--unit-ms 80] [--repeats 3]

    a microbatch sleeps through its forward pass (1 unit) and its backward pass (2 units, 1 of them W) on each rank
    everything else is real: engine, link, messages between ranks, what is kept and freed

All schedules take turns, `repeats` times over; a figure is the median, each from the first rank's start to the last
one's end. Every measured peak of activations must be the predicted one. Writes pipeline_sleep.md and .json beside this
file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

from hpcllm.config.schema import MeshConfig
from hpcllm.model.loss import cross_entropy
from hpcllm.model.shapes import StageSpan
from hpcllm.model.tensor_parallel import ALONE
from hpcllm.mpi.mesh import Mesh, open_mesh
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.chunk import Chunk
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.link import Link
from hpcllm.pipeline.schedules import SCHEDULES, Schedule, make_schedule
from hpcllm.pipeline.timing import Timeline, Times, simulate

HERE = Path(__file__).resolve().parent
TOKENS, HIDDEN = 64, 256  # of a microbatch: messages of 64 KiB
LIMIT_S = 120.0


@dataclass(frozen=True)
class Seconds:
    """Of one chunk."""

    forward: float
    backward: float
    weight: float


class _Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SleepingDecoder(nn.Module):
    """Stands where a chunk has its part of the model."""

    def __init__(self, span: StageSpan, seconds: Seconds) -> None:
        super().__init__()
        self.span, self.seconds, self.tp, self.device = span, seconds, ALONE, torch.device("cpu")
        self.embedding = nn.Embedding(HIDDEN, HIDDEN) if span.has_embedding else nn.Identity()

    def hidden_states(self, x: Tensor, later: object | None, documents: object | None = None) -> Tensor:  # noqa: ARG002
        backward_s = self.seconds.backward - (self.seconds.weight if later else 0)
        return _Sleep.apply(self.embedding(x), self.seconds.forward, backward_s)

    def nats(self, hidden: Tensor, targets: Tensor, later: object | None) -> Tensor:  # noqa: ARG002
        return cross_entropy(hidden, targets)


class SleepingChunk(Chunk):
    """A chunk whose second half of the backward pass sleeps, too."""

    def weights(self, m: int, added: Any) -> None:
        time.sleep(self.decoder.seconds.weight)
        super().weights(m, added)


def sleeping_engine(mesh: Mesh, schedule: Schedule, times: Times) -> Engine:
    placement = schedule.placement
    stages = [placement.stage(mesh.pp.rank, chunk) for chunk in range(placement.chunks)]
    seconds = Seconds(*(value / placement.chunks for value in (times.forward, times.backward, times.weight)))
    spans = [StageSpan(s, s + 1, s == 0, s == placement.stages - 1) for s in stages]
    chunks = [SleepingChunk(SleepingDecoder(span, seconds)) for span in spans]
    return Engine(chunks, Link(mesh, placement, (1, TOKENS, HIDDEN), Waits(LIMIT_S)))


def run_s(engine: Engine, schedule: Schedule, comm: MPI.Intracomm) -> float:
    """Seconds from the first rank's start to the last one's end, on one machine's clock. Collective over comm."""
    tokens = torch.zeros(schedule.microbatches, 1, TOKENS, dtype=torch.int64)
    waits = Waits(LIMIT_S)  # MPI's own barrier would take the cores that others measure on
    waits.all([comm.Ibarrier()], lambda: "all ranks to begin")
    start = time.perf_counter()
    engine.run(schedule, tokens, tokens, 1.0)
    extremes = np.array([-start, time.perf_counter()])
    waits.allreduce(comm, extremes, lambda: "all ranks to end", MPI.MAX)
    return float(extremes.sum())


def record(timeline: Timeline, seconds: list[float], peaks: list[int]) -> dict[str, Any]:
    schedule = timeline.schedule
    return {
        "ranks": schedule.placement.ranks,
        "microbatches": schedule.microbatches,
        "schedule": schedule.name,
        "predicted_s": timeline.makespan,
        "measured_s": median(seconds),
        "all_s": seconds,
        "ratio": median(seconds) / timeline.makespan,
        "bubble": timeline.bubble,
        "peak_live": peaks,
        "predicted_peak_live": list(timeline.peak_live),
    }


def measure(comm: MPI.Intracomm, microbatches: int, times: Times, repeats: int) -> list[dict[str, Any]]:
    """One record a schedule, for all ranks of comm. Collective over comm."""
    schedules = [make_schedule(name, comm.size, microbatches) for name in SCHEDULES]
    seconds: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    peaks: dict[str, list[int]] = {}
    for schedule in schedules:
        check(schedule)
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        for short in (make_schedule(name, comm.size, 1) for name in SCHEDULES):
            run_s(sleeping_engine(mesh, short, times), short, comm)  # first backward passes import much of PyTorch
        for _ in range(repeats):
            for schedule in schedules:
                engine = sleeping_engine(mesh, schedule, times)
                seconds[schedule.name].append(run_s(engine, schedule, comm))
                peaks[schedule.name] = comm.allgather(engine.peak_live)
    return [record(simulate(s, times), seconds[s.name], peaks[s.name]) for s in schedules]


def baseline(records: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    return {(r["ranks"], r["microbatches"]): r["measured_s"] for r in records if r["schedule"] == "1f1b"}


def table(records: list[dict[str, Any]]) -> str:
    titles = ["ranks", "microbatches", "schedule", "predicted, s", "measured, s", "ratio", "to 1f1b", "bubble"]
    rows = [f"| {' | '.join([*titles, 'peak live, by rank'])} |", f"|---:|---:|---|{'---:|' * 5}---|"]
    base = baseline(records)
    for r in records:
        times = f"{r['predicted_s']:.3f} | {r['measured_s']:.3f} | {r['ratio']:.3f}"
        to_base = r["measured_s"] / base[r["ranks"], r["microbatches"]]
        peaks = " ".join(map(str, r["peak_live"]))
        what = f"{r['ranks']} | {r['microbatches']} | {r['schedule']}"
        rows.append(f"| {what} | {times} | {to_base:.3f} | {100 * r['bubble']:.1f} % | {peaks} |")
    return "\n".join(rows)


def verdict(records: list[dict[str, Any]]) -> str:
    base = baseline(records)
    worst = max(records, key=lambda r: abs(r["ratio"] - 1))
    shorter = all(r["measured_s"] < base[r["ranks"], r["microbatches"]] for r in records if r["schedule"][:2] == "zb")
    same = all(r["peak_live"] == r["predicted_peak_live"] for r in records)
    return (
        f"Largest distance from the prediction: {100 * abs(worst['ratio'] - 1):.1f} % ({worst['schedule']}, "
        f"{worst['ranks']} ranks, {worst['microbatches']} microbatches). Activations held at once, in all "
        f"{len(records)} cases: {'as predicted on every rank' if same else 'NOT as predicted'}. zb-h1 and zb-v "
        f"{'took' if shorter else 'did NOT take'} less time than 1f1b in every case."
    )


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    world = MPI.COMM_WORLD
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[4, 6, 8])
    parser.add_argument("--microbatches", type=numbers, default=[4, 8, 16])
    parser.add_argument("--unit-ms", type=float, default=80.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if max(arguments.ranks) > world.size:
        parser.error(f"--ranks {max(arguments.ranks)}, but the job has {world.size}: mpiexec -n {max(arguments.ranks)}")
    torch.set_num_threads(1)
    unit_s = arguments.unit_ms / 1e3
    times = Times(forward=unit_s, backward=2 * unit_s, weight=unit_s)
    records = []
    for ranks in arguments.ranks:
        part = world.Split(0 if world.rank < ranks else MPI.UNDEFINED)
        for microbatches in arguments.microbatches if part else []:
            records += measure(part, microbatches, times, arguments.repeats)
            if world.rank == 0:
                print("\n".join(table(records).splitlines()[-len(SCHEDULES) :]), file=sys.stderr, flush=True)
        Waits(None if world.size == 1 else 3600.0).all([world.Ibarrier()], lambda: "the other ranks")
    if world.rank == 0:
        head = f"Made by pipeline_sleep.py: {os.cpu_count()} cores, a unit of {arguments.unit_ms:g} ms, median of "
        head += f"{arguments.repeats}, {' '.join(MPI.Get_library_version().split()[:3])}"
        (HERE / "pipeline_sleep.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        text = f"{head}\n\n{verdict(records)}\n\n{table(records)}\n"
        (HERE / "pipeline_sleep.md").write_text(text, encoding="utf-8")
        print(text, end="")


if __name__ == "__main__":
    main()
