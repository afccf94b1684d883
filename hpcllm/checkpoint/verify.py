"""Read every block of a checkpoint once, by all ranks together, and list those that are damaged.

rank 0   [0][1][2][3]                  a contiguous share of the file each, read by a few threads
rank 1               [4][5][6][7]      ---> all the damage there is, on every rank
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hpcllm.checkpoint.layout import Block, block_bytes, my_blocks
from hpcllm.checkpoint.reader import Checkpoint, map_ahead
from hpcllm.errors import CheckpointError
from hpcllm.mpi.collective_errors import rank_and_size
from hpcllm.system.text import printable, size_text

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


@dataclass(frozen=True)
class Damage:
    """A block that could not be read as it was written."""

    dataset: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int  # of its bytes in the file
    bytes: int
    reason: str


@dataclass(frozen=True)
class Report:
    """Result for one file."""

    path: Path
    bytes: int  # of tensors, as values
    blocks: int
    seconds: float
    damage: list[Damage]
    fault: str  # of the file as a whole; empty if header and tables are sound

    @property
    def is_sound(self) -> bool:
        return not self.damage and not self.fault

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        gb_s = None if self.fault else self.bytes / self.seconds / 1e9
        return {**dataclasses.asdict(self), "path": str(self.path), "sound": self.is_sound, "gb_s": gb_s}

    def lines(self) -> list[str]:
        name = printable(str(self.path))
        if self.fault:
            return [f"{name}: DAMAGED: {printable(self.fault)}"]
        rate = f"{size_text(self.bytes)} in {self.seconds:.1f} s, {self.bytes / self.seconds / 1e9:.2f} GB/s"
        if not self.damage:
            return [f"{name}: all {self.blocks} blocks are as they were written ({rate})"]
        head = f"{name}: DAMAGED: {len(self.damage)} of {self.blocks} blocks are not as they were written ({rate})"
        return [head, *(f"  {damage_line(dataclasses.asdict(item))}" for item in self.damage)]


def verify_file(path: Path, comm: MPI.Intracomm | None, advance: Callable[[int], None]) -> Report:
    """Check all of a file; the same report on all ranks. Collective over comm. advance: as in find_damage."""
    started_s = time.perf_counter()
    try:
        with Checkpoint.open(path, comm) as checkpoint:
            damage = find_damage(checkpoint, advance)
            specs = checkpoint.specs.values()
            size, blocks = sum(spec.bytes for spec in specs), sum(spec.blocks for spec in specs)
            return Report(path, size, blocks, time.perf_counter() - started_s, damage, "")
    except CheckpointError as error:
        fault = str(error).removeprefix(f"{path}: ")
        return Report(path, 0, 0, time.perf_counter() - started_s, [], fault)


def damage_line(item: Mapping[str, Any]) -> str:
    """'bytes 4096-8191: model/head.weight from (0, 0), shape (16, 64), has changed ...'; item: a Damage as a dict."""
    return f"bytes {item['offset']}-{item['offset'] + item['bytes'] - 1}: {printable(item['reason'])}"


def survey(
    checkpoint: Checkpoint, blocks: Sequence[Block], work: Callable[[Block, np.ndarray], T]
) -> Iterator[tuple[Block, T | Damage]]:
    """Yield work(block, its values) of each block, or its damage; in their order, by a few threads.

    Not collective.
    """

    def attempt(block: Block) -> T | Damage:
        try:
            return work(block, checkpoint.read_block(*block))
        except CheckpointError as error:
            return _damage(checkpoint, block, str(error))

    ranks = checkpoint.comm.size if checkpoint.comm else 1
    yield from zip(blocks, map_ahead(attempt, blocks, ranks), strict=True)


def find_damage(checkpoint: Checkpoint, advance: Callable[[int], None] = lambda _: None) -> list[Damage]:
    """List every damaged block of the file, on all ranks; none if it is sound. Collective over checkpoint.comm.

    advance: is given the number of bytes that this rank has read, as it does.
    """
    specs = checkpoint.specs
    found: list[Damage] = []
    for block, result in survey(checkpoint, my_blocks(specs, *rank_and_size(checkpoint.comm)), lambda *_: None):
        advance(block_bytes(specs, block))
        found += [result] if result else []
    if checkpoint.comm:
        found = list(itertools.chain.from_iterable(checkpoint.comm.allgather(found)))
    return found


def _damage(checkpoint: Checkpoint, block: Block, reason: str) -> Damage:
    stored = checkpoint.datasets[block[0]]
    slab, (offset, count) = stored.block(block[1]), stored.extent(block[1])
    return Damage(slab.dataset, slab.start, slab.shape, offset, count, reason.removeprefix(f"{checkpoint.path}: "))
