"""Fixtures of all tests. Parallel tests carry `@pytest.mark.parallel([1, 2, 3, 4])` and state a law for any size."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")


@pytest.fixture
def comm() -> Iterator:
    """A communicator of the test's own, so that no message of another test can reach it."""
    from mpi4py import MPI

    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def shared_path(comm) -> Iterator[Path]:
    """One new folder that all ranks see; its name has a space, as users' folders do."""
    path = comm.bcast(tempfile.mkdtemp(prefix="hpcllm test ") if comm.rank == 0 else None)
    yield Path(path)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
