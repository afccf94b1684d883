"""Actions of a pipeline rank as data, the part of the model that each rank holds, and the two ends of a message. Pure.

An action prints and parses as text, so schedules can be read and checked:

F3        forward of microbatch 3                           F3.1   the same on the rank's second chunk of the model
B3        its whole backward                                I3, W3 the backward in two: input gradient, weight gradients
RECV_F3   start receiving what F3 needs                     SEND_F3   start sending what F3 made
RECV_B3   start receiving what B3 or I3 needs               SEND_B3   start sending what B3 or I3 made

The model is cut into ranks x chunks virtual stages, in the order of the layers:

    loop, 3 ranks, 2 chunks           v, 3 ranks, 2 chunks
    rank 0    stage 0   stage 3       rank 0    stage 0   stage 5      embedding and head on one rank
    rank 1    stage 1   stage 4       rank 1    stage 1   stage 4
    rank 2    stage 2   stage 5       rank 2    stage 2   stage 3      no message from stage 2 to 3

With one chunk both are the plain pipeline. Sources: loop arXiv:2104.04473 section 2.2; v arXiv:2405.15362 section 3.
A message has one end on each of two ranks (loop, 2 ranks, 2 chunks):

    rank 0: SEND_F3   = virtual stage 0    ->   virtual stage 1 =   RECV_F3 of rank 1
    rank 1: SEND_B3.1 = virtual stage 3    ->   virtual stage 2 =   RECV_B3.1 of rank 0
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple


class Op(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECV_FORWARD = "RECV_F"
    SEND_FORWARD = "SEND_F"
    RECV_BACKWARD = "RECV_B"
    SEND_BACKWARD = "SEND_B"


F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741 -- the field's names
COMPUTE = frozenset({F, B, I, W})
RECEIVES = {F: Op.RECV_FORWARD, B: Op.RECV_BACKWARD, I: Op.RECV_BACKWARD}  # a pass -> the message with its input
SENDS = {F: Op.SEND_FORWARD, B: Op.SEND_BACKWARD, I: Op.SEND_BACKWARD}  # a pass -> the message with its output


class Action(NamedTuple):
    """One thing that a rank does. A tuple, because schedules of half a million actions are looked up in sets."""

    op: Op
    microbatch: int
    chunk: int = 0  # index within this rank's part of the model

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @staticmethod
    def parse(text: str) -> Action:
        """Read what str() writes. Raises ValueError."""
        match = re.fullmatch(r"([A-Z_]+)(\d{1,9})(?:\.(\d{1,9}))?", text, re.ASCII)
        if not match or match[1] not in set(Op):
            raise ValueError(
                f"{text!r} is no action; an action is one of {', '.join(Op)}, a microbatch and, after a point, a "
                "chunk, as in F3 or F3.1"
            )
        return Action(Op(match[1]), int(match[2]), int(match[3] or 0))

    def message(self, ops: dict[Op, Op]) -> Action:
        """The message that belongs to a pass: by SENDS the one with its output, by RECEIVES the one with its input."""
        return Action(ops[self.op], self.microbatch, self.chunk)


PlacementKind = Literal["loop", "v"]


@dataclass(frozen=True)
class Placement:
    """The map between virtual stages and the chunks of the ranks of a pipeline."""

    ranks: int
    chunks: int = 1
    kind: PlacementKind = "loop"

    @property
    def stages(self) -> int:
        """Number of virtual stages, over which the layers are divided."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage that is a rank's chunk."""
        turned = self.kind == "v" and chunk % 2 == 1
        return chunk * self.ranks + (self.ranks - 1 - rank if turned else rank)

    def home(self, stage: int) -> tuple[int, int]:
        """The rank and chunk of a virtual stage: the inverse of `stage`."""
        chunk, place = divmod(stage, self.ranks)
        turned = self.kind == "v" and chunk % 2 == 1
        return (self.ranks - 1 - place if turned else place), chunk


# op -> the op at the other end, and how many virtual stages further that is
_OTHER_END = {
    Op.SEND_FORWARD: (Op.RECV_FORWARD, 1),
    Op.RECV_FORWARD: (Op.SEND_FORWARD, -1),
    Op.SEND_BACKWARD: (Op.RECV_BACKWARD, -1),
    Op.RECV_BACKWARD: (Op.SEND_BACKWARD, 1),
}


def other_end(placement: Placement, rank: int, message: Action) -> tuple[int, Action]:
    """The peer of a SEND or RECV of `rank`, as a rank of the pipeline, and the peer's RECV or SEND."""
    op, step = _OTHER_END[message.op]
    peer, chunk = placement.home(placement.stage(rank, message.chunk) + step)
    return peer, Action(op, message.microbatch, chunk)


def message_tag(microbatch: int, chunk: int, chunks: int, backward: bool) -> int:
    """The MPI tag of a message into a rank's chunk, of `chunks` a rank; the same on both sides.

    The smallest upper bound of tags in the MPI standard is 32767. Messages of one pair of ranks with one tag stay in
    order, so wrapping is safe if their receives are posted in the order of their sends; the checker proves that.
    """
    return (2 * (microbatch * chunks + chunk) + backward) % 32768
