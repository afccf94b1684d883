"""Start, stop signals and end of a job: one process without MPI, or many ranks, which end together.

one process                      a command that can do without MPI starts none: works where only a login node is
many processes                   MPI, as any other command; whoever launched them says how many there are
every rank fails, knowingly      rank 0 says it once, all leave with its exit code
one rank fails alone             it says who it is and why, and ends the whole job at once (MPI_Abort)
one rank stops answering         rank 0 says who waits for whom and ends the job (mpi/watchdog.py)
SIGTERM, SIGUSR1, Ctrl-C         a flag; the loop finishes its step, saves, and leaves: TO_BE_CONTINUED
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpcllm.errors import HpcllmError, UserError

if TYPE_CHECKING:
    from mpi4py import MPI

TO_BE_CONTINUED = 75  # exit code of a run that stopped with a checkpoint; EX_TEMPFAIL of sysexits.h: try again
INSIST_S = 1.0  # one Ctrl-C may reach a rank twice, from the terminal and from the launcher
GATHER_LIMIT_S = 2.0  # for ranks that make the same mistake to find each other
FORWARD_S = 0.5  # for the launcher to pass our last words on: an abort can overtake them
# where launchers say how many ranks they started: Open MPI and PRRTE, MPICH and Cray PALS, srun
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_ranks() -> int:
    """Return the number of processes that a launcher says it has started, without asking MPI; 1 if none says so."""
    return max((int(value) for name in SIZE_VARIABLES if (value := os.environ.get(name, "")).isdigit()), default=1)


def launcher() -> str:
    """Return who started this process as one of several ranks: slurm, openmpi, mpich; "" for a process alone."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "openmpi"
    if "SLURM_STEP_NUM_TASKS" in os.environ and "HYDI_CONTROL_FD" not in os.environ:
        return "slurm"
    return "mpich" if "PMI_SIZE" in os.environ else ""


def run_with_or_without_mpi(command: Callable[[MPI.Intracomm | None], int]) -> int:
    """Run a command on all launched ranks, or on None, without MPI, if there is one process. Returns the exit code."""
    if launched_ranks() == 1:
        with _leaving_at_sigterm():
            return command(None)
    return run_job(command)


def run_job(command: Callable[[MPI.Intracomm], int]) -> int:
    """Run a command on all ranks; returns its exit code, or that of the error it raised.

    The command gets a copy of the world, so that no message of its own can meet those by which ranks end together.
    """
    from mpi4py import MPI  # starts MPI

    world = MPI.COMM_WORLD
    try:
        return command(world.Dup())
    except HpcllmError as error:
        if error.everywhere or (isinstance(error, UserError) and _all_arrive(world)):
            if world.rank == 0:
                print(f"hpcllm: error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        _abort(world, f"{type(error).__name__}: {error}", error.exit_code)
    except KeyboardInterrupt:
        _abort(world, "interrupted", 130)
    except BrokenPipeError:
        _abort(world, "nobody reads its standard output any more", 1)
    except BaseException:
        _abort(world, traceback.format_exc(), 1)
    return 1


def _all_arrive(world: MPI.Intracomm) -> bool:
    """Return True if every rank comes here within the limit: all made the same mistake and may leave in peace."""
    barrier = world.Ibarrier()
    deadline = time.monotonic() + GATHER_LIMIT_S
    while not barrier.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _abort(world: MPI.Intracomm, message: str, code: int) -> None:
    from mpi4py import MPI

    here = f"rank {world.rank} of {world.size} on {MPI.Get_processor_name()}"
    try:
        print(f"hpcllm: {here} ends the job: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(FORWARD_S)
    finally:  # a closed pipe or a full disk must not leave the other ranks waiting
        world.Abort(code)


@dataclass
class StopSignals:
    """Handler of signals: while open, SIGTERM, SIGUSR1 and Ctrl-C set `received`; a second Ctrl-C later interrupts."""

    received: str = ""
    _interrupted_s: float | None = None
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def keep_out(self) -> None:
        """Ignore the scheduler's signals from now on, also once closed: the process has heard them and is leaving.

        A repeated one that came while MPI shuts down would turn a clean end into a failed job.
        """
        self._before |= {signal.SIGTERM: signal.SIG_IGN, signal.SIGUSR1: signal.SIG_IGN}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now_s = time.monotonic()
        if self._interrupted_s is None:
            self._interrupted_s = now_s
        elif now_s - self._interrupted_s > INSIST_S:
            raise KeyboardInterrupt


@contextmanager
def _leaving_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process as an exit does, so that what is half written is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
