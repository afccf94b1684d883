"""Weights of the replicas: whole, gathered after each update (ZeRO-1, ZeRO-2), or while they are used (ZeRO-3).

Every replica has them whole and updates all of them: at once, or where sums are late (shard_spec.py) each buffer when
the next forward pass comes to it, and the wire carries the sums of the next buffer meanwhile:

    wire       [ sums of e ][ sums of b0, b1 ][ sums of b2, b3 ]
    forward                 update, e         update, b0, b1    update, b2, b3, head

With sharded states each replica updates its share of each buffer:

    update     each owner: own range            behind the next forward pass, in its order:
    lossless   [ new | old | old ]  --all-gather of weights-->      [ new | new | new ]
    lossy      master - weights     --all-gather of differences-->  every rank, the owner too: weights += decoded

A lossy codec sends what the weights still lack, so an error of one step is part of the next difference and does not
add up; everyone adds the same decoded bytes to the same weights, so replicas stay equal to the bit.
Source: arXiv:2410.15526 section 3.1.

ZeRO-3: weights are sharded too; a unit's are gathered before its work and freed after it.

    forward    before b0: gather b0, b1 --> work --> after b0: free     before b1: gather b2 --> work --> ...
    backward   before b2: gather b2, b1 --> work --> after b2: free     before b1: gather b0 --> work --> ...

Autograd keeps views of the weights from the forward to the backward pass. So a unit's flat array stays the same
tensor, but its memory is freed and taken again: the storage is resized to nothing and to its size. Embeddings, final
norm and head, the unit "ends", stay from their first use in a step to its update; the last block stays at the turn from
forward to backward, the first one from a backward pass to the next microbatch.

Where MPI reads a device's memory it keeps a handle of every address it has seen, and one of memory that was freed and
taken again is stale. So weights that travel raw land in memory of their own, as long as the largest buffer, and are
copied from there; coded ones are decoded from message memory anyway.

    raw, MPI reads the device     shard --messages--> landing --copy--> array     always the same landing

A lossy codec codes the weights themselves there: nobody has the old ones to add a difference to. The owner's are exact,
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
from hpcllm.model.shapes import ENDS, UnshardHooks, unit_of
from hpcllm.mpi.message_memory import mpi_reads_devices
from hpcllm.optim.shard_spec import Fill, ShardSpec

Memory = Callable[[int, torch.dtype], Tensor]  # (n, dtype) -> (n,) of zeros


class Weights(UnshardHooks):
    """The model's weights, of replicas that update everything themselves: nothing is gathered.

    The decoders call them as hooks; subclasses share the update out. Numbers are those of flat buffers.
    """

    exact = False  # true while they are sent without a codec
    is_lossy = False  # what replicas hold is what a codec made of the weights

    def __init__(self, specs: Sequence[ShardSpec], parameters: Mapping[str, nn.Parameter], fill: Fill) -> None:
        """The parameters become views of flat arrays, so that an update goes over each of those once."""
        self.specs = specs
        empty = parameters[specs[0].buffer.names[0]].new_empty
        self.arrays = [spec.flatten(parameters, empty(spec.buffer.size), fill) for spec in specs]

    def owned(self, number: int) -> Tensor:
        """Memory of what this rank owns of buffer `number`: (owned,), always the same."""
        spec = self.specs[number]
        return self.arrays[number][spec.start : spec.end]

    def writable(self, number: int) -> Tensor | None:
        """Memory that new weights may be written to at once, that of `owned`; None: they have to go to `refresh`."""
        return self.owned(number)

    def update(self, number: int, change: Callable[[], None]) -> None:  # noqa: ARG002
        """Call `change`, which updates what this rank owns of buffer `number`, before that is used again."""
        change()

    def refresh(self, number: int, master: Tensor | None) -> None:
        """Make use of an update of what this rank owns, in master (owned,) float32, or in place if that is None."""
        if master is not None:
            self.owned(number).copy_(master)

    def settle(self) -> None:
        """Return when no gather is under way. Raises what a gather raised."""

    def restored(self) -> None:
        """Make use of owned values that were read from a file. Collective over the replicas."""


class LateWeights(Weights):
    """Weights that each replica updates itself, each buffer once its sums have been gathered and its work begins."""

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        parameters: Mapping[str, nn.Parameter],
        fill: Fill,
        gather: Callable[[int], Future[None]],
        worker: Worker,
    ) -> None:
        """gather: starts to gather the sums of a buffer (GradientBuckets.gather)."""
        super().__init__(specs, parameters, fill)
        self._gather, self.worker = gather, worker
        self._numbers: dict[str, list[int]] = {}  # by unit: buffers that it has parameters in
        for number, spec in enumerate(specs):
            for unit in {unit_of(name) for name in spec.buffer.names}:
                self._numbers.setdefault(unit, []).append(number)
        self._late: dict[int, tuple[Future[None], Callable[[], None]]] = {}  # by buffer, in the order of their gathers

    def update(self, number: int, change: Callable[[], None]) -> None:
        self._late[number] = self._gather(number), change

    def settle(self) -> None:
        for number in list(self._late):
            self._finish(number)

    def before_unit(self, unit: str, x: Tensor) -> Tensor:
        for number in [number for number in self._late if number in self._numbers.get(unit, ())]:
            self._finish(number)
        return x

    def _finish(self, number: int) -> None:
        future, change = self._late.pop(number)
        self.worker.wait(future)
        change()


class GatheredWeights(Weights):
    """Weights of replicas that own a range of each buffer; the rest is gathered while the next forward pass begins.

    A unit's work waits for the buffers that it has parameters in.
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
        self.specs, self.codec, self.replicas, self.worker = specs, codec, replicas, worker
        dtype = next(iter(parameters.values())).dtype
        self.is_lossy = not find_codec(codec, dtype).lossless
        self.arrays = [spec.flatten(parameters, memory(spec.buffer.size, dtype), fill) for spec in specs]
        self._units = [sorted({unit_of(name) for name in spec.buffer.names}) for spec in specs]
        self._gathers: dict[str, list[Future[None]]] = {}  # by unit
        longest = max((spec.buffer.size for spec in specs if not spec.buffer.traits.exact), default=0)
        self._changes = self.arrays[0].new_empty(longest if self.is_lossy else 0, dtype=torch.float32)  # the worker's

    def writable(self, number: int) -> Tensor | None:
        return None if self._is_coded(number) else self.owned(number)

    def _is_coded(self, number: int) -> bool:
        return self.is_lossy and not (self.exact or self.specs[number].buffer.traits.exact)

    def refresh(self, number: int, master: Tensor | None) -> None:
        if master is not None and not master.is_cpu and not self.is_lossy:  # now, while it is at hand: host_states.py
            self.owned(number).copy_(master)
            master = None
        if self._is_coded(number) and master is not None:
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

    def _wait(self, unit: str) -> None:
        for future in self._gathers.pop(unit, ()):
            self.worker.wait(future)

    def _gather(self, number: int, master: Tensor | None, exact: bool) -> None:
        array, own = self.arrays[number], self.owned(number)
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


