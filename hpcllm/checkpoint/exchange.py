"""Exchange parts of blocks: from holders to the owners who write, from the owners who read to all in need.

    turn k of rank r      write                                        read
    AHEAD of it           receive others' parts of my k-th block       receive my parts of all owners' k-th blocks
                          send my parts of all owners' k-th blocks
    in its turn           wait for my k-th block, write it             read my k-th block, send everyone's parts of it

Free of deadlock, by induction over k: what a rank waits for in turn k, its peers send before they wait for anything of
turn k. A message is a block at most, 4 MiB. Messages and memory of WINDOW turns exist at a time: of own blocks one a
turn; of others', one part for each owner who has something of ours in its k-th block, with scratch memory only where
that part has gaps. In writing these are few; a rank that reads all of a tp shard may meet every owner in one turn, and
then has up to its gapped slabs in scratch memory.

    array of a slab            part        message                  array of a block
    . . # # . .                a box       # # # # # #  -- MPI -->  . # # . . .        packed and unpacked: it has gaps
    . . # # . .                                                     . # # . . .
    = = = = = =                rows        = = = = = =  -- MPI -->  = = = = = =        in one stretch: as it is

A block that lies in one stretch in a slab is not copied: it is written from there, or read into it. A rank whose disk
or source fails goes on exchanging, so that nobody waits for it, and raises when the exchange is over.
Works without MPI: comm=None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcllm.checkpoint import layout
from hpcllm.checkpoint.layout import as_bytes
from hpcllm.checkpoint.plan import BlockTask, Plan
from hpcllm.checkpoint.slabs import Slab, part_of, stretch
from hpcllm.mpi.rank_names import name_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.mpi.wait import Waits

WINDOW = 4  # turns of which messages and memory exist
AHEAD = 2  # turns by which messages are started early
_SCRATCH_BYTES = layout.BLOCK_BYTES
_LINE_BYTES = 64  # of a cache


@dataclass(frozen=True)
class SlabArray:
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


class FirstError:
    """A `with` context, for use again and again, that remembers the first error and lets what follows go on."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True


def to_owners(
    plan: Plan,
    comm: MPI.Intracomm | None,
    array_of: Callable[[Slab], np.ndarray],
    write_block: Callable[[str, int, memoryview], None],
) -> None:
    """Hand each block, gathered from all who hold parts of it, to its owner's `write_block`. Collective over comm.

    array_of: a C-contiguous array of the stored type, in the slab's shape; called once, and the array is kept from the
    first turn that needs it to the last. write_block(dataset, index of the block, its bytes): called for this rank's
    blocks in the order of the file, until something goes wrong. An error of either is raised by this rank alone, at the
    end.
    """
    first, window = FirstError(), _window(comm)
    arrays = _LocalArrays(plan, array_of, first)
    gathering: dict[int, SlabArray] = {}  # turn -> block that is put together
    for turn in range(-AHEAD, plan.turns):
        coming, messages = turn + AHEAD, window[(turn + AHEAD) % WINDOW]
        messages.settle()
        if coming < len(plan.tasks) and plan.whole_in(plan.tasks[coming]) is None:
            gathering[coming] = _receive_parts(plan, plan.tasks[coming], messages)
        for part in plan.remote_in(coming):
            source = arrays.use(part.number) or messages.scratch(part.box, plan.dtype(part.box))
            messages.send(source, part.box, part.owner)
        if 0 <= turn < len(plan.tasks):
            task = plan.tasks[turn]
            values = _gather(plan, task, gathering.pop(turn, None), arrays, window[turn % WINDOW])
            if values is not None and not first.error:
                with first:
                    write_block(task.box.dataset, task.index, as_bytes(values))
    _end(window, first)


def from_owners(
    plan: Plan,
    comm: MPI.Intracomm | None,
    read_block: Callable[[str, int, memoryview], None],
    array_of: Callable[[Slab], np.ndarray],
) -> None:
    """Fill all slabs with what `read_block` reads of each block, once, at its owner. Collective over comm.

    read_block(dataset, index of the block, memory to fill): called for this rank's blocks in the order of the file.
    array_of: the array to be filled, as in to_owners. Their errors are raised by this rank alone, at the end; others
    then hold anything, so agree before the arrays are used.
    """
    first, window = FirstError(), _window(comm)
    arrays = _LocalArrays(plan, array_of, first)
    for turn in range(-AHEAD, plan.turns):
        messages = window[(turn + AHEAD) % WINDOW]
        messages.settle()
        for part in plan.remote_in(turn + AHEAD):
            target = arrays.use(part.number) or messages.scratch(part.box, plan.dtype(part.box))
            messages.receive(target, part.box, part.owner)
        if 0 <= turn < len(plan.tasks):
            _scatter(plan, plan.tasks[turn], read_block, arrays, window[turn % WINDOW], first)
    _end(window, first)


class _LocalArrays:
    """This rank's slabs as arrays: each fetched once, when it is first used, and released after its last use."""

    def __init__(self, plan: Plan, array_of: Callable[[Slab], np.ndarray], first: FirstError) -> None:
        self._slabs, self._array_of, self._first = plan.slabs, array_of, first
        self._uses_left = Counter(plan.uses())
        self._held: dict[int, SlabArray] = {}

    def use(self, number: int) -> SlabArray | None:
        """The array of slab `number`; None once something has gone wrong."""
        if number not in self._held and not self._first.error:
            with self._first:
                self._held[number] = SlabArray(self._array_of(self._slabs[number]), self._slabs[number])
        self._uses_left[number] -= 1
        return self._held.get(number) if self._uses_left[number] else self._held.pop(number, None)


