"""Weights that every replica has whole: how they become equal again after each has updated its share.

    update     each owner: own range            behind the next forward pass, in its order:
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
from hpcllm.model.unshard_hooks import NoUnshard, UnshardHooks, unit_of
from hpcllm.optim.flat_buffers import Range
from hpcllm.optim.shard_spec import Fill, ShardSpec

Memory = Callable[[int, torch.dtype], Tensor]  # (n, dtype) -> (n,) of zeros


class Weights(Protocol):
    """The model's weights, sharded as the level says. Numbers are those of flat buffers."""

    exact: bool  # true while they are sent without a codec

    @property
    def unshard_hooks(self) -> UnshardHooks: ...

    def owned(self, number: int, part: Range) -> Tensor:
        """Memory of a range of buffer `number` that this rank owns."""

    def refresh(self, number: int, master: Tensor | None) -> None:
        """Make use of an update of what this rank owns, in master (owned,) float32, or in place if that is None."""

    def settle(self) -> None:
        """Return when no gather is under way. Raises what a gather raised."""

    def restored(self) -> None:
        """Make use of owned values that were read from a file. Collective over the replicas."""


class WholeWeights:
    """Weights of replicas that update everything themselves: nothing is gathered."""

    def __init__(self, specs: Sequence[ShardSpec], parameters: Mapping[str, nn.Parameter], fill: Fill) -> None:
        self.exact = False
        self.unshard_hooks = NoUnshard()
        self.specs, self.parameters = specs, parameters
        for name, parameter in parameters.items():
            fill(name, parameter.detach())

    def owned(self, number: int, part: Range) -> Tensor:  # noqa: ARG002 -- a name says it all
        return self.parameters[part.name].detach().view(-1)[part.start : part.end]

    def refresh(self, number: int, master: Tensor | None) -> None:
        if master is not None:
            spec = self.specs[number]
            for name, values in zip(spec.buffer.names, spec.views(master), strict=True):
                self.parameters[name].detach().view(-1).copy_(values)

    def settle(self) -> None:
        pass

    def restored(self) -> None:
        pass


class GatheredWeights:
    """Weights of replicas that own a range of each buffer; the rest is gathered while the next forward pass begins.

    Is its own UnshardHooks: a unit's work waits for the buffers that it has parameters in.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        parameters: Mapping[str, nn.Parameter],
        fill: Fill,
        codec: str,
        replicas: Group,
        worker: Worker,
        memory: Memory,
    ) -> None:
        """The parameters become views of flat arrays. replicas: with messages of its own, for the worker's thread."""
        self.exact = False
        self.specs, self.codec, self.replicas, self.worker = specs, codec, replicas, worker
        dtype = next(iter(parameters.values())).dtype
        self.is_lossy = not find_codec(codec, dtype).lossless
        self.arrays = [spec.flatten(parameters, memory(spec.buffer.size, dtype), fill) for spec in specs]
        self._units = [sorted({unit_of(name) for name in spec.buffer.names}) for spec in specs]
        self._gathers: dict[str, list[Future[None]]] = {}  # by unit
        longest = max((spec.buffer.size for spec in specs if not spec.buffer.traits.exact), default=0)
        self._changes = self.arrays[0].new_empty(longest if self.is_lossy else 0, dtype=torch.float32)  # the worker's

    @property
    def unshard_hooks(self) -> UnshardHooks:
        return self

    def owned(self, number: int, part: Range) -> Tensor:
        return self.arrays[number][part.place : part.place + part.end - part.start]

    def refresh(self, number: int, master: Tensor | None) -> None:
        coded = self.is_lossy and not (self.exact or self.specs[number].buffer.traits.exact)
        if coded and master is not None:
            future = self.worker.submit(partial(self._gather_changes, number, master))
        else:
            future = self.worker.submit(partial(self._gather, number, master, self.exact))
        for unit in self._units[number]:
            self._gathers.setdefault(unit, []).append(future)

    def settle(self) -> None:
        for unit in list(self._gathers):
            self._wait(unit)

    def restored(self) -> None:
        for number in range(len(self.specs)):
            self.worker.submit(partial(self._gather, number, None, True))
        self.worker.finish()

    def before_unit(self, unit: str, x: Tensor) -> Tensor:
        self._wait(unit)
        return x

    def after_unit(self, unit: str, x: Tensor) -> Tensor:  # noqa: ARG002
        return x

    def _wait(self, unit: str) -> None:
        for future in self._gathers.pop(unit, ()):
            self.worker.wait(future)

    def _gather(self, number: int, master: Tensor | None, exact: bool) -> None:
        array, spec = self.arrays[number], self.specs[number]
        own = array[spec.start : spec.end]
        if master is not None:
            own.copy_(master)
        allgather(own, self.replicas, "raw" if exact or self.is_lossy else self.codec, out=array)

    def _gather_changes(self, number: int, master: Tensor) -> None:
        array, spec = self.arrays[number], self.specs[number]
        changes = self._changes[: spec.buffer.size]
        own = changes[spec.start : spec.end]
        torch.sub(master, array[spec.start : spec.end], out=own)
        allgather(own, self.replicas, self.codec, out=changes)
        array.add_(changes)
