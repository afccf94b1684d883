"""Legs of a sum through owners: addends go to them, sums come back, and a row hands on what a column has summed.

    Addends   everybody --part i--> owner of part i          encoded once by everybody; added up in rank order, in fp32
    Sums      owner --its sum--> everybody of the team       encoded once; the owner too uses the decoded bytes
    Copies    owner of a column's sums --> its row           the same bytes again, never encoded anew

Each works strip by strip (strips.py) for one team: all ranks, a row or a column of the grid. It starts to send one
strip while others are on their way, and is told when to wait for which. two_step.py and grid.py are loops over legs.

Slots are used in turn, so scratch memory is so many strips' encodings, however long x is and however many the ranks.
Raw sums go straight to their place in x. Where a codec's length is fixed, the parts that a column has summed lie one
behind another in a slot and travel as one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from mpi4py import MPI

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group
from hpcllm.collectives.strips import Split
from hpcllm.collectives.wire import Slots, padded
from hpcllm.mpi.message_memory import StagedCodec

LAG = 3  # strips: covers the moments in which a peer computes, or does not run at all
ADDEND, SUM = 1, 2  # tags


class Parts(Protocol):
    """The parts of strips: strips.Split, or the chunks of a reduce-scatter."""

    def part(self, strip: int, place: int) -> tuple[int, int]: ...
    def places(self, strip: int, after: int) -> Iterator[int]: ...
    def number(self, strip: int, place: int) -> int: ...


@dataclass(frozen=True)
class Team:
    """Ranks of a group that sum together. rank_of(place): rank in the group; what: for names of waits."""

    name: str  # of scratch memory and tags
    group: Group
    size: int
    place: int
    rank_of: Callable[[int], int]
    what: str

    @property
    def others(self) -> Iterator[int]:
        """Places, the next one first, so that no rank is everybody's first."""
        return ((self.place + offset) % self.size for offset in range(1, self.size))


@dataclass(frozen=True)
class Work:
    """One call as a team sees it: x (n,), cut into parts, of which `most` in a strip with `longest` values each."""

    x: torch.Tensor
    codec: Codec
    team: Team
    parts: Parts
    strips: int
    longest: int
    most: int

    @classmethod
    def on_split(cls, x: torch.Tensor, codec: Codec, team: Team, split: Split, strips: int, length: int) -> Work:
        """Return the work on parts of strips of at most `length` values."""
        return cls(x, codec, team, split, strips, split.longest(length), split.parts_of(length))

    @property
    def slot_bytes(self) -> int:
        return self.codec.encoded_bytes(self.longest)

    @property
    def encoded_bytes(self) -> int:
        """slot_bytes, or 0 where encodings are the values themselves, wherever they lie."""
        return 0 if isinstance(self.codec, Raw) else self.slot_bytes

    @property
    def is_bare(self) -> bool:
        """True if messages are memory of a device that no codec has touched, and noted."""
        return isinstance(self.codec, Raw) and not self.x.is_cpu

    @property
    def index(self) -> int:
        """Place of this rank's x among those of all ranks."""
        return self.x.numel() * self.team.group.rank

    def part(self, strip: int, place: int) -> torch.Tensor:
        first, end = self.parts.part(strip, place)
        return self.x[first:end]

    def own(self, strip: int) -> torch.Tensor:
        return self.part(strip, self.team.place)

    def owners(self, strip: int) -> list[int]:
        """The others that own something of a strip, beginning after this rank's place."""
        mine = self.team.place
        places = self.parts.places(strip, after=mine) if 0 <= strip < self.strips else ()
        return [place for place in places if place != mine and self.part(strip, place).numel()]

    def slots(self, name: str, turns: int, count: int, slot_bytes: int) -> Slots:
        """turns: at most, of as many strips."""
        what = f"{name} of {self.team.what} to go"
        return Slots(self.team.group.wire, f"{self.team.name} {name}", min(turns, self.strips), count, slot_bytes, what)

    def note(self, data: torch.Tensor) -> None:
        """Note that the stream is told all that it has to do with raw values, as codecs do with what they encode.

        A message of memory that nobody has noted would wait for all that the stream was told, by an event of its own.
        """
        if self.is_bare:
            self.team.group.wire.memory.record(data)

    def note_addends(self, strip: int) -> None:
        """Note the parts of others, once for all messages of a strip."""
        parts = [self.parts.part(strip, place) for place in self.owners(strip)] if self.is_bare else []
        if parts:
            self.note(self.x[min(first for first, _ in parts) : max(end for _, end in parts)])

    def send(self, data: torch.Tensor, place: int, tag: int, plain_bytes: int) -> list[MPI.Request]:
        group = self.team.group
        return group.wire.send(group.comm, data, self.team.rank_of(place), self._tag(tag), plain_bytes)

    def receive(self, slot: torch.Tensor, place: int, tag: int) -> list[MPI.Request]:
        group = self.team.group
        return group.wire.receive(group.comm, slot, self.team.rank_of(place), self._tag(tag))

    def wait(self, requests: list[MPI.Request], what: str, strip: int, place: int) -> None:
        self.team.group.wire.waits.all(requests, partial(self._name, what, strip, place))

    def used(self, data: torch.Tensor, n: int) -> torch.Tensor:
        """The encoding of n values at the front of `data`."""
        return data[: self.codec.encoded_bytes(n) if self.codec.fixed_rate else self.codec.used_bytes(data, n)]

    def _tag(self, tag: int) -> int:
        return tag + (SUM if self.team.name == "column" else 0)

    def _name(self, what: str, strip: int, place: int) -> str:
        return f"{what} {strip} of {self.team.what}, from {self.team.group.name(self.team.rank_of(place))}"


