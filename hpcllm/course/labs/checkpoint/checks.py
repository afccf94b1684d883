"""Checks of lab 7: a checkpoint that is there whole or not at all, whoever dies and whatever fails.

laws        on ranks of MPI: ranges and places, what was saved comes back on as many ranks and on others, damage is
            noticed, memory, a training run that is resumed (resumed.py)
            on forked ranks, which may be killed (scenarios.py): any order, all at once, calls that fail, kill -9 at
            each call, power lost after each call
race        a save of 4 ranks beside our writer's; the bound: plain writes and fsync of as many bytes
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcllm.course.lab import RANKS, Lab, Law, LawError, Prediction, Race, Row, Trial
from hpcllm.course.labs.checkpoint import ours
from hpcllm.course.labs.checkpoint.damage import check_damage
from hpcllm.course.labs.checkpoint.hints import HINTS
from hpcllm.course.labs.checkpoint.interval import COST_S, MTBF_S, best_interval, simulated_loss
from hpcllm.course.labs.checkpoint.ours import REFERENCE
from hpcllm.course.labs.checkpoint.resumed import check_resumed
from hpcllm.course.labs.checkpoint.states import compare, draw
from hpcllm.course.ranges import check_ranges, lengths
from hpcllm.perf.timing import Case, in_turns

SCENARIO_S = 60.0
LONG = 1_000_000  # values of a rank, of which each copy shows
SPARE_BYTES = 1 << 21
QUESTION = 1_000_000  # parameters
RACE_BYTES = (1 << 22, 1 << 25)
ROUNDS = 5
__all__ = ["LAB", "REFERENCE"]


def sizes(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield lengths of arrays: short ones first."""
    yield from ({"n": n} for n in (2 * ranks, drawn.randrange(40, 300), drawn.randrange(10_000, 50_000)))


