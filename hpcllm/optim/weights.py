"""Weights that every replica has whole: how they become equal again after each has updated its share.

    update     each owner: own stretch          behind the next forward pass, in its order:
    lossless   [ new | old | old ]  --all-gather of weights-->      [ new | new | new ]
    lossy      master - weights     --all-gather of differences-->  every rank, the owner too: weights += decoded

A lossy codec sends what the weights still lack, so an error of one step is part of the next difference and does not
add up; everyone adds the same decoded bytes to the same weights, so replicas stay equal to the bit.
Source: arXiv:2410.15526 section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from hpcllm.codecs import find_codec
from hpcllm.collectives import Group, allgather
from hpcllm.collectives.worker import Worker
from hpcllm.model.presence import AlwaysPresent, Presence, unit_of
from hpcllm.optim.pieces import Range
from hpcllm.optim.sections import Section

Memory = Callable[[int, torch.dtype], Tensor]  # (n, dtype) -> (n,) of zeros
Fill = Callable[[str, Tensor], None]  # writes the first values of a parameter, by its name, to memory of its shape


class Weights(Protocol):
    """The model's weights, which lie as the shard level wants them."""

    exact: bool  # whether they travel without a codec, for now

    @property
    def presence(self) -> Presence: ...

    def owned(self, number: int, part: Range) -> Tensor:
        """The memory of a range of section `number` that this rank owns."""

    def refresh(self, number: int, master: Tensor | None) -> None:
        """This rank has updated what it owns of a section, in master (owned,) float32, or in place if that is None."""

    def settle(self) -> None:
        """What is on its way has come. Raises what a gather raised."""

    def restored(self) -> None:
        """What this rank owns has been read from a file. Collective over the replicas."""


class WholeWeights:
    """Replicas that update everything themselves: nothing has to travel."""

    def __init__(self, sections: Sequence[Section], parameters: Mapping[str, nn.Parameter], fill: Fill) -> None:
        self.exact = False
        self.presence = AlwaysPresent()
        self.sections, self.parameters = sections, parameters
        for name, parameter in parameters.items():
            fill(name, parameter.detach())

    def owned(self, number: int, part: Range) -> Tensor:  # noqa: ARG002 -- a name says it all
        return self.parameters[part.name].detach().view(-1)[part.start : part.end]

    def refresh(self, number: int, master: Tensor | None) -> None:
        if master is not None:
            section = self.sections[number]
            for name, values in zip(section.flat.names, section.views(master), strict=True):
                self.parameters[name].detach().view(-1).copy_(values)

    def settle(self) -> None:
        pass

    def restored(self) -> None:
        pass


class GatheredWeights:
    """Replicas that own a stretch of each section; the rest is gathered while the next forward pass begins.

    Is its own Presence: a unit's work waits for the sections that it has parameters in.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        parameters: Mapping[str, nn.Parameter],
        fill: Fill,
        codec: str,
        replicas: Group,
        worker: Worker,
        memory: Memory,
    ) -> None:
        """The parameters become views of flat arrays. replicas: with messages of its own, for the worker's thread."""
        self.exact = False
        self.sections, self.codec, self.replicas, self.worker = sections, codec, replicas, worker
        dtype = next(iter(parameters.values())).dtype
        self.is_lossy = not find_codec(codec, dtype).lossless
        self.arrays = [flattened(section, parameters, memory(section.flat.size, dtype), fill) for section in sections]
        self._units = [sorted({unit_of(name) for name in section.flat.names}) for section in sections]
        self._coming: dict[str, list[Future[None]]] = {}  # by unit
        longest = max((section.flat.size for section in sections if not section.flat.traits.exact), default=0)
        self._changes = self.arrays[0].new_empty(longest if self.is_lossy else 0, dtype=torch.float32)  # the worker's

    @property
    def presence(self) -> Presence:
        return self

    def owned(self, number: int, part: Range) -> Tensor:
        return self.arrays[number][part.place : part.place + part.end - part.start]

    def refresh(self, number: int, master: Tensor | None) -> None:
        coded = self.is_lossy and not (self.exact or self.sections[number].flat.traits.exact)
        if coded and master is not None:
            future = self.worker.submit(partial(self._gather_changes, number, master))
        else:
            future = self.worker.submit(partial(self._gather, number, master, self.exact))
        for unit in self._units[number]:
            self._coming.setdefault(unit, []).append(future)

    def settle(self) -> None:
        for unit in list(self._coming):
            self._wait(unit)

    def restored(self) -> None:
        for number in range(len(self.sections)):
            self.worker.submit(partial(self._gather, number, None, True))
        self.worker.finish()

    def enter(self, unit: str, x: Tensor) -> Tensor:
        self._wait(unit)
        return x

    def leave(self, unit: str, x: Tensor) -> Tensor:  # noqa: ARG002
        return x

    def _wait(self, unit: str) -> None:
        for future in self._coming.pop(unit, ()):
            self.worker.wait(future)

    def _gather(self, number: int, master: Tensor | None, exact: bool) -> None:
        array, section = self.arrays[number], self.sections[number]
        own = array[section.start : section.end]
        if master is not None:
            own.copy_(master)
        allgather(own, self.replicas, "raw" if exact or self.is_lossy else self.codec, out=array)

    def _gather_changes(self, number: int, master: Tensor) -> None:
        array, section = self.arrays[number], self.sections[number]
        changes = self._changes[: section.flat.size]
        own = changes[section.start : section.end]
        torch.sub(master, array[section.start : section.end], out=own)
        allgather(own, self.replicas, self.codec, out=changes)
        array.add_(changes)


def flattened(section: Section, parameters: Mapping[str, nn.Parameter], array: Tensor, fill: Fill) -> Tensor:
    """Make a section's parameters views of `array` (flat.size,), filled; it is returned."""
    for name, view in zip(section.flat.names, section.views(array), strict=True):
        parameter = parameters[name]
        parameter.data = view.view(parameter.shape)
        fill(name, parameter.data)
    return array
