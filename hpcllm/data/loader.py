"""Loader of the samples of a step: those of the next step are read and copied behind this one.

    step k      passes handed to the device | rows of k+1: store -> pinned memory -> device | wait for step k
    step k+1    its samples are there

Positions of a run follow each other, so what comes next is known; a step that wants other samples reads them then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from hpcllm.data.packing import Rows, read_samples
from hpcllm.data.sampler import Sampler
from hpcllm.data.store_watch import StoreWatch
from hpcllm.model.documents import Documents

HASH_BITS = 32


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of a replica in a step, (microbatches, size, sequence) int64, on the device."""

    position: int  # of the global batch in the run
    inputs: torch.Tensor
    targets: torch.Tensor
    documents: list[Documents | None]  # of each microbatch; None: a sample is one document, or counts as one
    rows: Sequence[int | None]  # numbers of the rows of this replica, in order
    counted: int  # targets of this replica that count
    hash: int  # see samples_hash


class Samples(Protocol):
    """Samples of a run, step by step: read from a store (Loader), or made by the run itself."""

    input_s: float  # seconds spent on them so far
    counted: tuple[int, int]  # a position, and the number of targets that count in all of its global batch

    def take(self, position: int) -> Batch:
        """Return this replica's share of the batch at `position`. Collective over the mesh."""

    @property
    def ahead(self) -> Batch | None:
        """Return the batch of the next step, where it is known by now."""

    def read_ahead(self, position: int) -> None:
        """Make the batch that follows the one at `position` known, where it does not depend on that step."""


@dataclass
class Loader:
    """Reads one replica's share of the samples of a run."""

    rows: Rows  # of the training split, mapped once: a store rewritten meanwhile changes nothing
    sampler: Sampler
    share: int  # samples of a step
    first: int  # offset of this replica's samples in the global batch
    global_batch: int
    microbatches: int
    device: torch.device
    watch: StoreWatch | None = None  # verifies now and then what is read
    input_s: float = 0.0  # seconds spent reading so far
    counted: tuple[int, int] = (-1, 0)  # a position, and the number of targets that count in all of its global batch
    _next: Batch | None = None
    _upload: Upload | None = field(init=False)

    def __post_init__(self) -> None:
        shape = (3, self.share, self.rows.sequence)
        self._upload = Upload(shape, self.device) if self.device.type != "cpu" else None

    def take(self, position: int) -> Batch:
        """Return the batch at `position`, read ahead or read now."""
        batch, self._next = self._next, None
        return batch if batch and batch.position == position else self._read(position)

    @property
    def ahead(self) -> Batch | None:
        """The batch that was read ahead."""
        return self._next

    def read_ahead(self, position: int) -> None:
        """Read the batch that follows the one at `position`."""
        self._next = self._read(position + self.global_batch)

    def _read(self, position: int) -> Batch:
        start = time.perf_counter()
        first = position + self.first
        if self.watch:
            self.watch.will_read()
        laid = read_samples(self.rows, self.sampler, first, self.share)
        if self.watch:
            self.watch.saw(self.rows.first_token(self.sampler.index(first)))
        planes = torch.from_numpy(laid.planes)
        if self._upload:
            planes = self._upload(planes)
        inputs, targets, positions = planes.view(3, self.microbatches, -1, self.rows.sequence)
        documents = documents_of(laid.lengths, positions)
        seen = samples_hash(laid.tokens, first)
        result = Batch(position, inputs, targets, documents, laid.numbers, laid.counted, seen)
        self.input_s += time.perf_counter() - start
        return result


def documents_of(lengths: Sequence[NDArray[np.int64]], positions: torch.Tensor) -> list[Documents | None]:
    """Name the documents of each microbatch. lengths: of the pieces of each row; positions: (microbatches, ...)."""
    size = positions.shape[1]
    parts = [lengths[at : at + size] for at in range(0, len(lengths), size)]
    return [
        None if all(len(row) == 1 for row in part) else Documents(np.concatenate(part), places)
        for part, places in zip(parts, positions, strict=True)
    ]


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
