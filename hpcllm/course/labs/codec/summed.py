"""Sums by a student's codec: beside exact ones, in a run of the trainer, and on links made slow.

check_sum, check_run    bounds, bits and bytes of one sum; losses of a run whose gradients are summed by it
slow_race               messages take as long as on a link of 10 MB/s (watched.py): encoded sums beside plain ones
crossover_mb_per_s      the link above which the codec takes longer than it saves, by the clock
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcllm.collectives.operations import ALGORITHMS
from hpcllm.course.lab import LawError, Row, Trial
from hpcllm.course.labs.codec import ours
from hpcllm.course.labs.codec.diagnosis import Fault
from hpcllm.course.labs.codec.ours import BLOCK, Values, encoded_bytes
from hpcllm.course.small_run import make_store, train_losses
from hpcllm.course.watched import WatchedComm
from hpcllm.perf.timing import Case, in_turns

ROUNDING = 1e-5  # relative, of float32 sums beside bounds of codes
STEPS = 4  # of the run
LOSS_ERROR = 0.005  # relative, beside a run with float32 sums
SLOW_LINK_BYTES_PER_S = 10e6  # 80 Mbit/s
SLOW_BYTES = (1 << 20, 1 << 21, 1 << 22)
ROUNDS = 3
CODEC_ROUNDS = 30
MESSAGE_VALUES = 1 << 18
PAUSE_S = 0.001


def check_sum(trial: Trial) -> None:
    """Compare a sum with the exact one, its bits with those of rank 0, and count the bytes that were sent."""
    comm, n = trial.comm, trial.case["n"]
    drawn = np.random.default_rng(trial.random.getrandbits(64))
    addends = drawn.normal(size=(comm.size, n), scale=10.0 ** drawn.uniform(-3, 3)).astype(np.float32)
    x = addends[comm.rank].copy()
    trial.student.allreduce(x, comm)
    of_rank_0 = trial.control.bcast(x.tobytes() if comm.rank == 0 else None)
    most = 2 * (comm.size - 1) * encoded_bytes(-(-n // comm.size))
    place = f"rank {comm.rank} of {comm.size}, n = {n}"
    found = _far(x, addends, place)
    if not found and of_rank_0 != x.tobytes():
        found = "bits", f"{place}: not the bits of rank 0"
    if not found and comm.sent_bytes > most:
        found = "traffic", f"{place}: sends {comm.sent_bytes} bytes; at most {most}"
    if faults := [each for each in trial.control.allgather(found) if each]:
        raise LawError(*faults[0])  # on all ranks alike


def bound(addends: Values) -> float:
    """Return the most by which a sum may be off: half a scale for each addend, and half a scale for the sum."""
    errors = np.abs(addends).max(axis=1, initial=0.0).sum() / 254
    largest = np.abs(addends.astype(np.float64).sum(axis=0)).max(initial=0.0) + errors
    return float((errors + largest / 254) * (1 + ROUNDING) + ROUNDING * largest)


def _far(x: Values, addends: Values, place: str) -> Fault | None:
    exact, most = addends.astype(np.float64).sum(axis=0), bound(addends)
    wrong = ~(np.abs(x - exact) <= most)
    if not wrong.any():
        return None
    i = int(np.flatnonzero(wrong)[0])
    return _sum_mistake(x, addends, most), f"{place}: value {i} is {x[i]:.6g}, not {exact[i]:.6g} to {most:.2g}"


def _sum_mistake(x: Values, addends: Values, most: float) -> str:
    """Tell a known mistake from its sums, part by part: key of the hint."""
    ranks = len(addends)
    exact = addends.astype(np.float64).sum(axis=0)
    if any(np.array_equal(x, own) for own in addends):
        return "nothing"
    if np.abs(x - exact / ranks).max() <= most:
        return "mean"
    subsets = [rows for k in range(ranks) for rows in combinations(range(ranks), k)]
    cuts = np.cumsum([0, *map(len, np.array_split(x, ranks))])
    found = []
    for a, b in pairwise(cuts):
        wanted = {"right": exact[a:b]}
        wanted |= {f"incomplete {rows}": addends[list(rows), a:b].sum(axis=0) for rows in subsets}
        wanted |= {f"twice_added {r}": exact[a:b] + addends[r, a:b] for r in range(ranks)}
        fits = (key.split()[0] for key, values in wanted.items() if np.all(np.abs(x[a:b] - values) <= most))
        found.append(next(fits, "other"))
    wrong = set(found) - {"right"}
    return wrong.pop() if len(wrong) == 1 else "other"


def check_run(trial: Trial) -> None:
    """Train with the student's sum of gradients, and compare the losses with those of float32 sums."""
    store = make_store(trial.folder, trial.control)
    settings: dict[str, Any] = {"communication": {"algorithm": "two_step", "exact_steps": 0, "hash_every_steps": 1}}
    settings["mesh"] = {"dp": trial.control.size}
    wanted = train_losses(store, trial.control, STEPS, **settings)
    sums = ALGORITHMS["allreduce"]
    kept = sums["two_step"]
    sums["two_step"] = lambda x, group, _: _summed(trial, x.numpy(), group.comm)
    try:
        found = train_losses(store, trial.control, STEPS, **settings)
    finally:
        sums["two_step"] = kept
    if any(not abs(a - b) <= LOSS_ERROR * abs(b) for a, b in zip(found, wanted, strict=True)):
        shown = ", ".join(f"{loss:.4f}" for loss in found)
        raise LawError("losses", f"losses {shown}; with float32 sums {', '.join(f'{loss:.4f}' for loss in wanted)}")


