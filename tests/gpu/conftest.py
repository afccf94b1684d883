"""Tests that only a real GPU can answer. Where PyTorch sees none they are skipped, and say why.

HPCLLM_GPU_DRY names one more kind of device that will do: tests/codecs/gpu/test_dry.py runs some on the pretended one,
so that a typo is not met on a machine that is paid by the hour.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from hpcllm.system.device import choose_device, no_device_reason

REAL = ("cuda", "xpu", os.environ.get("HPCLLM_GPU_DRY"))  # ROCm calls itself cuda


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None and kind.type in REAL:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {no_device_reason(os.environ)}"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """One device for all ranks, however many there are."""
    return choose_device("gpu")


@pytest.fixture
def no_waiting(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Context in which torch raises for each of its calls that would wait for the device. CUDA and ROCm only."""

    @contextmanager
    def guarded() -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guarded