@dataclass
class _Messages:
    """Messages of one turn under way, and scratch memory for them, used again turn after turn."""

    comm: MPI.Intracomm | None
    waits: Waits | None
    _sends: list[MPI.Request] = field(default_factory=list)
    _receives: list[MPI.Request] = field(default_factory=list)
    _unpack: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # target, received values
    _held: list[np.ndarray] = field(default_factory=list)  # requests hold no reference to what they send from
    _peers: set[int] = field(default_factory=set)
    _chunks: list[np.ndarray] = field(default_factory=list)  # scratch memory
    _used: int = 0  # chunks
    _place: int = 0  # byte in the last used chunk

    def scratch(self, box: Slab, dtype: np.dtype[Any]) -> SlabArray:
        """Unwritten memory for a box of at most a block, until the turn is settled."""
        count = box.elements * dtype.itemsize
        if not self._used or self._place + count > _SCRATCH_BYTES:
            if self._used == len(self._chunks):
                self._chunks.append(np.empty(_SCRATCH_BYTES, np.uint8))
            self._used, self._place = self._used + 1, 0
        piece = self._chunks[self._used - 1][self._place : self._place + count]
        self._place += -(-count // _LINE_BYTES) * _LINE_BYTES
        return SlabArray(piece.view(dtype).reshape(box.shape), box)

    def send(self, source: SlabArray, box: Slab, peer: int) -> None:
        """Start to send a box inside the source."""
        assert self.comm is not None
        values = source.in_one_stretch(box)
        if values is None:
            values = self.scratch(box, source.array.dtype).array
            values[...] = source.part(box)
        self._sends.append(self.comm.Isend(self._hold(values, peer), peer))

    def receive(self, target: SlabArray, box: Slab, peer: int) -> None:
        """Start to receive a box inside the target; complete once `wait_received` returns."""
        assert self.comm is not None
        values = target.in_one_stretch(box)
        if values is None:
            values = self.scratch(box, target.array.dtype).array
            self._unpack.append((target.part(box), values))
        self._receives.append(self.comm.Irecv(self._hold(values, peer), peer))

    def wait_received(self) -> None:
        self._wait(self._receives)
        for target, values in self._unpack:
            target[...] = values
        self._receives.clear()
        self._unpack.clear()

    def settle(self) -> None:
        """Wait for everything, then give the memory back."""
        self.wait_received()
        self._wait(self._sends)
        for spent in (self._sends, self._held, self._peers):
            spent.clear()
        self._used, self._place = 0, 0

    def _hold(self, values: np.ndarray, peer: int) -> np.ndarray:
        self._held.append(values)
        self._peers.add(peer)
        return values.reshape(-1).view(np.uint8)

    def _wait(self, pending: Sequence[MPI.Request]) -> None:
        if self.waits:
            self.waits.all(pending, lambda: f"parts of blocks from or to {self._peer_names()}")

    def _peer_names(self) -> str:
        from mpi4py import MPI

        assert self.comm is not None
        world = self.comm.group.Translate_ranks(sorted(self._peers), MPI.COMM_WORLD.group)
        return name_ranks(world, most_runs=3)


def _window(comm: MPI.Intracomm | None) -> list[_Messages]:
    if not comm:
        return [_Messages(None, None) for _ in range(WINDOW)]
    from hpcllm.mpi.wait import WORK, job_waits  # starts MPI

    waits = job_waits.waits(WORK)
    return [_Messages(comm, waits) for _ in range(WINDOW)]


def _receive_parts(plan: Plan, task: BlockTask, messages: _Messages) -> SlabArray:
    """Start to receive others' parts of a block of ours; returns its memory."""
    block = messages.scratch(task.box, plan.dtype(task.box))
    for part in task.parts:
        if part.rank != plan.rank:
            messages.receive(block, part.box, part.rank)
    return block


def _gather(
    plan: Plan, task: BlockTask, block: SlabArray | None, arrays: _LocalArrays, messages: _Messages
) -> np.ndarray | None:
    """All of a block of ours; None if our own part of it cannot be had."""
    messages.wait_received()
    mine = [(part, arrays.use(part.number)) for part in task.parts if part.rank == plan.rank]
    if block is None:
        return next((source.in_one_stretch(task.box) for _, source in mine if source), None)
    for part, source in mine:
        if source:
            block.part(part.box)[...] = source.part(part.box)
    return block.array


def _scatter(
    plan: Plan,
    task: BlockTask,
    read_block: Callable[[str, int, memoryview], None],
    arrays: _LocalArrays,
    messages: _Messages,
    first: FirstError,
) -> None:
    """Read a block of ours, into our slab if it has room for it in one stretch, and send everyone their parts."""
    mine = {part.number: arrays.use(part.number) for part in task.parts if part.rank == plan.rank}
    number = plan.whole_in(task)
    target = mine.pop(number) if number is not None else None
    values = target.in_one_stretch(task.box) if target else None
    block = messages.scratch(task.box, plan.dtype(task.box)) if values is None else SlabArray(values, task.box)
    with first:
        read_block(task.box.dataset, task.index, as_bytes(block.array))
    for part in task.parts:
        if part.rank != plan.rank:
            messages.send(block, part.box, part.rank)
        elif target := mine.get(part.number):
            target.part(part.box)[...] = block.part(part.box)


def _end(window: list[_Messages], first: FirstError) -> None:
    for messages in window:
        messages.settle()
    if first.error:
        raise first.error