def _summed(trial: Trial, x: Values, comm: MPI.Intracomm) -> None:
    trial.student.allreduce(x, comm)
    hashes = comm.allgather(sha256(x.tobytes()).hexdigest())
    if len(set(hashes)) > 1:
        raise LawError("bits", f"in a run: {x.size} values have other bits on rank {comm.rank} than on others")


@contextmanager
def link(comm: WatchedComm, bytes_per_s: float) -> Iterator[None]:
    """Messages of this communicator take as long as on such a link."""
    comm.link_bytes_per_s = bytes_per_s
    try:
        yield
    finally:
        comm.link_bytes_per_s = None


def slow_race(trial: Trial) -> Iterator[Row]:
    """Time sums over a slow link: the student's, ours, and one of float32, all in two steps."""
    for size_bytes in SLOW_BYTES:
        x = np.ones(size_bytes // 4, np.float32)
        sums = (trial.student.allreduce, ours.allreduce, ours.plain_allreduce)
        cases = [Case(partial(each, x, trial.comm), partial(x.fill, 1.0)) for each in sums]
        with link(trial.comm, SLOW_LINK_BYTES_PER_S):
            seconds = in_turns(trial.control, cases, ROUNDS, 1, lambda: False)
        least_s = 2 * (trial.comm.size - 1) * encoded_bytes(x.size // trial.comm.size) / SLOW_LINK_BYTES_PER_S
        student, own, plain = (each.median for each in seconds)
        yield Row(f"{size_bytes >> 10} KiB", size_bytes, student, own, plain, least_s)


def count_speedup(trial: Trial) -> float:
    """Return how many times faster the last sum of the race was than one of float32."""
    row = trial.rows["slow link"][-1]
    assert row.native is not None, "each row of the race has one"
    return row.native / row.student


def codec_seconds(codec: Any, n: int) -> float:
    """Return the seconds that encoding and decoding n values take together: the least, as the machine may be busy."""
    values, seconds = np.random.default_rng(0).standard_normal(n).astype(np.float32), []
    for _ in range(CODEC_ROUNDS):
        start_s = time.perf_counter()
        codec.decode(codec.encode(values), n)
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def crossover_mb_per_s(trial: Trial) -> float:
    """Return the MB/s of a link on which a message gains as long by fewer bytes as rank 0's codec takes, here and now.

    Collective over the trial's ranks, of which the others sleep.
    """
    found = 0.0
    if trial.comm.rank == 0:
        gained_bytes = 4 * MESSAGE_VALUES - encoded_bytes(MESSAGE_VALUES)
        found = gained_bytes / codec_seconds(trial.student, MESSAGE_VALUES) / 1e6
    return shared(trial.control, found)


def shared(comm: MPI.Intracomm, number: float) -> float:
    """Return rank 0's number on all ranks, which sleep until it comes."""
    box = np.array([number])
    request = comm.Ibcast(box, root=0)
    while not request.Test():
        time.sleep(PAUSE_S)
    return float(box[0])


def lengths(ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield numbers of values to sum: few, some that neither ranks nor blocks divide."""
    yield from ({"n": n} for n in dict.fromkeys((2 * ranks, BLOCK * ranks, 1, 0, 3 * BLOCK * ranks + ranks + 1)))
