"""Which algorithm, and whether to compress: `auto`.

    plan(operation, n, codec, group)
        group has no tuning   fixed rules below: no clock has a say, so every run sums in the same order
        group has tuning      the cheapest by cost.py with measured rates; a codec must win by 5 % or it is not used

    allreduce, reduce-scatter, all-gather, of arrays on the CPU
    one node,  raw    node_window; up to 64 KiB native where waits have no limit, so that the library may block
    more,      raw    fp32 up to 64 KiB native, then two_level where ranks share nodes, else by size per rank
    a codec           two_level where ranks share nodes, else two_step

Arrays on a device share no windows: by the lines for more nodes, however many there are, with the library only up to
64 KiB: it adds up on the host and takes a whole array there at once, while ours copy parts as others are on the wire.
Rates that were measured with arrays on the CPU say nothing of a device, so its rules are fixed even with tuning.

A wait with a limit polls, gives way and sleeps, and a library's sum moves on only when it is polled: 16 KiB between two
ranks that compute in between took 600 us native and 40 in node_window.

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
from hpcllm.collectives.choice import SUMS, choose, library_counts, link_codec
from hpcllm.collectives.group import Group, group_of
from hpcllm.collectives.rates import Shape
from hpcllm.collectives.tuning import Tuning, load_tuning

__all__ = ["Plan", "Tuning", "link_codec", "load_tuning", "plan", "shape_of", "use_tuning"]
IN_WINDOWS = ("allreduce", "reduce_scatter", "allgather")
SMALL_BYTES = 64 << 10  # up to here latency decides, and the library's is the lowest
DECISION_BYTES = 512  # of JSON, padded
LONG_CHUNK_BYTES = 32 << 10  # a ring sends 2 (ranks - 1) chunks one after another: worth it from here


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
        dtype = str(codec.dtype).removeprefix("torch.")
        choice = choose(operation, n * codec.dtype.itemsize, codec.name, dtype, shape_of(group), tuning.rates)
        words = json.dumps(choice and vars(choice)).encode()
        text[: len(words)] = words
    group.wire.waits.all([group.comm.Ibcast(text)], lambda: f"rank 0 to plan an {operation} over {group.size} ranks")
    decision: dict[str, Any] | None = json.loads(text.rstrip(b"\0"))
    return decision


def _rule(operation: str, n: int, codec: Codec, group: Group, place: str) -> str:
    size_bytes = n * codec.dtype.itemsize
    raw, small = codec.name == "raw", size_bytes <= SMALL_BYTES
    if raw and group.nodes == 1 and operation in IN_WINDOWS and place == "cpu":
        may_ask_library = operation not in SUMS or codec.dtype == torch.float32
        return "native" if small and may_ask_library and group.wire.waits.limit_s is None else "node_window"
    if operation == "allreduce":
        return _allreduce_rule(size_bytes, codec, group)
    if operation == "reduce_scatter":
        return _reduce_scatter_rule(size_bytes, codec)
    if raw and library_counts(operation, n) and place == "cpu":
        return "native"  # nothing to add up: the library moves bytes as well as we do
    if operation == "broadcast":
        return "binomial" if small or group.size <= 2 else "ring"
    if operation == "alltoall":
        return "pairwise"
    return "bruck" if small else "ring"


def _reduce_scatter_rule(size_bytes: int, codec: Codec) -> str:
    """Between nodes, or through a codec."""
    if codec.name != "raw" or codec.dtype != torch.float32:
        return "two_step"  # 16-bit sums too: it rounds once, a ring at every hop
    return "native" if size_bytes <= SMALL_BYTES else "ring"


def _allreduce_rule(size_bytes: int, codec: Codec, group: Group) -> str:
    """Between nodes, or through a codec."""
    raw, small, full = codec.name == "raw", size_bytes <= SMALL_BYTES, codec.dtype == torch.float32
    if raw and full and small:
        return "native"
    if 1 < group.nodes < group.size and not (raw and small):
        return "two_level"
    if not raw:
        return "two_step"
    if small:
        return "recursive_doubling"
    if not full:
        return "two_step"
    return "ring" if size_bytes // group.size >= LONG_CHUNK_BYTES else "rabenseifner"
