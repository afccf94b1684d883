"""Fixtures of all tests. Parallel tests carry `@pytest.mark.parallel([1, 2, 3, 4])` and state a law for any size.

`@pytest.mark.pretend` tests need a device: the one of tests/pretend, which a process has from its start or not at all,
    HPCLLM_PRETEND=sealed    MPI cannot read its memory, as with most MPI libraries and GPUs
    HPCLLM_PRETEND=open      MPI can
    HPCLLM_PRETEND_SEED=7    chance on it, and of its messages, else of seed 1; a test that fails says it
and then they are the only ones that run. One that holds for one of the two says so: `@pytest.mark.pretend("open")`.
    HPCLLM_PRETEND=late      no device; messages of all others on several ranks use MPI's freedom (pretend/messages.py)

`@pytest.mark.alone` tests hold a limit of time that a neighbour on the other core would break.

`@pytest.mark.full(reason="...")` tests are left to `tests/run.sh --all`, see sampling.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pretend
import pytest
from pretend.counts import none_denied
from sampling import LATE, may_be_late

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")


pytest_plugins = ["pytester"]  # tests of plugins run pytest inside pytest

MODE, DEVICES = os.environ.get("HPCLLM_PRETEND", ""), ("sealed", "open")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pretend(mode): runs on the device of tests/pretend, in this mode or in both")
    config.addinivalue_line("markers", "alone: holds a limit of time; nothing else runs beside it")
    config.addinivalue_line("markers", "may_wait: launches what makes CUDA's host wait, as making text does")
    config.addinivalue_line("markers", "full(reason): left to tests/run.sh --all, see sampling.py")
    if MODE in DEVICES and not pretend.why_not():
        pretend.start(open_=MODE == "open")
    if MODE == LATE or (MODE and not pretend.why_not()):
        pretend.watch()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without any test of this group are not even imported, which all ranks would do at once."""
    selected = config.getoption("markexpr")
    group = next((name for name in ("parallel", "alone") if selected.startswith(name)), "")
    marker = "mark.pretend" if MODE in DEVICES else f"mark.{group}" if group else ""
    is_tests = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_tests and marker not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Give signals back to whom they were: a command that ends well leaves some ignored, and children inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Say the seed of the pretended device beside a failure."""
    report: Any = yield
    if MODE and report.failed:
        report.sections.append(("pretended device", f"HPCLLM_PRETEND_SEED={pretend.seed()}"))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the device run where there is one, and all others where there is none."""
    config.hook.pytest_deselected(items=[item for item in items if not _runs(item)])
    items[:] = [item for item in items if _runs(item)]
    for item in items if MODE in DEVICES and pretend.why_not() else ():
        item.add_marker(pytest.mark.skip(reason=pretend.why_not()))
    if hasattr(config, "workerinput"):  # what takes longest first
        items.sort(key=lambda item: starts(item.path))


@cache
def starts(path: Path) -> int:
    """0: tests of this file start jobs of several ranks; 1: other processes; 2: none."""
    text = path.read_text(encoding="utf-8")
    return 0 if any(word in text for word in ("launcher(", "run_script", "mpirun")) else 1 + ("subprocess" not in text)


def _runs(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("pretend")
    if MODE in DEVICES:
        return marker is not None and (not marker.args or MODE in marker.args)
    return marker is None and (MODE != LATE or may_be_late(item))


@pytest.fixture
def comm() -> Iterator[Intracomm]:
    """A communicator of the test's own, so that no message of another test can reach it."""
    from mpi4py import MPI

    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def shared_path(comm: Intracomm) -> Iterator[Path]:
    """One new folder that all ranks see; its name has a space, as users' folders do."""
    path = comm.bcast(tempfile.mkdtemp(prefix="hpcllm test ") if comm.rank == 0 else None)
    yield Path(path)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Nothing on the pretended device, in messages or between threads is used without order, where that is watched."""
    pretend.take_faults()
    yield
    faults = pretend.take_faults()
    assert not faults, "\n".join(faults)


@pytest.fixture(autouse=True)
def no_hidden_waits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing that a test has launched on the pretended device would make the host wait inside CUDA."""
    is_watched = MODE in DEVICES and not pretend.why_not() and not request.node.get_closest_marker("may_wait")
    with none_denied() if is_watched else nullcontext():
        yield


@pytest.fixture
def device_messages() -> Iterator[None]:
    """Messages of device tensors lie on the device if MPI can read that, in pinned host memory if not."""
    from hpcllm.mpi.message_memory import let_mpi_read_devices

    let_mpi_read_devices(MODE == "open")
    yield
    let_mpi_read_devices(False)
