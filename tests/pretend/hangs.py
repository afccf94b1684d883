"""A device that hangs: by what name, and for how long at most, each call waits that blocks until it has come so far.

    with hanging(DEVICE) as waits:
        ...
    waits    ("its device to end the step, rank 0", 180.0), a pair for each such call; ("", inf) where it has no name

What stuck_calls.py makes of a name past its limit is tested in tests/mpi.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hpcllm.mpi.message_memory import StreamEvents
from hpcllm.mpi.wait import job_waits

READS = ("tolist", "item", "cpu", "numpy")  # of a tensor's values by the host


@contextmanager
def hanging(device: str) -> Iterator[list[tuple[str, float]]]:
    """Listen to the blocking reads of this type of device, and to waits for events of its messages."""
    waits: list[tuple[str, float]] = []

    def hang() -> None:
        call = job_waits.calls.get(threading.get_ident())
        waits.append((call.what(), call.waits.limit_s or math.inf) if call else ("", math.inf))

    class Hanging:
        """An event that is over when it is waited for."""

        def record(self, _: torch.Stream) -> None:
            pass

        def query(self) -> bool:
            torch.accelerator.synchronize(device)
            return True

        def synchronize(self) -> None:
            torch.accelerator.synchronize(device)
            hang()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamEvents, "_recorded", lambda _: Hanging())
        for name in READS:
            patch.setattr(torch.Tensor, name, _heard(getattr(torch.Tensor, name), device, hang))
        copy = torch.Tensor.copy_

        def copied(into: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if into.is_cpu and values.device.type == device and not non_blocking:
                hang()
            return copy(into, values, non_blocking)

        patch.setattr(torch.Tensor, "copy_", copied)
        yield waits


def _heard(read: Callable[..., Any], device: str, hang: Callable[[], None]) -> Callable[..., Any]:
    def reading(values: torch.Tensor, *arguments: Any) -> Any:
        if values.device.type == device:
            hang()
        return read(values, *arguments)

    return reading
