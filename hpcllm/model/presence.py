"""When a unit's parameters must be there: the decoder says before and after which work it needs them.

    x = enter("blocks.3", x);  x = block(x);  x = leave("blocks.3", x)

A sharded optimizer waits here for parameters that are still being gathered, and with parameters that are sharded too it
gathers a unit at `enter` and lets it go at `leave`; by what it returns it may take part in the backward pass as well.
Units: "blocks.<i>", and "ends" (embeddings, final norm and head, whatever of them a stage has), which is entered before
the embedding and before the head, and never left.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

ENDS = "ends"


class Presence(Protocol):
    def enter(self, unit: str, x: Tensor) -> Tensor:
        """Before the unit's work on x; returns x, or a stand-in of the same values."""

    def leave(self, unit: str, x: Tensor) -> Tensor:
        """After the unit's work, which made x; returns x, or a stand-in of the same values."""


class AlwaysPresent:
    """Parameters that are whole and up to date at any time."""

    def enter(self, unit: str, x: Tensor) -> Tensor:  # noqa: ARG002
        return x

    def leave(self, unit: str, x: Tensor) -> Tensor:  # noqa: ARG002
        return x


def unit_of(parameter: str) -> str:
    """The unit of a parameter, by its name."""
    return ".".join(parameter.split(".")[:2]) if parameter.startswith("blocks.") else ENDS