def readers(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield other numbers of ranks that write."""
    yield from ({"writers": writers, "n": drawn.randrange(20, 200)} for writers in range(1, ranks + 1))


def seeds(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    yield {"seed": drawn.randrange(1000)}


def processes(*numbers: int) -> Callable[[random.Random, int], Iterator[Mapping[str, Any]]]:
    """Make the cases of a law on forked ranks."""
    return lambda drawn, _: ({"processes": number, "seed": drawn.randrange(1000)} for number in numbers)


def new_folder(trial: Trial) -> Path:
    """Make an empty folder that all ranks see. Collective over the ranks of the trial."""
    made = tempfile.mkdtemp(dir=trial.folder) if trial.control.rank == 0 else None
    return Path(trial.control.bcast(made))


def check_places(trial: Trial) -> None:
    """Ask where parts of uneven lengths begin."""
    parts = [trial.random.randrange(trial.case["n"]) for _ in range(trial.comm.size)]
    length = parts[trial.comm.rank]
    found = trial.student.place(length, trial.comm)
    wanted = sum(parts[: trial.comm.rank]), sum(parts)
    said = f"parts of {parts}: on rank {trial.comm.rank} place is {found!r:.100}, not {wanted}"
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise LawError("two_numbers", said)
    if tuple(found) != wanted:
        raise LawError("offset", said)


def check_round_trip(trial: Trial) -> None:
    """Save twice, load, and compare all bits."""
    folder, comm = new_folder(trial), trial.comm
    for step in (trial.random.randrange(20, 50), trial.random.randrange(50, 100)):
        state = draw(trial.random, trial.case["n"], comm.size)
        parts = state.parts(comm.rank)
        trial.student.save(comm, folder, step, parts)
        place = f"rank {comm.rank} of {comm.size}, n = {trial.case['n']}"
        if any(part.tobytes() != parts[name].tobytes() for name, part in state.parts(comm.rank).items()):
            raise LawError("overwritten", f"{place}: the parts that were given have changed")
        trial.control.Barrier()
        compare_load(trial, comm, folder, step, state, place)


def compare_load(trial: Trial, comm: Any, folder: Path, step: int, state: Any, place: str) -> None:
    """Load, and compare with the state as the student's own_range cuts it."""
    try:
        found = trial.student.load(comm, folder)
    except FileNotFoundError as error:
        raise LawError("not_found", f"{place}: right after save: FileNotFoundError: {error}") from error
    wanted = {}
    for name, array in state.arrays.items():
        start, end = trial.student.own_range(array.size, comm)
        wanted[name] = array[start:end]
    compare(found, step, wanted, place)


def check_other_ranks(trial: Trial) -> None:
    """Write by some of the ranks, read by all, and the other way round."""
    few, n = trial.case["writers"], trial.case["n"]
    is_one = trial.control.rank < few
    split: Any = trial.control.Split(0 if is_one else 1, trial.control.rank)
    for writers, comm in ((few, split), (trial.comm.size, trial.comm)):
        folder, state = new_folder(trial), draw(trial.random, n, writers)
        readers = few if writers == trial.comm.size else trial.comm.size
        if is_one or writers == trial.comm.size:
            trial.student.save(comm, folder, 3, state.parts(comm.rank))
        trial.control.Barrier()
        if is_one or readers == trial.comm.size:
            reading = split if readers == few and few < trial.comm.size else trial.comm
            place = f"written by {writers} ranks, read by {readers}, rank {reading.rank}"
            compare_load(trial, reading, folder, 3, state, place)
        trial.control.Barrier()
    split.Free()


def check_memory(trial: Trial) -> None:
    """Measure the memory that a rank asks for in save, and in load with what it returns."""
    folder, comm = new_folder(trial), trial.comm
    parts = {"weight": np.full(LONG, comm.rank, np.float32)}
    saved = peak_bytes(lambda: trial.student.save(comm, folder, 1, parts))
    loaded = peak_bytes(lambda: trial.student.load(comm, folder))
    for name, peak, shares in (("save", saved, 2), ("load", loaded, 3)):
        most = shares * parts["weight"].nbytes + SPARE_BYTES
        worst = trial.control.allreduce(peak, MPI.MAX)
        if worst > most:
            raise LawError("scratch", f"{comm.size} ranks with {parts['weight'].nbytes} bytes each: {name} asks for "
                           f"{worst} bytes on one of them; at most {most}")  # fmt: skip


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that Python and NumPy had of what a function asked for."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = work()
        del kept
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def scenario(name: str) -> Callable[[Trial], None]:
    """Make the check of a law on forked ranks."""

    def check(trial: Trial) -> None:
        job = {
            "law": name,
            "file": trial.student.__file__,
            "ranks": trial.case["processes"],
            "seed": trial.case["seed"],
        }
        folder = Path(tempfile.mkdtemp(dir=trial.folder))
        path = folder / "job.json"
        path.write_text(json.dumps(job | {"folder": str(folder / "scratch")}), encoding="utf-8")
        words = [sys.executable, "-m", "hpcllm.course.labs.checkpoint.scenarios", str(path)]
        own = dict(os.environ) | {"MPI4PY_RC_INITIALIZE": "0", "MPI4PY_RC_FINALIZE": "0"}
        done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=own, timeout=SCENARIO_S,
                              check=False, stdin=subprocess.DEVNULL)  # fmt: skip
        if done.returncode:
            raise LawError("crash", done.stderr.decode("utf-8", "replace")[-500:])
        if found := json.loads(path.with_suffix(".result").read_text(encoding="utf-8")):
            raise LawError(*found)

    return check


def resume(trial: Trial) -> None:
    check_resumed(trial, new_folder(trial))


def damage(trial: Trial) -> None:
    check_damage(trial, new_folder(trial))


