"""Tests that only a real GPU can answer. Where PyTorch sees none they are skipped, and say why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hpcllm.system.device import choose_device, no_device_reason

REAL = ("cuda", "xpu")  # ROCm calls itself cuda


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
