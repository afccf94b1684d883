"""What a rank of a pipeline can do, as data: an action prints and parses as text, so schedules can be read and checked.

F3        forward of microbatch 3                           F3.1   the same on the rank's second chunk of the model
B3        its whole backward                                I3, W3 the backward in two: input gradient, weight gradients
RECV_F3   start receiving what F3 needs                     SEND_F3   start sending what F3 made
RECV_B3   start receiving what B3 or I3 needs               SEND_B3   start sending what B3 or I3 made
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECV_FORWARD = "RECV_F"
    SEND_FORWARD = "SEND_F"
    RECV_BACKWARD = "RECV_B"
    SEND_BACKWARD = "SEND_B"


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})


class Action(NamedTuple):
    """A tuple, for schedules of half a million actions are looked up in sets."""

    op: Op
    microbatch: int
    chunk: int = 0  # of this rank's part of the model

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @staticmethod
    def parse(text: str) -> Action:
        """The inverse of str(). Raises ValueError."""
        match = re.fullmatch(r"([A-Z_]+)(\d{1,9})(?:\.(\d{1,9}))?", text, re.ASCII)
        if not match or match[1] not in set(Op):
            raise ValueError(
                f"{text!r} is no action; an action is one of {', '.join(Op)}, a microbatch and, after a point, a "
                "chunk, as in F3 or F3.1"
            )
        return Action(Op(match[1]), int(match[2]), int(match[3] or 0))


def message_tag(microbatch: int, chunk: int, chunks: int, backward: bool) -> int:
    """The MPI tag of a message into a rank's chunk, of `chunks` a rank; the same on both sides.

    The smallest upper bound of tags in the MPI standard is 32767. Messages of one pair of ranks with one tag stay in
    order, so wrapping is safe if their receives are posted in the order of their sends; the checker proves that.
    """
    return (2 * (microbatch * chunks + chunk) + backward) % 32768
