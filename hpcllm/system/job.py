"""Start, stop signals and end of a job: one process without MPI, or many ranks, which end together.

one process                      a command that can do without MPI starts none: works where only a login node is
many processes                   MPI, as any other command; whoever launched them says how many there are
every rank fails, knowingly      rank 0 says it once, all leave with its exit code
one rank crashes                 the stack that Python prints begins with who it is
one rank fails alone             it says who it is and why, and ends the whole job at once (MPI_Abort)
one rank stops answering         rank 0 says who waits for whom and ends the job (mpi/watchdog.py)
MPI itself does not return       the rank says from which call, and ends the job (mpi/stuck_calls.py)
the abort does not end it        the rank ends itself, and the launch script ends mpirun
SIGTERM, SIGUSR1, Ctrl-C         a flag; the loop finishes its step, saves, and leaves: TO_BE_CONTINUED
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from hpcllm.errors import HpcllmError, UserError
from hpcllm.system.output import error_line
from hpcllm.system.text import harmless

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
WAIT_LIMIT_S = 600.0  # of a command's waits for other ranks, as limits.stall_s of a run
TO_BE_CONTINUED = 75  # exit code of a run that stopped with a checkpoint; EX_TEMPFAIL of sysexits.h: try again
INSIST_S = 1.0  # one Ctrl-C may reach a rank twice, from the terminal and from the launcher
GATHER_LIMIT_S = 2.0  # for ranks that make the same mistake to find each other
ABORT_S = 5.0  # for an abort to end this process; with a link down Open MPI's never returns
# variable: a file for launch.sh. "running": rank 0 has not come to its end, so an mpirun that ends with 0 has lost its
# host or another; a number: the exit code of an abort; "Timeout": a traceback, of a call_within that took too long.
# After these two mpirun may have to be ended
ABORT_FILE = "HPCLLM_ABORTED"
RUNNING = "running"
FORWARD_S = 0.5  # for the launcher to pass our last words on: an abort can overtake them
# where launchers say how many ranks they started: Open MPI and PRRTE, MPICH and Cray PALS, srun, flux run
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "FLUX_JOB_SIZE")
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID", "SLURM_PROCID", "FLUX_TASK_RANK")
# of a frame: read after "Timeout" where the limit of the call has passed, after "Segmentation fault" where it crashed
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
MOST_TRIM_BYTES = 2**31 - 1  # an int

WAITS_FOR_ALL = "which returns once all ranks have come to it"


def launched_ranks() -> int:
    """Return the number of processes that a launcher says it has started, without asking MPI; 1 if none says so."""
    return max((int(value) for name in SIZE_VARIABLES if (value := os.environ.get(name, "")).isdigit()), default=1)


def launched_rank() -> str:
    """Return the rank of this process in its launcher's words, without asking MPI; "0" if none says it."""
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")


