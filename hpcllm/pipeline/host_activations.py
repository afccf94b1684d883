"""Activations that wait for their backward pass in host memory.

    forward    | block 0 | block 1 | block 2 |                 | block 2 | block 1 | block 0 |    backward
    out             [ a0 ]    [ a1 ]                                                              device to host
    back                                                    [ a1 ]    [ a0 ]                      host to device

What autograd saves for a backward pass goes to pinned memory while the pass goes on, and comes back shortly before it
is read. The last WINDOW tensors stay where they are until others push them out: if their backward pass is the next
thing, they have not left. Copies have streams of their own, and events order them: before a tensor's memory is used
again, the computation waits until its copy has left, so the device holds a window and never more, however far the host
is ahead.

Not sent: weights, what is held for other reasons (a received input), what is no activation (tokens), and what is too
small to be worth a copy. A tensor that several operations save leaves once. Bits do not change.

Bytes are those of the activations; time is hidden as long as a block computes for longer than its own take to leave:
24 s h^2 operations a token against 34 h bytes (arXiv:2205.05198 section 4.1, with fused attention), so models of some
thousand hidden channels; smaller ones wait for the link. With recomputation "full" only each block's input leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpcllm.system.device import recorded
from hpcllm.system.host_memory import ALIGN_BYTES

LEAST_BYTES = 64 << 10  # of a tensor that is sent: at 25 GB/s 3 us, about what the two copies cost the host
SLAB_BYTES = 32 << 20  # of pinned memory at a time
WINDOW = 4  # tensors on their way out that the device still holds
AHEAD = 3  # tensors that are fetched before they are read


@dataclass(eq=False)
class _Slab:
    """Pinned memory of one pass at a time."""

    memory: Tensor  # (bytes,) uint8
    used: int = 0  # bytes


@dataclass(eq=False)
class _Saved:
    """A tensor that has left, or is leaving."""

    number: int  # in its pass
    host: Tensor  # as the tensor was, in a slab
    device: Tensor | None  # while it is on the device
    left: torch.Event
    arrived: torch.Event | None = None
    uses: int = 1  # by operations whose backward has not read it yet
    key: tuple[object, ...] = ()


@dataclass
class SavedPass:
    """Tensors that one forward pass of a microbatch through a chunk has saved."""

    host: HostActivations
    entries: list[_Saved] = field(default_factory=list)
    slabs: list[_Slab] = field(default_factory=list)

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """Called by autograd for each tensor that it saves."""
        if not self.host.is_sent(tensor):
            return tensor
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
        known = self.host.leaving_as(key)
        if known is not None and known in self.entries:
            known.uses += 1
            return known
        saved = self.host.send(tensor, len(self.entries), self._place(tensor))
        saved.key = key
        self.entries.append(saved)
        return saved

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        """Called by autograd when a backward pass reads it."""
        if isinstance(saved, Tensor):
            return saved
        for entry in reversed(self.entries[max(0, saved.number - AHEAD) : saved.number + 1]):
            if entry.device is None and entry.uses:
                self.host.fetch(entry)
        tensor = self.host.taken(saved)
        saved.uses -= 1
        if not saved.uses:
            self.host.drop(saved)
        return tensor

    def done(self) -> None:
        """Give the host memory back, once the backward pass is over."""
        for entry in self.entries:
            self.host.drop(entry)
        self.host.give_back(self.slabs)
        self.entries, self.slabs = [], []

    def _place(self, tensor: Tensor) -> Tensor:
        """Host memory of the tensor's shape, with the order of its dims in memory."""
        size = tensor.numel() * tensor.element_size()
        if not self.slabs or self.slabs[-1].used + size > self.slabs[-1].memory.numel():
            self.slabs.append(self.host.slab(size))
        slab = self.slabs[-1]
        flat = slab.memory[slab.used : slab.used + size].view(tensor.dtype)
        slab.used += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride(), flat.storage_offset())


class HostActivations:
    """The memory and streams of all passes of a rank."""

    def __init__(self, device: torch.device, stays: Iterable[Tensor]) -> None:
        """stays: tensors that are on the device anyway, weights above all."""
        self.device = device
        self._stays = {tensor.untyped_storage()._cdata for tensor in stays}
        self._out, self._back = torch.Stream(device), torch.Stream(device)
        self._leaving: deque[_Saved] = deque()
        self._free: list[_Slab] = []
        self.host_bytes = 0  # pinned so far

    @contextmanager
    def keeping(self, x: Tensor) -> Iterator[SavedPass]:
        """Send what is saved meanwhile for a backward pass. x: the input, which is held by who received it."""
        saved, held = SavedPass(self), x.untyped_storage()._cdata
        is_new = held not in self._stays
        self._stays.add(held)
        try:
            with saved_tensors_hooks(saved.pack, saved.unpack):
                yield saved
        finally:
            if is_new:
                self._stays.discard(held)

    def is_sent(self, tensor: Tensor) -> bool:
        is_large = tensor.numel() * tensor.element_size() >= LEAST_BYTES
        is_activation = tensor.device == self.device and tensor.is_floating_point() and 0 not in tensor.stride()
        return is_large and is_activation and tensor.untyped_storage()._cdata not in self._stays

    def leaving_as(self, key: tuple[object, ...]) -> _Saved | None:
        """Return what is on its way and was this tensor; what has left may have had memory that is another's by now."""
        return next((saved for saved in self._leaving if saved.key == key), None)

    def send(self, tensor: Tensor, number: int, host: Tensor) -> _Saved:
        """Start to copy a tensor to its place in host memory; one that has left meanwhile gives up its memory."""
        self._out.wait_stream(torch.accelerator.current_stream(self.device))
        with self._out:
            host.copy_(tensor, non_blocking=True)
            saved = _Saved(number, host, tensor, recorded(self.device, self._out))
        self._leaving.append(saved)
        if len(self._leaving) > WINDOW:
            self.drop(self._leaving[0])
        return saved

    def fetch(self, saved: _Saved) -> None:
        """Start to copy a tensor back, into memory of the computation's stream."""
        saved.device = torch.empty_strided(
            saved.host.shape, saved.host.stride(), dtype=saved.host.dtype, device=self.device
        )
        self._back.wait_stream(torch.accelerator.current_stream(self.device))
        with self._back:
            saved.device.copy_(saved.host, non_blocking=True)
            saved.arrived = recorded(self.device, self._back)

    def taken(self, saved: _Saved) -> Tensor:
        """Return the tensor, for what the computation is told from now on."""
        assert saved.device is not None
        # one that never left is waited for, too: a backward pass may write where its copy is read
        last = saved.left if saved.arrived is None else saved.arrived
        torch.accelerator.current_stream(self.device).wait_event(last)
        return saved.device

    def drop(self, saved: _Saved) -> None:
        """Give up a tensor's memory on the device, in the order of the computation."""
        if saved.device is None:
            return
        self.taken(saved)
        saved.device = None
        if saved in self._leaving:
            self._leaving.remove(saved)

    def slab(self, size_bytes: int) -> _Slab:
        """Take pinned memory of at least so many bytes."""
        for slab in self._free:
            if slab.memory.numel() >= size_bytes:
                self._free.remove(slab)
                return slab
        taken = max(SLAB_BYTES, 1 << (size_bytes - 1).bit_length())
        self.host_bytes += taken
        return _Slab(torch.empty(taken, dtype=torch.uint8, pin_memory=True))

    def give_back(self, slabs: Iterable[_Slab]) -> None:
        """Take slabs for the next passes. The computation has waited for copies from them, and `send` does for it."""
        for slab in slabs:
            slab.used = 0
            self._free.append(slab)