class Addends:
    """My addends to their owners, and everybody's addends of my parts to me."""

    def __init__(self, work: Work, lag: int = LAG) -> None:
        """lag: turns that addends have to arrive."""
        self.work = work
        self.sent = work.slots("addends", lag + 1, work.most, work.encoded_bytes)
        self.landing = work.slots("arriving addends", lag + 2, work.team.size, work.slot_bytes)
        self.arriving: dict[tuple[int, int], list[MPI.Request]] = {}
        self.scratch = work.team.group.wire.memory.workspace(f"{work.team.name} total", work.longest, torch.float32)
        work.team.group.wire.memory.unused(self.landing.memory)
        self._receive(0)

    def send(self, strip: int) -> None:
        """Start to send the addends of a strip, if there is such a strip."""
        work = self.work
        if strip >= work.strips:
            return
        self._receive(strip + 1)
        self.sent.wait(strip)
        work.note_addends(strip)
        encoded = []
        for number, place in enumerate(work.owners(strip)):
            first, end = work.parts.part(strip, place)
            slot = self.sent.take(strip, number, work.encoded_bytes)
            data = work.codec.encode(work.x[first:end], slot, work.index + first)
            encoded.append((data, place, work.x[first:end].nbytes))
            if work.x.is_cpu:  # a device is told of all encodings before a wait for one
                self._send(strip, encoded)
        self._send(strip, encoded)

    def _send(self, strip: int, encoded: list[tuple[torch.Tensor, int, int]]) -> None:
        for data, place, plain_bytes in encoded:
            self.sent.hold(strip, self.work.send(data, place, ADDEND, plain_bytes))
        encoded.clear()

    def arrived(self, strip: int, n: int) -> torch.Tensor:
        """(places, bytes): row p begins with p's encoding of n values of my part, all of which have come; mine is left
        out."""
        for place in self.work.team.others if n else ():
            self.work.wait(self.arriving.pop((place, strip)), "addend", strip, place)
        return self.landing.rows(strip)

    def add_up(self, strip: int, result: torch.Tensor) -> torch.Tensor:
        """The sum over the team of my part of a strip, in the order of places and in fp32; result (length,) gets it,
        unless it is where my addend is and dtype is fp32: then the sum is in scratch memory. Returns the one that has
        it."""
        own = self.work.own(strip)
        total = result
        if result.dtype != torch.float32 or (result.data_ptr() == own.data_ptr() and self.work.team.place):
            total = self.scratch[: own.numel()]
        for place in range(self.work.team.size if own.numel() else 0):
            self._add(place, strip, own, total)
        if self.work.is_bare:
            self.work.note(self.landing.rows(strip))
        if result.dtype == torch.float32:
            return total
        return result.copy_(total)

    def _add(self, place: int, strip: int, own: torch.Tensor, total: torch.Tensor) -> None:
        if place == self.work.team.place:
            if place:
                total.add_(own)
            elif total.data_ptr() != own.data_ptr():
                total.copy_(own)
            return
        self.work.wait(self.arriving.pop((place, strip)), "addend", strip, place)
        data = self.work.used(self._slot(place, strip, own.numel()), own.numel())
        if place:
            self.work.codec.decode_add(data, total)
        else:
            self.work.codec.decode(data, total)

    def _receive(self, strip: int) -> None:
        n = self.work.own(strip).numel() if strip < self.work.strips else 0
        for place in self.work.team.others if n else ():
            self.arriving[place, strip] = self.work.receive(self._slot(place, strip, n), place, ADDEND)

    def _slot(self, place: int, strip: int, n: int) -> torch.Tensor:
        return self.landing.take(strip, place, self.work.codec.encoded_bytes(n))


