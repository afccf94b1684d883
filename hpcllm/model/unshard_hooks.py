"""Hooks that the decoder calls before and after each unit's work, to have its parameters there in time.

    x = before_unit("blocks.3", x);  x = block(x);  x = after_unit("blocks.3", x)

A sharded optimizer waits in the first hook for parameters that are still being gathered. Where the parameters are
sharded too (ZeRO-3) it gathers a unit before its work and frees it after; through the x that a hook returns it takes
part in the backward pass as well. Units: "blocks.<i>", and "ends" (embeddings, final norm and head, whatever of them a
stage has), which is announced before the embedding and before the head, and never freed by a hook.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

ENDS = "ends"


class UnshardHooks(Protocol):
    """Called by the decoder around the work of each unit."""

    def before_unit(self, unit: str, x: Tensor) -> Tensor:
        """Called before the unit's work on x; returns x, or another tensor of the same values."""

    def after_unit(self, unit: str, x: Tensor) -> Tensor:
        """Called after the unit's work, which made x; returns x, or another tensor of the same values."""


class NoUnshard:
    """Hooks of parameters that are whole and up to date at any time."""

    def before_unit(self, unit: str, x: Tensor) -> Tensor:  # noqa: ARG002
        return x

    def after_unit(self, unit: str, x: Tensor) -> Tensor:  # noqa: ARG002
        return x


def unit_of(parameter: str) -> str:
    """The unit of a parameter, by its name."""
    return ".".join(parameter.split(".")[:2]) if parameter.startswith("blocks.") else ENDS