def launcher() -> str:
    """Return who started this process as one of several ranks: slurm, flux, openmpi, mpich; "" for a process alone."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "openmpi"
    if "HYDI_CONTROL_FD" not in os.environ:  # of an mpirun inside a step
        if "SLURM_STEP_NUM_TASKS" in os.environ:
            return "slurm"
        if "FLUX_TASK_RANK" in os.environ:
            return "flux"
    return "mpich" if "PMI_SIZE" in os.environ else ""


def run_with_or_without_mpi(command: Callable[[MPI.Intracomm | None], int], limit_s: float = WAIT_LIMIT_S) -> int:
    """Run a command on all launched ranks, or on None, without MPI, if there is one process. Returns the exit code.

    limit_s: see run_job.
    """
    if launched_ranks() == 1:
        with _leaving_at_sigterm():
            return command(None)
    return run_job(command, limit_s)


def run_job(command: Callable[[MPI.Intracomm], int], limit_s: float = WAIT_LIMIT_S) -> int:
    """Run a command on all ranks; returns its exit code, or that of the error it raised.

    limit_s: of waits for other ranks from the first call of MPI on, until the command knows better. The command gets a
    copy of the world, so that no message of its own can meet those by which ranks end together.
    """
    world = start_mpi(limit_s)
    try:
        # the name of a frame, as a rank that crashes in compiled code can print its stack and nothing else
        return _named(f"rank {world.rank} of {world.size} on {_host()}", partial(_watched, command, world))()
    except HpcllmError as error:
        if error.everywhere or (isinstance(error, UserError) and _all_arrive(world)):
            if world.rank == 0:
                print(error_line(str(error)), file=sys.stderr, flush=True)
            return error.exit_code
        _abort(world, f"{type(error).__name__}: {error}", error.exit_code)
    except KeyboardInterrupt:
        _abort(world, "interrupted", 130)
    except BrokenPipeError:
        _abort(world, "nobody reads its standard output any more", 1)
    except BaseException:
        _abort(world, traceback.format_exc(), 1)
    return 1


def call_within(limit_s: float, words: str, function: Callable[[], T]) -> T:
    """Call a function; end the process with exit code 1 if that takes longer, even if native code keeps the GIL.

    A thread of the interpreter's own does that. It prints nothing but a traceback, so the words are there: as the name
    of a function. They go to the file of ABORT_FILE, if there is one: the launch script prints them and sees that
    mpirun ends, which Open MPI's does not while a stopped rank has not greeted it to the end.
    """
    call = _named(words, function)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("a")) if (path := _abort_file()) else sys.__stderr__ or 2
        faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        return call()


def _named(words: str, function: Callable[[], T]) -> Callable[[], T]:
    """Return the function with a frame around it whose name is 'hpcllm: WORDS'."""

    def call() -> T:
        return function()

    call.__code__ = call.__code__.replace(co_name=f"hpcllm: {words}")
    return call


def start_mpi(limit_s: float) -> MPI.Intracomm:
    """Start MPI on this process, and the watch over its calls; returns the world. Collective over all ranks."""
    import_mpi = partial(importlib.import_module, "mpi4py.MPI")
    mpi = call_within(limit_s, f"rank {launched_rank()} in MPI_Init, {WAITS_FOR_ALL}", import_mpi)
    from hpcllm.mpi.stuck_calls import watch_calls
    from hpcllm.mpi.wait import job_waits

    keep_freed_memory()
    world: MPI.Intracomm = mpi.COMM_WORLD
    job_waits.limit_s = limit_s
    watch_calls(job_waits, world.rank, lambda message: _abort(world, message, 1))
    if world.rank == 0:
        _tell_launch_script(RUNNING)
    atexit.unregister(_finalize)
    atexit.register(_finalize)
    return world


def keep_freed_memory() -> str:
    """Let glibc keep what this process frees: it maps whatever takes 32 MiB and more anew each time otherwise.

    The temporaries of an MPI library's long sums are such, and the kernel clears each of their pages again: of 64 MiB
    on 2 ranks a sum takes twice as long then. The process keeps the most memory that it ever had. Not by the variables
    that glibc reads at the start, for these hold while MPI starts, too: MPICH's PMI2 client then talked nonsense with
    Slurm in some places. Does nothing where a user has set them, or where the C library is another. Returns what holds
    now, in words.
    """
    if found := sorted(os.environ.keys() & {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}):
        return f"kept or not as {' and '.join(found)} {'says' if len(found) == 1 else 'say'}"
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, MOST_TRIM_BYTES):
            return "kept by the process, by mallopt"
    return "kept or not as this C library does, which has no mallopt"


def _finalize() -> None:
    """Leave MPI, which waits for all ranks."""
    from mpi4py import MPI

    from hpcllm.mpi.wait import job_waits

    if MPI.Is_initialized() and not MPI.Is_finalized():
        rank = MPI.COMM_WORLD.rank
        call_within(job_waits.limit_s, f"rank {rank} in MPI_Finalize, {WAITS_FOR_ALL}", MPI.Finalize)
        if rank == 0:
            _tell_launch_script("")


def _watched(command: Callable[[MPI.Intracomm], int], world: MPI.Intracomm) -> int:
    """Run the command on a copy of the world, under a watchdog if there is anybody to wait for."""
    from hpcllm.mpi.meeting_comm import MeetingComm
    from hpcllm.mpi.wait import meet
    from hpcllm.mpi.watchdog import open_watchdog

    if world.size == 1:
        return command(world.Dup())
    meet(world, "to start")
    copy = MeetingComm(world.Dup())
    with open_watchdog(copy, lambda _: ""):
        return command(copy)


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
    try:
        here = f"rank {world.rank} of {world.size} on {_host()}"
        print(harmless(f"hpcllm: {here} ends the job: {message}"), file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(FORWARD_S)
    finally:  # a closed pipe or a full disk must not leave the other ranks waiting
        _end_soon(code)
        world.Abort(code)


def _host() -> str:
    from mpi4py import MPI

    return MPI.Get_processor_name()


def _end_soon(code: int) -> None:
    """End this process ABORT_S from now if MPI_Abort does not; it keeps the GIL, so no thread of Python could."""
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - for a traceback that nobody needs, as long as the process lives
    faulthandler.dump_traceback_later(ABORT_S, exit=True, file=nowhere)
    _tell_launch_script(str(code))


def _tell_launch_script(word: str) -> None:
    """Write to the file of ABORT_FILE, if a launch script has made one on this host."""
    with contextlib.suppress(OSError):
        if path := _abort_file():
            path.write_text(f"{word}\n" if word else "", encoding="ascii")


def _abort_file() -> Path | None:
    path = Path(os.environ.get(ABORT_FILE) or os.devnull)
    return path if path.is_file() and os.access(path, os.W_OK) else None


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
