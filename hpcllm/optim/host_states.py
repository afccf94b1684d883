"""Optimizer states that rest in host memory: those of a buffer come to the device for its update, and go back.

    down     [ s5 ][ s4 ][ s3 ][ s2 ]                 host to device, on a stream of its own
    update         [ u5 ][ u4 ][ u3 ][ u2 ]           where the device computes: the same kernel on the same values
    up                   [ s5 ][ s4 ][ s3 ][ s2 ]     device to host, on another

A landing is device memory for the states of one buffer. There are three: one is filled, one updated, one emptied.
Events order the three streams, so the host waits for nothing. Both ways of the link are busy at the same time, with 12
bytes a value each way where there are master weights, 8 where not. The other way to do it, AdamW on the host's cores
(arXiv:2101.06840 section 5), sends less, 4 bytes down and 2 up, but needs 28 bytes of the host's memory bandwidth a
value, of which the ranks of a node have a share each; and its bits are not the device's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpcllm.system.device import recorded
from hpcllm.system.host_memory import host_memory

LANDINGS = 3


@dataclass
class _Landing:
    """Device memory in turn of every third buffer."""

    memory: Tensor  # (kinds, longest share) float32
    holds: int = -1  # number of the buffer whose states are in it, or on their way to it
    filled: torch.Event | None = None
    emptied: torch.Event | None = None


@dataclass
class HostStates:
    """The states of all shares of a rank, in pinned memory, and the landings on its device.

    sizes: (shares,) values of each share; kinds: states of a value, each float32.
    """

    sizes: Sequence[int]
    kinds: int
    device: torch.device
    homes: list[list[Tensor]] = field(init=False)  # of each share: (size,) float32 of each kind
    _landings: list[_Landing] = field(init=False)
    _down: torch.Stream = field(init=False)
    _up: torch.Stream = field(init=False)

    def __post_init__(self) -> None:
        names = [(number, kind) for number in range(len(self.sizes)) for kind in range(self.kinds)]
        memory = host_memory({name: 4 * self.sizes[name[0]] for name in names}, pinned=True)
        states = {name: memory[name].view(torch.float32).zero_() for name in names}
        self.homes = [[states[n, kind] for kind in range(self.kinds)] for n in range(len(self.sizes))]
        shape = self.kinds, max(self.sizes)
        count = min(LANDINGS, len(self.sizes))
        self._landings = [_Landing(torch.zeros(shape, device=self.device)) for _ in range(count)]
        self._down, self._up = torch.Stream(self.device), torch.Stream(self.device)

    @property
    def landing_bytes(self) -> int:
        """Device memory that all landings take."""
        return sum(landing.memory.nbytes for landing in self._landings)

    def landing(self, number: int) -> list[Tensor]:
        """(size,) float32 on the device, of each kind: a share's states while it is updated; always the same memory."""
        return [row[: self.sizes[number]] for row in self._landing(number).memory]

    @contextmanager
    def at_hand(self, number: int) -> Iterator[None]:
        """Have a share's states in its landing for what the device is told meanwhile; then send them home.

        Those of the share before, which is likely to be the next one, are fetched behind this update.
        """
        self._fetch(number)
        if number:
            self._fetch(number - 1)
        landing, now = self._landing(number), torch.accelerator.current_stream(self.device)
        assert landing.filled is not None
        now.wait_event(landing.filled)
        yield
        self._up.wait_stream(now)
        with self._up:
            self._copy(self.landing(number), self.homes[number])
            landing.emptied = recorded(self.device, self._up)
        landing.holds = -1

    def settle(self) -> None:
        """Return when all states are at home, for whoever reads or writes them there."""
        self._up.synchronize()
        for landing in self._landings:
            landing.holds = -1  # what was fetched ahead may be changed at home

    def _landing(self, number: int) -> _Landing:
        return self._landings[number % len(self._landings)]

    def _fetch(self, number: int) -> None:
        landing = self._landing(number)
        if landing.holds == number:
            return
        if landing.emptied is not None:
            self._down.wait_event(landing.emptied)
        with self._down:
            self._copy(self.homes[number], self.landing(number))
            landing.filled = recorded(self.device, self._down)
        landing.holds = number

    @staticmethod
    def _copy(states: list[Tensor], to: list[Tensor]) -> None:
        for source, target in zip(states, to, strict=True):
            target.copy_(source, non_blocking=True)
