"""A rank of a check: `python -m hpcllm.course.ranks FOLDER`, started by runner.py on all ranks at once.

    FOLDER/job.json        lab, file, seed, memory       written by runner.py, gone before the student's file is loaded
    FOLDER/rank_2.jsonl    a line before and after each case of this rank    read by runner.py while it grows
    FOLDER/stack_2.txt     where this rank was when a case took too long

A law is tried on 1 to 4 ranks: on a communicator of as many of the world's, in another order, while the others wait. A
rank that finds something wrong says so and waits to be ended, as others may be waiting for its messages for ever. The
memory and the time of a processor that it may ask for are limited from the moment on that the student's file is loaded,
and a process that the file forks ends at once: it would be a second rank of the same number.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcllm.course.catalogue import find_lab, load_lab
from hpcllm.course.lab import Lab, Law, LawError, Prediction, Race, Row, Trial
from hpcllm.course.processes import end_with_parent, shared_memory, where_pids_count
from hpcllm.course.student_file import borrowed_name, hint_of, limit, load_file, text_of
from hpcllm.course.untouched import Untouched
from hpcllm.course.watched import watched

LONGEST_TEXT = 600  # characters of a message
PAUSE_S = 0.0005  # between looks of a rank that waits for the others, which need its core
STACK_SHARE = 0.8  # of a limit of time, after which the stack is written
WRITE, EXIT, FINALIZE = os.write, os._exit, MPI.Finalize  # as they are before the student's file is loaded


class OverError(Exception):
    """This rank has said what is wrong."""


class Rank:
    """One rank's view of the job: its record, its communicators, the student's module."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.world = folder, MPI.COMM_WORLD.Dup()
        self.job: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        self.record_file = os.open(folder / f"rank_{self.world.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.stack_file = (folder / f"stack_{self.world.rank}.txt").open("w")
        self.lab: Lab = load_lab(find_lab(self.job["lab"]))
        self.ours = importlib.import_module(f"hpcllm.course.labs.{self.lab.name}.checks")
        self.rows: dict[str, list[Row]] = {}
        self.untouched = Untouched()

    def say(self, event: str, **fields: Any) -> None:
        """Append a line to this rank's record."""
        WRITE(self.record_file, (json.dumps({"event": event, **fields}) + "\n").encode())

    def meet(self) -> None:
        """Return when all ranks are here, leaving the cores to those that are not."""
        barrier = self.world.Ibarrier()
        while not barrier.Test():
            time.sleep(PAUSE_S)

    def shared_random(self, *words: object) -> random.Random:
        """Random numbers that are the same on all ranks, others for each purpose."""
        return random.Random("/".join(map(str, (self.job["seed"], *words))))

    @contextmanager
    def judged(self, limit_s: float, **place: Any) -> Iterator[None]:
        """Record what becomes of a part of the student's work. Raises OverError where it fails."""
        self.say("start", limit_s=limit_s, **place)
        faulthandler.dump_traceback_later(limit_s * STACK_SHARE, file=self.stack_file)
        try:
            yield
            self.untouched.check()
        except LawError as wrong:
            self._fail(wrong.hint, wrong.shown, place)
        except MemoryError:
            self._fail("memory", f"MemoryError {self._where()}", place)
        except NotImplementedError:
            self._fail("unfinished", f"NotImplementedError {self._where()}", place)
        except BaseException as error:  # also SystemExit, and whatever a file makes up
            self._fail(hint_of(error), f"{type(error).__name__}: {text_of(error)} {self._where()}", place)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _fail(self, hint: str, shown: str, place: Mapping[str, Any]) -> None:
        self.say("wrong", hint=hint, shown=shown[:LONGEST_TEXT], **place)
        raise OverError

    def _where(self) -> str:
        """Name the line of the student's file that the present exception came through last."""
        frames = traceback.extract_tb(sys.exc_info()[2])
        own = [frame for frame in frames if frame.filename == self.job["file"]]
        return f"(line {own[-1].lineno}: {own[-1].line})" if own else ""

    def load_student(self) -> Any:
        """Load the student's file, or take our own functions for a demonstration."""
        with self.judged(self.job["load_s"], stage="load"):
            student = self.ours.REFERENCE if self.job["file"] is None else load_file(Path(self.job["file"]))
            if self.job["file"] and (borrowed := borrowed_name(student)):
                raise LawError("borrowed", f"{borrowed} comes from hpcllm.course")
            missing = [name for name in self.lab.functions if not callable(getattr(student, name, None))]
            if missing:
                raise LawError("missing", f"there is no function {' or '.join(missing)} in the file")
        self.say("loaded")
        return student

    def laws(self, student: Any) -> None:
        for number, law in enumerate(self.lab.laws):
            for ranks in law.ranks:
                self._law(number, law, ranks, student)
            self.meet()
            self.say("held", stage="laws", part=number)

    def _law(self, number: int, law: Law, ranks: int, student: Any) -> None:
        drawn = self.shared_random("cases", number, ranks)
        order = drawn.sample(range(self.world.size), self.world.size)  # of the world's ranks in the communicator
        place = order.index(self.world.rank)
        with communicator(self.world, ranks, place) as control:
            for case_number, case in enumerate(law.cases(drawn, ranks)):
                if control:
                    self._case(law, Trial(student, self.ours, self._watched(control, case_number), control,
                                          self.shared_random("case", number, ranks, case_number), self.folder, case),
                               stage="laws", part=number, ranks=ranks, rank=control.rank, case=case)  # fmt: skip
                self.meet()

    def _watched(self, control: MPI.Intracomm, case_number: int) -> Any:
        delays = random.Random(f"{self.job['seed']}/{control.rank}/{control.size}/{case_number}")
        made = watched(control.Dup(), self.lab.forbidden, delays)
        made.keep()
        return made

    def _case(self, law: Law, trial: Trial, **place: Any) -> None:
        comm = trial.comm
        with self.judged(law.limit_s, **place):
            try:
                law.check(trial)
            except LawError as error:
                raise error if comm.waited_for() else LawError("not_waited", error.shown) from error
            if not comm.waited_for():
                raise LawError("not_waited", shown_case(place))
            trial.control.Barrier()
            if MPI.Intracomm.Iprobe(comm, MPI.ANY_SOURCE, MPI.ANY_TAG):
                raise LawError("message_left", shown_case(place))
        self.say("passed", **place)
        MPI.Intracomm.Free(comm)

    def races(self, student: Any) -> None:
        for number, race in enumerate(self.lab.races):
            trial = self._whole_trial(student, "race", number)
            self.rows[race.name] = self._race(number, race, trial)

    def _race(self, number: int, race: Race, trial: Trial) -> list[Row]:
        rows: list[Row] = []
        measured = race.measure(trial)
        while True:
            with self.judged(race.limit_s, stage="races", part=number):
                row = next(measured, None)
                if row is None:
                    return rows
                rows.append(row)
            self.say("row", stage="races", part=number, row=asdict(row))

    def predictions(self, student: Any) -> None:
        for number, prediction in enumerate(self.lab.predictions):
            self._prediction(number, prediction, self._whole_trial(student, "prediction", number))

    def _prediction(self, number: int, prediction: Prediction, trial: Trial) -> None:
        with self.judged(prediction.limit_s, stage="predictions", part=number):
            found = float(prediction.measure(trial))
            table = getattr(trial.student, "PREDICTIONS", None)
            said = table.get(prediction.key) if isinstance(table, dict) else None
            number_said = float(said) if isinstance(said, int | float) and not isinstance(said, bool) else None
        self.say("measured", stage="predictions", part=number, measured=found, predicted=number_said)

    def _whole_trial(self, student: Any, *words: object) -> Trial:
        comm = self.world.Dup()
        return Trial(student, self.ours, watched(comm), self.world, self.shared_random(*words), self.folder,
                     {}, self.rows)  # fmt: skip


@contextmanager
def communicator(world: MPI.Intracomm, ranks: int, place: int) -> Iterator[MPI.Intracomm | None]:
    """A communicator of the first `ranks` places; None on the other ranks. Collective over world."""
    made: Any = world.Split(0 if place < ranks else MPI.UNDEFINED, place)
    try:
        yield None if made == MPI.COMM_NULL else made
    finally:
        if made != MPI.COMM_NULL and sys.exc_info()[0] is None:
            made.Free()


def shown_case(place: Mapping[str, Any]) -> str:
    """'3 ranks, n = 5': a case in a line."""
    words = [f"{name} = {value}" for name, value in place["case"].items()]
    ranks = place["ranks"]
    return ", ".join([f"{ranks} rank{'' if ranks == 1 else 's'}", *words])


def slurm_step() -> str:
    """Return JOB.STEP of Slurm, '' outside of it."""
    words = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return ".".join(words) if all(words) else ""


def shut_in(rank: Rank) -> None:
    """Prepare for a file that may do anything."""
    limit(rank.job["memory_bytes"])
    faulthandler.enable(rank.stack_file)  # says where it was when the system ends it
    os.register_at_fork(after_in_child=lambda: EXIT(1))
    MPI.Finalize = ends_mpi
    rank.untouched = Untouched()


def ends_mpi() -> None:
    """Stand in for MPI.Finalize while the student's file is there."""
    raise LawError("not_yours", "the file calls MPI.Finalize")


def run(folder: Path) -> None:
    """Run the stages of a check. Collective over all ranks."""
    end_with_parent(signal.SIGKILL)  # should mpirun be killed, or end before its ranks
    rank = Rank(folder)
    rank.say("ready", library=MPI.Get_library_version().strip().splitlines()[0][:80], pid=os.getpid(),
             host=where_pids_count(), step=slurm_step(), shared=shared_memory())  # fmt: skip
    rank.meet()
    if rank.world.rank == 0:
        (folder / "job.json").unlink()  # the seed is in it
    shut_in(rank)
    stages: tuple[Callable[[Any], None], ...] = (rank.laws, rank.races, rank.predictions)
    try:
        student = rank.load_student()
        rank.meet()
        for stage in stages[1:] if rank.job["file"] is None else stages:
            stage(student)
        rank.say("done")
        FINALIZE()
    except OverError:
        time.sleep(rank.job["end_s"])  # other ranks may wait for ever; runner.py ends the job long before
    except BaseException:
        traceback.print_exc()
        EXIT(1)
    EXIT(0)  # nothing of the student's runs at the end


if __name__ == "__main__":
    run(Path(sys.argv[1]))
