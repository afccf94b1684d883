"""A job that another thread runs for a device: in order with what the caller tells the device before and after it.

    caller's stream   k0  k1 |                    | k4 ...      told before: the job waits for it
                             `-> event     event -'             told after the caller has waited: waits for the job
    lane's stream               | job: k2  k3 |                 beside whatever the caller tells it meanwhile

Streams and events are torch's own, of any kind of device. On the CPU nothing of this is needed, and nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_streams: dict[tuple[str, torch.device], torch.Stream] = {}  # by lane


@dataclass
class Crossing:
    """One job's way from the caller's stream to the lane's and back. Made by the caller."""

    device: torch.device
    lane: str
    _before: torch.Event = field(init=False)
    _after: torch.Event | None = None

    def __post_init__(self) -> None:
        self._before = _recorded(self.device)

    def run(self, job: Callable[[], T]) -> T:
        """Run the job in the lane's thread, on the lane's stream."""
        torch.accelerator.set_device_index(self.device)  # a new thread starts with device 0
        key = self.lane, self.device
        stream = _streams.get(key) or _streams.setdefault(key, torch.Stream(self.device))
        self._before.wait(stream)
        with stream:
            try:
                return job()
            finally:
                self._after = _recorded(self.device)

    def back(self) -> None:
        """The caller's stream goes on after the job, which has been waited for."""
        if self._after is not None:
            self._after.wait(torch.accelerator.current_stream(self.device))
            self._after = None


def used_here(result: Any) -> Any:
    """The same tensor, whose memory was taken on another stream and is from now on used on this one too."""
    if isinstance(result, torch.Tensor) and not result.is_cpu:
        result.record_stream(torch.accelerator.current_stream(result.device))
    return result


def _recorded(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=False)
    event.record(torch.accelerator.current_stream(device))
    return event
