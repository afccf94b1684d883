"""How a job of many ranks starts, is asked to stop, and ends: together.

every rank fails, knowingly      rank 0 says it once, all leave with its exit code
one rank fails alone             it says who it is and why, and ends the whole job at once (MPI_Abort)
one rank stops answering         rank 0 says who waits for whom and ends the job (watch.py)
SIGTERM, SIGUSR1, Ctrl-C         a flag; the loop finishes its step, saves, and leaves: TO_BE_CONTINUED
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from mpi4py import MPI

from hpcllm.errors import HpcllmError, UserError

TO_BE_CONTINUED = 75  # exit code of a run that stopped with a checkpoint; EX_TEMPFAIL of sysexits.h: try again
INSIST_S = 1.0  # one Ctrl-C may reach a rank twice, from the terminal and from the launcher
GATHER_LIMIT_S = 2.0  # for ranks that make the same mistake to find each other
FORWARD_S = 0.5  # for the launcher to pass our last words on: an abort can overtake them


def run_job(command: Callable[[MPI.Intracomm], int]) -> int:
    """Run one command on all ranks; returns its exit code, or that of the error it raised.

    The command gets a copy of the world, so that no message of its own can meet those by which ranks end together.
    """
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
    """Whether every rank came here within the limit: then all made the same mistake and may leave in peace."""
    barrier = world.Ibarrier()
    deadline = time.monotonic() + GATHER_LIMIT_S
    while not barrier.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _abort(world: MPI.Intracomm, message: str, code: int) -> None:
    here = f"rank {world.rank} of {world.size} on {MPI.Get_processor_name()}"
    try:
        print(f"hpcllm: {here} ends the job: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(FORWARD_S)
    finally:  # a closed pipe or a full disk must not leave the other ranks waiting
        world.Abort(code)


@dataclass
class StopSignals:
    """While open: SIGTERM, SIGUSR1 and Ctrl-C set `received`; a second Ctrl-C, INSIST_S later, interrupts."""

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