class Sums:
    """The sums of my parts to my team, and the other parts' sums to me."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.slots = work.slots("sums", LAG + 2, work.most, work.encoded_bytes)
        self.arriving: dict[tuple[int, int], list[MPI.Request]] = {}

    def send(self, strip: int, addends: Addends) -> None:
        """Add up a strip's addends, encode the sum and send it to all; its place in x gets what they get."""
        work, own = self.work, self.work.own(strip)
        fused = isinstance(work.codec, StagedCodec) and work.codec.sums
        total = addends.arrived(strip, own.numel()) if fused else addends.add_up(strip, own)
        if not fused:
            addends.sent.wait(strip)  # long gone, but raw sums will arrive where these addends are
        self.slots.wait(strip)
        self._receive(strip)
        if own.numel():
            data = self._encode(strip, own, total, fused)
            for place in work.team.others:
                self.slots.hold(strip, work.send(data, place, SUM, own.nbytes))
            if not (fused or work.codec.lossless):
                work.codec.decode(data, own)

    def _encode(self, strip: int, own: torch.Tensor, total: torch.Tensor, fused: bool) -> torch.Tensor:
        """total: the sum, in scratch memory or in `own`; fused: all addends, which one kernel of the codec adds up."""
        codec, place = self.work.codec, self.work.team.place
        slot, index = self.slot(strip, place), self.work.index + self.work.parts.part(strip, place)[0]
        if fused:
            data: torch.Tensor = codec.sum_encode(total, place, own, slot, index)  # type: ignore[attr-defined]
            return data
        if codec.lossless and total.data_ptr() != own.data_ptr():
            total = own.copy_(total)
        data = codec.encode(total, slot, index)
        self.work.note(data)
        return data

    def arrive(self, strip: int) -> None:
        """Return when all sums of a strip have come."""
        for place in self.work.owners(strip):
            self.work.wait(self.arriving.pop((place, strip)), "sum", strip, place)

    def decode(self, strip: int) -> None:
        """Decode the sums of a strip, each when it has come."""
        for place in self.work.owners(strip):
            self.work.wait(self.arriving.pop((place, strip), []), "sum", strip, place)
            part = self.work.part(strip, place)
            self.work.codec.decode(self.work.used(self.slot(strip, place), part.numel()), part)

    def _receive(self, strip: int) -> None:
        for place in self.work.owners(strip):
            self.arriving[place, strip] = self.work.receive(self.slot(strip, place), place, SUM)

    def slot(self, strip: int, place: int) -> torch.Tensor:
        """Return the place of the encoding of a part's sum."""
        part = self.work.part(strip, place)
        if isinstance(self.work.codec, Raw):
            return part.view(torch.uint8)  # straight to its place
        number = self.work.parts.number(strip, place)
        return self.slots.take(strip, number, self.work.codec.encoded_bytes(part.numel()))


