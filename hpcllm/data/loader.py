"""Loader of the samples of a step: those of the next step are read and copied behind this one.

    step k      passes handed to the device | rows of k+1: store -> pinned memory -> device | wait for step k
    step k+1    its samples are there

Positions of a run follow each other, so what comes next is known; a step that wants other samples reads them then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from hpcllm.data.sampler import Sampler, read_batch
from hpcllm.data.store_watch import StoreWatch

HASH_BITS = 32


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of a replica in a step, (microbatches, size, sequence) int64, on the device."""

    position: int  # of the global batch in the run
    inputs: torch.Tensor
    targets: torch.Tensor
    hash: int  # see samples_hash


@dataclass
class Loader:
    """Reads one replica's share of the samples of a run."""

    tokens: NDArray[np.integer]  # of the training split, mapped once: a store rewritten meanwhile changes nothing
    sampler: Sampler
    sequence: int  # tokens of a sample
    share: int  # samples of a step
    first: int  # offset of this replica's samples in the global batch
    global_batch: int
    microbatches: int
    device: torch.device
    watch: StoreWatch | None = None  # verifies now and then what is read
    input_s: float = 0.0  # seconds spent reading so far
    _next: Batch | None = None
    _upload: Upload | None = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.share, self.sequence + 1)
        self._upload = Upload(shape, self.device) if self.device.type != "cpu" else None

    def take(self, position: int) -> Batch:
        """Return the batch at `position`, read ahead or read now."""
        batch, self._next = self._next, None
        return batch if batch and batch.position == position else self._read(position)

    def read_ahead(self, position: int) -> None:
        """Read the batch that follows the one at `position`."""
        self._next = self._read(position + self.global_batch)

    def _read(self, position: int) -> Batch:
        start = time.perf_counter()
        first = position + self.first
        if self.watch:
            self.watch.will_read()
        rows = read_batch(self.tokens, self.sampler, self.sequence, first, self.share)
        if self.watch:
            self.watch.saw(self.sampler.index(first) * self.sequence)
        batch = torch.from_numpy(rows)
        if self._upload:
            batch = self._upload(batch)
        batch = batch.view(self.microbatches, -1, self.sequence + 1)
        result = Batch(position, batch[..., :-1], batch[..., 1:].contiguous(), samples_hash(rows, first))
        self.input_s += time.perf_counter() - start
        return result


class Upload:
    """Copies int64 arrays of one shape to a device, by way of pinned memory: the host does not wait for the copy."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.device = device
        self._pinned = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        self._copied = torch.Event(device)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self._copied.synchronize()  # the array before is still on its way only if the host is a whole step ahead
        self._pinned.copy_(values)
        result = self._pinned.to(self.device, non_blocking=True)
        self._copied.record()
        return result


def samples_hash(rows: NDArray[np.int64], first: int) -> int:
    """Sum of a 32-bit hash of each sample and its position in the run, modulo 2^32.

    rows: (samples, tokens), those at positions first, first + 1, .. Sums of ranks add up to that of all samples, so it
    does not depend on how they are distributed, and changes where two of them change places.
    """
    hashes = (xxhash.xxh3_64_intdigest(row.data, seed=first + at) for at, row in enumerate(rows))
    return sum(hashes) % (1 << HASH_BITS)
