"""What a stage can do, as data: an action prints and parses as text, so a schedule can be read, counted and checked.

F3        forward of microbatch 3                  B0       its backward
RECV_F3   start receiving its activation           SEND_F3  send it on
RECV_B0   start receiving an output's gradient     SEND_B0  send the input's gradient back
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    RECV_FORWARD = "RECV_F"
    SEND_FORWARD = "SEND_F"
    RECV_BACKWARD = "RECV_B"
    SEND_BACKWARD = "SEND_B"


@dataclass(frozen=True)
class Action:
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The inverse of str(). Raises ValueError."""
        match = re.fullmatch(r"([A-Z_]+)(\d+)", text)
        if not match or match[1] not in set(Op):
            raise ValueError(f"{text!r} is no action; an action is one of {', '.join(Op)} and a number, as in F3")
        return Action(Op(match[1]), int(match[2]))
