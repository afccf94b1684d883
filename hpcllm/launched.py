"""Alone or one of many: how a command that can do without MPI starts.

    one process       no MPI at all: works where only a login node is, and where MPI ends whom it did not start
    many processes    MPI, as any other command

Whoever launched them says how many there are; MPI itself could only be asked by starting it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

# where launchers say how many ranks they started: Open MPI and PRRTE, MPICH and Cray PALS, srun
LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_ranks() -> int:
    """How many processes a launcher says it has started, without asking MPI; 1 if none says so."""
    return max((int(value) for name in LAUNCHED if (value := os.environ.get(name, "")).isdigit()), default=1)


def launcher() -> str:
    """Who started this process as one of several ranks: slurm, openmpi, mpich, or "" where nobody says so."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "openmpi"
    if "SLURM_STEP_NUM_TASKS" in os.environ and "HYDI_CONTROL_FD" not in os.environ:
        return "slurm"
    return "mpich" if "PMI_SIZE" in os.environ else ""


def run_alone_or_together(command: Callable[[MPI.Intracomm | None], int]) -> int:
    """Exit code of the command, which gets the ranks that were launched, or None if there is one: no MPI is started."""
    if launched_ranks() == 1:
        with _leaving_at_sigterm():
            return command(None)
    from hpcllm.job import run_job

    return run_job(command)


@contextmanager
def _leaving_at_sigterm() -> Iterator[None]:
    """SIGTERM ends the process as an exit does, so that what is half written is taken away."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