class Zero3Weights(Weights):
    """This rank's shards of the weights, and the units that are gathered now."""

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        parameters: Mapping[str, nn.Parameter],
        fill: Fill,
        codec: str,
        replicas: Group,
        worker: Worker,
    ) -> None:
        """Fill one buffer after another, cut it and free it: the whole model is never here.

        replicas: a group with messages of its own, for the worker's thread.
        """
        self.specs, self.codec, self.replicas, self.worker = specs, codec, replicas, worker
        self.arrays: list[Tensor] = []  # (buffer.size,) each, without memory while their unit is freed
        self.shards: list[Tensor] = []  # (owned,)
        for spec in specs:
            array = spec.flatten(parameters, parameters[spec.buffer.names[0]].new_empty(spec.buffer.size), fill)
            self.arrays.append(array)
            self.shards.append(array[spec.start : spec.end].clone())
            array.untyped_storage().resize_(0)
        self._has_lossy_codec = any(not find_codec(codec, shard.dtype).lossless for shard in self.shards)
        units = [spec.buffer.traits.unit for spec in specs]
        self._members = {unit: [n for n, of in enumerate(units) if of == unit] for unit in units}
        self._order = [unit for unit in reversed(self._members) if unit != ENDS]  # blocks, in forward order
        self._gathered: dict[str, list[Future[None]]] = {}
        self._landing = self.shards[0].new_empty(0)  # the worker's; taken when it is first needed

    def owned(self, number: int) -> Tensor:
        return self.shards[number]

    def writable(self, number: int) -> Tensor:
        """Free the unit, whose gathered weights are soon old."""
        self.free(self.specs[number].buffer.traits.unit)
        return self.shards[number]

    def refresh(self, number: int, master: Tensor | None) -> None:
        if master is not None:
            self.shards[number].copy_(master)

    def settle(self) -> None:
        for futures in self._gathered.values():
            self._wait(futures)

    def restored(self) -> None:
        for unit in list(self._gathered):
            self.free(unit)

    def before_unit(self, unit: str, x: Tensor) -> Tensor:
        was_freed = unit not in self._gathered
        self.gather(unit)
        if unit != ENDS or was_freed:  # at the head the first block is not needed again
            self._prefetch(self._place(unit) + 1)
        self._wait(self._gathered[unit])
        if unit == ENDS or not x.requires_grad or not torch.is_grad_enabled():
            return x
        return _BackwardHook.apply(x, partial(self.after_backward, unit))  # type: ignore[no-untyped-call, no-any-return]

    def after_unit(self, unit: str, x: Tensor) -> Tensor:
        if not x.requires_grad or not torch.is_grad_enabled():
            self.free(unit)
            return x
        if unit != self._order[-1]:
            self.free(unit)
        return _BackwardHook.apply(x, partial(self.before_backward, unit))  # type: ignore[no-untyped-call, no-any-return]

    def before_backward(self, unit: str) -> None:
        """Called before the unit's backward pass."""
        self.gather(unit)
        self._prefetch(self._place(unit) - 1)
        self._wait(self._gathered[unit])

    def after_backward(self, unit: str) -> None:
        """Called after the unit's backward pass."""
        if unit != self._order[0]:
            self.free(unit)

    def gather(self, unit: str) -> None:
        """Start to gather a unit, unless it is gathered or being gathered."""
        if unit not in self._gathered:
            numbers = self._members.get(unit, [])  # none of a unit that is frozen
            for number in numbers:
                array = self.arrays[number]
                array.untyped_storage().resize_(array.nbytes)
            jobs = [partial(self._allgather, number, self.exact) for number in numbers]
            self._gathered[unit] = [self.worker.submit(job) for job in jobs]

    def free(self, unit: str) -> None:
        """Give back the memory of a unit, if it is gathered."""
        if unit in self._gathered:
            self._wait(self._gathered.pop(unit))
            for number in self._members.get(unit, []):
                self.arrays[number].untyped_storage().resize_(0)

    def _place(self, unit: str) -> int:
        return -1 if unit == ENDS else self._order.index(unit)

    def _prefetch(self, place: int) -> None:
        """Start to gather the block there, if there is one."""
        if 0 <= place < len(self._order):
            self.gather(self._order[place])

    def _wait(self, futures: list[Future[None]]) -> None:
        for future in futures:
            self.worker.wait(future)
        futures.clear()

    def _allgather(self, number: int, exact: bool) -> None:
        raw = exact or (self._has_lossy_codec and self.specs[number].buffer.traits.exact)
        array, codec = self.arrays[number], "raw" if raw else self.codec
        if array.is_cpu:
            array = from_dlpack(array)  # NumPy, which collectives go through there, pins a storage's size
        if codec == "raw" and not array.is_cpu and mpi_reads_devices() and self.replicas.size > 1:
            if not self._landing.numel():
                self._landing = array.new_empty(max(spec.buffer.size for spec in self.specs))
            landing = self._landing[: array.numel()]
            array.copy_(allgather(self.shards[number], self.replicas, codec, out=landing))
        else:
            allgather(self.shards[number], self.replicas, codec, out=array)


class _BackwardHook(torch.autograd.Function):
    """Pass x on as it is; call `act` when its gradient comes back here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return gradient, None
