"""Which algorithm, and whether to compress: `auto`.

    plan(operation, n, codec, group)
        group has no tuning   fixed rules, rules.py: no clock has a say, so every run sums in the same order
        group has tuning      the cheapest by cost.py with measured rates; a codec must win by 5 % or it is not used

Rates that were measured with arrays on the CPU say nothing of a device, so there its rules hold even with tuning.

A codec is a permission to lose bits, not a wish: a plan may say raw where int8 was asked. Rank 0 decides and the others
hear what: two machines' rounding in a logarithm must not send ranks into different algorithms.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI

from hpcllm.codecs.protocol import Codec
from hpcllm.codecs.raw import Raw
from hpcllm.collectives.choice import choose, link_codec
from hpcllm.collectives.group import Group, group_of
from hpcllm.collectives.rates import Shape
from hpcllm.collectives.rules import Values, by_rule
from hpcllm.collectives.tuning import Tuning, load_tuning

__all__ = ["Plan", "Tuning", "link_codec", "load_tuning", "plan", "shape_of", "use_tuning"]
DECISION_BYTES = 512  # of JSON, padded


@dataclass(frozen=True)
class Plan:
    algorithm: str
    codec: Codec
    predicted_s: float | None = None  # None: chosen by rule
    why: str = "rule"


def plan(operation: str, n: int, codec: Codec, group: Group, place: str = "cpu") -> Plan:
    """What to run for n values: those of x, of `out` for an all-gather. Collective over group where it has tuning.

    place: the type of the values' device. The caller keeps the answer in group.plans.
    """
    if group.tuning is not None and n > 0 and place == "cpu":
        decision = _decided(operation, n, codec, group, group.tuning)
        if decision:
            chosen = codec if decision["codec"] == codec.name else Raw(codec.dtype)
            return Plan(decision["algorithm"], chosen, decision["predicted_s"], decision["why"])
    return Plan(_rule(operation, n, codec, group, place), codec)


def use_tuning(comm: MPI.Intracomm | Group, tuning: Tuning | None) -> None:
    """From now on `auto` on comm decides by these rates; None: by rule. Every rank must bring the same. Collective."""
    group_of(comm).use_tuning(tuning)


def shape_of(group: Group) -> Shape:
    return Shape(group.size, group.nodes, group.lanes)


def _decided(operation: str, n: int, codec: Codec, group: Group, tuning: Tuning) -> dict[str, Any] | None:
    """Rank 0's choice, on every rank."""
    text = bytearray(DECISION_BYTES)
    if group.rank == 0:
        size_bytes, shape = n * codec.dtype.itemsize, shape_of(group)
        choice = choose(operation, size_bytes, codec.name, _name(codec.dtype), shape, tuning.rates)
        words = json.dumps(choice and vars(choice)).encode()
        text[: len(words)] = words
    group.wire.waits.all([group.comm.Ibcast(text)], lambda: f"rank 0 to plan an {operation} over {group.size} ranks")
    decision: dict[str, Any] | None = json.loads(text.rstrip(b"\0"))
    return decision


def _rule(operation: str, n: int, codec: Codec, group: Group, place: str) -> str:
    x = Values(n, codec.dtype.itemsize, _name(codec.dtype), codec.name, on_cpu=place == "cpu")
    return by_rule(operation, x, shape_of(group), may_block=group.wire.waits.limit_s is None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