def race(trial: Trial) -> Iterator[Row]:
    """Time a save by the student, by us, and plain writes, in turns."""
    for size_bytes in RACE_BYTES:
        parts = {"weight": np.ones(size_bytes // 4 // RANKS, np.float32)}
        plain = MPI.Intracomm(trial.comm)
        cases = [Case(partial(save, plain, new_folder(trial), 1, parts)) for save in (trial.student.save, ours.save)]
        cases.append(Case(partial(write_plainly, new_folder(trial), trial.control, parts["weight"])))
        student, own, bound = (each.median for each in in_turns(trial.control, cases, ROUNDS, 1, lambda: False))
        yield Row(f"{size_bytes} bytes", size_bytes, student, own, bound=bound)


def write_plainly(folder: Path, comm: MPI.Intracomm, values: Any) -> None:
    """Write a part of one file, and wait for the disk."""
    file = os.open(folder / "plain", os.O_CREAT | os.O_WRONLY)
    os.pwrite(file, values, comm.rank * values.nbytes)
    os.fsync(file)
    os.close(file)


def count_file_bytes(trial: Trial) -> float:
    """Return the length of the file that the student writes."""
    folder, start_end = new_folder(trial), trial.student.own_range(QUESTION, trial.comm)
    own = np.zeros(int(start_end[1] - start_end[0]), np.float32)
    trial.student.save(trial.comm, folder, 1, {"parameters": own, "exp_avg": own, "exp_avg_sq": own})
    trial.control.Barrier()
    return float((folder / "step_1.ckpt").stat().st_size)


def find_interval(_: Trial) -> float:
    """Search the best interval."""
    return best_interval(COST_S, MTBF_S)


def simulate_loss(trial: Trial) -> float:
    """Simulate a job with failures at that interval."""
    return simulated_loss(best_interval(COST_S, MTBF_S), COST_S, MTBF_S, trial.random.getrandbits(32))


LAB = Lab(
    number=7,
    name="checkpoint",
    title="checkpoint and kill -9",
    functions=("own_range", "place", "save", "newest", "load"),
    laws=(
        Law("ranges", "the ranks' ranges follow one another, even to one value", 4, lengths, check_ranges),
        Law("places", "parts of any lengths lie one behind the other", 6, sizes, check_places),
        Law("orders", "the file is whole, whichever rank is ahead or behind", 5,
            processes(3), scenario("orders"), (1,), SCENARIO_S),
        Law("round trip", "what was saved comes back, bit for bit", 10, sizes, check_round_trip),
        Law("other ranks", "and on more or fewer ranks than wrote it", 10, readers, check_other_ranks, (2, 3, RANKS)),
        Law("damage", "a damaged file is noticed, and the older one taken", 10, seeds, damage, (1, 3)),
        Law("at once", "each rank writes its part, and waits for no other one to write", 5,
            processes(3), scenario("at once"), (1,), SCENARIO_S),
        Law("memory", "no rank gathers what the others have", 5, seeds, check_memory, (RANKS,)),
        Law("faults", "if a call fails on one rank, save raises on all", 10,
            processes(1, 3), scenario("faults"), (1,), SCENARIO_S),
        Law("killed", "kill -9 at any call leaves the older one, or the new one", 10,
            processes(1, 3), scenario("killed"), (1,), SCENARIO_S),
        Law("power", "so does a loss of power, and after save it is the new one", 10,
            processes(1, 3), scenario("power"), (1,), SCENARIO_S),
        Law("resumed", "a resumed training run has the bits of one that was not ended", 5, seeds, resume, (1, 3), 30.0),
    ),
    races=(Race("save", "4 and 32 MiB by 4 ranks, beside our writer", 4, race, ((2.0, 1.0), (4.0, 0.5))),),
    predictions=(
        Prediction("file_bytes", "bytes of a checkpoint of a million parameters", 2, count_file_bytes, 1.01),
        Prediction("interval_s", "seconds between checkpoints that lose least time", 2, find_interval, 1.05),
        Prediction("lost_share", "share of the time that is lost nevertheless", 2, simulate_loss, 1.1),
    ),
    hints=HINTS,
    forbidden=(
        *("Send", "Isend", "Ssend", "Issend", "Recv", "Irecv", "Sendrecv", "send", "isend", "recv", "irecv"),
        *("sendrecv", "Bcast", "Ibcast", "Gather", "Gatherv", "Igather", "Igatherv", "Allgather", "Allgatherv"),
        *("Iallgather", "Iallgatherv", "Reduce", "Ireduce", "Allreduce", "Iallreduce", "Scan", "Exscan", "Scatter"),
        *("Scatterv", "Alltoall", "Alltoallv", "Reduce_scatter", "Ireduce_scatter", "scatter", "alltoall", "Ibarrier"),
        *("Dup", "Split", "dup"),
    ),
)  # fmt: skip
