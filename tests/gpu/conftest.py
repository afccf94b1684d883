"""Tests that only a real GPU can answer. Where PyTorch sees none they are skipped, and say why.

HPCLLM_GPU_DRY=pretend lets them run on the pretended device, with emulated kernels, so that a typo is not met on a
machine that is paid by the hour: tests/codecs/gpu/test_dry.py. Arrays are small then.

Warnings of libraries fail no test here: nobody has seen those of a device yet. They are in the report (outcomes.py).
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

DRY = os.environ.get("HPCLLM_GPU_DRY", "")
REAL = ("cuda", "xpu", DRY)  # ROCm calls itself cuda
HostWaits = Callable[[], AbstractContextManager[list[str]]]

if DRY == "pretend":
    import pretend
    from pretend import threads

    pretend.start()
    threads.watch(pretend.native())  # before hpcllm is imported
    from emulated import EMULATOR

    from hpcllm.codecs.gpu.launch import LAUNCHERS

    LAUNCHERS["pretend"] = lambda: EMULATOR

from hpcllm.system.device import choose_device, no_device_reason  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
            if kind is None or kind.type not in REAL:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {no_device_reason(os.environ)}"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """One device for all ranks, however many there are."""
    return choose_device("gpu")


@pytest.fixture
def host_waits(device: torch.device) -> HostWaits:
    """Context whose list has, at its end, the places where torch has made the program wait for the device.

    Lanes' threads, which are there to wait, do not count. By torch's own notes on CUDA and ROCm, by the counts of the
    pretended device; none on other devices.
    """
    return {"cuda": _noted_by_torch, "pretend": _counted}.get(device.type, _unknown)


@pytest.fixture
def no_waiting(host_waits: HostWaits) -> Callable[[], AbstractContextManager[None]]:
    """Context that fails if torch has made the host wait for the device in it."""

    @contextmanager
    def guarded() -> Iterator[None]:
        with host_waits() as places:
            yield
        assert not places

    return guarded


@contextmanager
def _noted_by_torch() -> Iterator[list[str]]:
    places: list[str] = []

    def note(message: Warning | str, _category: object, filename: str, lineno: int, *_: object) -> None:
        if threading.current_thread() is threading.main_thread() and "called a synchronizing" in str(message):
            places.append(f"{Path(filename).name}:{lineno}")

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # called in the thread that waits; a lane's may
        torch.cuda.set_sync_debug_mode("warn")  # which says of itself that it is a prototype
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()


@contextmanager
def _counted() -> Iterator[list[str]]:
    from pretend.counts import READ, counting

    places: list[str] = []
    with counting() as counts:
        yield places
    places += [block.place for block in counts.waits() if block.name == READ for _ in range(block.times)]


@contextmanager
def _unknown() -> Iterator[list[str]]:
    yield []
