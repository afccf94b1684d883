"""The messages of one turn of an exchange, and the memory that they use: parts of tensors, packed only where they must.

    array of a slab            part        message                  array of a block
    . . # # . .                a box       # # # # # #  -- MPI -->  . # # . . .        packed and unpacked: it has gaps
    . . # # . .                                                     . # # . . .
    = = = = = =                rows        = = = = = =  -- MPI -->  = = = = = =        in one stretch: as it is

Memory is handed out in pieces of at most a block and used again turn after turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcllm.checkpoint.blocks import BLOCK_BYTES
from hpcllm.checkpoint.slabs import Slab, part_of, stretch

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.waiting import Waits

_LINE_BYTES = 64  # of a cache


@dataclass(frozen=True)
class Placed:
    """An array that holds the elements of a slab."""

    array: np.ndarray  # C-contiguous, of the slab's shape
    slab: Slab

    def part(self, box: Slab) -> np.ndarray:
        """The elements of a box inside the slab: a view."""
        inside = part_of(box, self.slab)
        assert inside is not None
        return self.array[inside]

    def in_one_stretch(self, box: Slab) -> np.ndarray | None:
        """A C-contiguous view of a box inside the slab; None if it has gaps."""
        place = stretch(box, self.slab)
        return None if place is None else self.array.reshape(-1)[place : place + box.elements].reshape(box.shape)


class Memory:
    """Pieces of memory, all given back at once."""

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []
        self._used = 0  # chunks
        self._place = 0  # in the last of them

    def reset(self) -> None:
        self._used, self._place = 0, 0

    def array(self, box: Slab, dtype: np.dtype[Any]) -> Placed:
        """Unwritten, for a box of a block at most."""
        count = box.elements * dtype.itemsize
        if not self._used or self._place + count > BLOCK_BYTES:
            if self._used == len(self._chunks):
                self._chunks.append(np.empty(BLOCK_BYTES, np.uint8))
            self._used, self._place = self._used + 1, 0
        piece = self._chunks[self._used - 1][self._place : self._place + count]
        self._place += -(-count // _LINE_BYTES) * _LINE_BYTES
        return Placed(piece.view(dtype).reshape(box.shape), box)


@dataclass
class Messages:
    """What is under way of one turn."""

    comm: MPI.Intracomm | None
    waits: Waits | None
    memory: Memory = field(default_factory=Memory)
    _sends: list[MPI.Request] = field(default_factory=list)
    _receives: list[MPI.Request] = field(default_factory=list)
    _unpack: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # where to, what arrived
    _held: list[np.ndarray] = field(default_factory=list)  # requests hold no reference to what they send from
    _peers: set[int] = field(default_factory=set)

    def send(self, source: Placed, box: Slab, peer: int) -> None:
        """Start to send a box inside the source."""
        assert self.comm is not None
        values = source.in_one_stretch(box)
        if values is None:
            values = self.memory.array(box, source.array.dtype).array
            values[...] = source.part(box)
        self._held.append(values)
        self._sends.append(self.comm.Isend(_bytes(values), peer))
        self._peers.add(peer)

    def receive(self, target: Placed, box: Slab, peer: int) -> None:
        """Start to receive a box inside the target; it is there once `arrived` returns."""
        assert self.comm is not None
        values = target.in_one_stretch(box)
        if values is None:
            values = self.memory.array(box, target.array.dtype).array
            self._unpack.append((target.part(box), values))
        self._held.append(values)
        self._receives.append(self.comm.Irecv(_bytes(values), peer))
        self._peers.add(peer)

    def arrived(self) -> None:
        """Wait for what is to be received."""
        self._wait(self._receives)
        for target, values in self._unpack:
            target[...] = values
        self._receives.clear()
        self._unpack.clear()

    def settle(self) -> None:
        """Wait for everything, then give the memory back."""
        self.arrived()
        self._wait(self._sends)
        for spent in (self._sends, self._held, self._peers):
            spent.clear()
        self.memory.reset()

    def _wait(self, pending: Sequence[MPI.Request]) -> None:
        if self.waits and self.comm:
            comm, peers = self.comm, self._peers
            self.waits.all(pending, lambda: f"parts of blocks from or to {_names(comm, peers)}")


class FirstError:
    """`with` it, an error is remembered, and what follows goes on."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True


class Arrays:
    """This rank's slabs as arrays: each asked for once, when it is first used, and let go after its last use."""

    def __init__(
        self,
        slabs: Sequence[Slab],
        uses: Iterable[int],
        array_of: Callable[[Slab], np.ndarray],
        first: FirstError,
    ) -> None:
        self._slabs = slabs
        self._left = Counter(uses)
        self._array_of = array_of
        self._first = first
        self._there: dict[int, Placed] = {}

    def use(self, number: int) -> Placed | None:
        """None once something has gone wrong."""
        if number not in self._there and not self._first.error:
            with self._first:
                self._there[number] = Placed(self._array_of(self._slabs[number]), self._slabs[number])
        self._left[number] -= 1
        return self._there.get(number) if self._left[number] else self._there.pop(number, None)


def _bytes(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(np.uint8)


def _names(comm: MPI.Intracomm, peers: Iterable[int]) -> str:
    from mpi4py import MPI

    from hpcllm.ranks import name_ranks

    return name_ranks(comm.group.Translate_ranks(sorted(peers), MPI.COMM_WORLD.group), most_runs=3)