class Copies:
    """The sums of my column to my row, and those of other columns to me. sums: my column's.

    column(place): the work of the column at that place of a row. A slot has room for a column's sums of a strip.
    """

    def __init__(self, row: Work, column: Callable[[int], Work], sums: Sums) -> None:
        self.row, self.column, self.sums = row, column, sums
        self.stride = padded(column(0).encoded_bytes)
        self.landing = row.slots("copies", LAG + 1, row.most, self.stride * column(0).most)
        self.arriving: dict[tuple[int, int], list[MPI.Request]] = {}

    def send(self, strip: int) -> None:
        """Hand on the sums of my column, which have come, and begin to receive those of the others."""
        for place in self.row.owners(strip):
            self.arriving[place, strip] = [
                request for data in self._pieces(strip, place) for request in self.row.receive(data, place, SUM)
            ]
        if not self.row.own(strip).numel():
            return
        pieces = self._own_pieces(strip)
        plain_bytes = self.row.own(strip).nbytes // len(pieces)
        for place in self.row.team.others:
            for data in pieces:
                self.sums.slots.hold(strip, self.row.send(data, place, SUM, plain_bytes))

    def decode(self, strip: int) -> None:
        for place in self.row.owners(strip):
            self.row.wait(self.arriving.pop((place, strip)), "sums of a column", strip, place)
            column = self.column(place)
            for owner in column.parts.places(strip, after=-1):
                part = column.part(strip, owner)
                column.codec.decode(column.used(self._slot(strip, place, owner), part.numel()), part)

    def _pieces(self, strip: int, place: int) -> list[torch.Tensor]:
        """Return the places in which messages from a place of my row land."""
        column = self.column(place)
        if isinstance(column.codec, Raw):
            return [self.row.part(strip, place).view(torch.uint8)]
        slots = [self._slot(strip, place, owner) for owner in column.parts.places(strip, after=-1)]
        return [_joined(slots)] if column.codec.fixed_rate else slots

    def _own_pieces(self, strip: int) -> list[torch.Tensor]:
        """The messages to all of my row."""
        column = self.sums.work
        if isinstance(column.codec, Raw):
            return [self.row.own(strip).view(torch.uint8)]
        owners = list(column.parts.places(strip, after=-1))
        slots = [self.sums.slot(strip, owner) for owner in owners]
        if column.codec.fixed_rate:
            return [_joined(slots)]
        lengths = (column.part(strip, owner).numel() for owner in owners)
        return [column.used(slot, n) for slot, n in zip(slots, lengths, strict=True)]

    def _slot(self, strip: int, place: int, owner: int) -> torch.Tensor:
        column = self.column(place)
        part = column.part(strip, owner)
        if isinstance(column.codec, Raw):
            return part.view(torch.uint8)
        start = column.parts.number(strip, owner) * self.stride
        slot = self.landing.take(strip, self.row.parts.number(strip, place), self.landing.stride)
        return slot[start : start + column.codec.encoded_bytes(part.numel())]


def _joined(slots: list[torch.Tensor]) -> torch.Tensor:
    """All bytes from the first slot to the end of the last: slots of one memory, one behind another."""
    end = slots[-1].data_ptr() + slots[-1].numel() - slots[0].data_ptr()
    return slots[0].as_strided((end,), (1,))
