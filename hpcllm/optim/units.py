"""Weights that are sharded too: a unit's are gathered when its work begins, and let go after (ZeRO-3).

    forward    enter b0: gather b0, b1 --> work --> leave b0: let go     enter b1: gather b2 --> work --> ...
    backward   leave b2: gather b2, b1 --> work --> enter b2: let go     leave b1: gather b0 --> work --> ...

Autograd keeps views of the weights from the forward to the backward pass. So a unit's flat array stays the same
tensor, but its memory goes and comes back: the storage is resized to nothing and to its size again. Embeddings, final
norm and head, the unit "ends", stay from their first use in a step to its update; the last block stays at the turn from
forward to backward, the first one from a backward pass to the next microbatch.

A lossy codec codes the weights themselves here: nobody has the old ones to add a difference to. The owner's are exact,
so errors do not add up. Sources: arXiv:1910.02054 section 5.3; coded weights: arXiv:2306.10209 section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from hpcllm.codecs import find_codec
from hpcllm.collectives import Group, allgather
from hpcllm.collectives.worker import Worker
from hpcllm.model.presence import ENDS, Presence
from hpcllm.optim.pieces import Range
from hpcllm.optim.sections import Section
from hpcllm.optim.weights import Fill, flattened


class UnitWeights:
    """See weights.Weights; is its own Presence."""

    def __init__(
        self,
        sections: Sequence[Section],
        parameters: Mapping[str, nn.Parameter],
        fill: Fill,
        codec: str,
        replicas: Group,
        worker: Worker,
    ) -> None:
        """One section after another is filled, cut, and let go: the whole model is never here.

        replicas: with messages of its own, for the worker.
        """
        self.exact = False
        self.sections, self.codec, self.replicas, self.worker = sections, codec, replicas, worker
        self.arrays: list[Tensor] = []  # (flat.size,) each, without memory while their unit is away
        self.shards: list[Tensor] = []  # (owned,)
        for section in sections:
            array = flattened(section, parameters, parameters[section.flat.names[0]].new_empty(section.flat.size), fill)
            self.arrays.append(array)
            self.shards.append(array[section.start : section.end].clone())
            array.untyped_storage().resize_(0)
        self.is_lossy = any(not find_codec(codec, shard.dtype).lossless for shard in self.shards)
        units = [section.flat.traits.unit for section in sections]
        self._members = {unit: [n for n, of in enumerate(units) if of == unit] for unit in units}
        self._order = [unit for unit in reversed(self._members) if unit != ENDS]  # blocks, in forward order
        self._here: dict[str, list[Future[None]]] = {}

    @property
    def presence(self) -> Presence:
        return self

    def owned(self, number: int, part: Range) -> Tensor:
        start = part.place - self.sections[number].start
        return self.shards[number][start : start + part.end - part.start]

    def refresh(self, number: int, master: Tensor | None) -> None:
        """The unit is let go: what is there of it is old."""
        self.let_go(self.sections[number].flat.traits.unit)
        if master is not None:
            self.shards[number].copy_(master)

    def settle(self) -> None:
        for futures in self._here.values():
            self._wait(futures)

    def restored(self) -> None:
        for unit in list(self._here):
            self.let_go(unit)

    def enter(self, unit: str, x: Tensor) -> Tensor:
        was_away = unit not in self._here
        self.bring(unit)
        if unit != ENDS or was_away:  # at the head the first block is not wanted again
            self._expect(self._place(unit) + 1)
        self._wait(self._here[unit])
        if unit == ENDS or not x.requires_grad or not torch.is_grad_enabled():
            return x
        return _WithGradient.apply(x, partial(self.done_with, unit))  # type: ignore[no-untyped-call, no-any-return]

    def leave(self, unit: str, x: Tensor) -> Tensor:
        if not x.requires_grad or not torch.is_grad_enabled():
            self.let_go(unit)
            return x
        if unit != self._order[-1]:
            self.let_go(unit)
        return _WithGradient.apply(x, partial(self.return_to, unit))  # type: ignore[no-untyped-call, no-any-return]

    def return_to(self, unit: str) -> None:
        """Before the unit's backward pass."""
        self.bring(unit)
        self._expect(self._place(unit) - 1)
        self._wait(self._here[unit])

    def done_with(self, unit: str) -> None:
        """After the unit's backward pass."""
        if unit != self._order[0]:
            self.let_go(unit)

    def bring(self, unit: str) -> None:
        """Start to gather a unit, unless it is here or on its way."""
        if unit not in self._here:
            for number in self._members[unit]:
                array = self.arrays[number]
                array.untyped_storage().resize_(array.nbytes)
            jobs = [partial(self._gather, number, self.exact) for number in self._members[unit]]
            self._here[unit] = [self.worker.submit(job) for job in jobs]

    def let_go(self, unit: str) -> None:
        """Give back the memory of a unit that is here."""
        if unit in self._here:
            self._wait(self._here.pop(unit))
            for number in self._members[unit]:
                self.arrays[number].untyped_storage().resize_(0)

    def _place(self, unit: str) -> int:
        return -1 if unit == ENDS else self._order.index(unit)

    def _expect(self, place: int) -> None:
        """Start to gather the block there, if there is one."""
        if 0 <= place < len(self._order):
            self.bring(self._order[place])

    def _wait(self, futures: list[Future[None]]) -> None:
        for future in futures:
            self.worker.wait(future)
        futures.clear()

    def _gather(self, number: int, exact: bool) -> None:
        raw = exact or (self.is_lossy and self.sections[number].flat.traits.exact)
        array = self.arrays[number]
        if array.is_cpu:
            array = from_dlpack(array)  # NumPy, which collectives go through there, pins a storage's size
        allgather(self.shards[number], self.replicas, "raw" if raw else self.codec, out=array)


class _WithGradient(torch.autograd.Function):
    """x as it is; `act` is called when its gradient comes back here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return gradient, None
