"""What is known of a machine before a collective is timed: links, codecs, how ranks lie on nodes. Pure.

measure.py finds the numbers, tuning.py keeps them in a file, cost.py computes with them. GB = 1e9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcllm.codecs.names import parse_name

VALUE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True)
class Link:
    latency_s: float  # of an empty message, beyond what it costs to start it
    bandwidth_gb_s: float  # each way, both ways busy

    def carry_s(self, size_bytes: float) -> float:
        return size_bytes / self.bandwidth_gb_s / 1e9


@dataclass(frozen=True)
class Coding:
    """One codec for one dtype. Rates count bytes of uncompressed values, one rank's with all ranks of the node busy."""

    name: str
    ratio: float  # uncompressed bytes / bytes on the wire
    encode_gb_s: float
    decode_gb_s: float
    add_gb_s: float  # decode and add to fp32

    @property
    def raw(self) -> bool:
        return self.name == "raw"


@dataclass(frozen=True)
class Rates:
    near: Link  # between ranks of a node: of each rank, all of them sending
    far: Link  # between nodes: of a node, all its ranks sending
    window: Link  # node_window of a node's ranks as one link
    call_s: float  # a collective that has nothing to do
    setup_s: float  # what an algorithm of ours does before its first message
    message_s: float  # to start one send and one receive
    copy_gb_s: float  # bytes copied by one rank, all of the node at work, in pieces that caches hold
    memory_gb_s: float  # the same, far larger than caches
    turn_bytes: float = 1 << 20  # of values: what two_step sends to all others in a turn; on devices more
    codings: Mapping[tuple[str, str], Coding] = field(default_factory=dict)  # (codec, dtype): raw is one of them
    library: Mapping[str, Link] = field(default_factory=dict)  # operation: the MPI library's own, as one link


@dataclass(frozen=True)
class Shape:
    ranks: int
    nodes: int = 1
    lanes: int = 1  # places that every node has a rank for

    @property
    def node_ranks(self) -> int:
        """Ranks of the fullest node, if they are spread evenly."""
        return math.ceil(self.ranks / self.nodes)


def nominal_ratio(codec: str, dtype: str) -> float:
    """Uncompressed bytes / bytes on the wire; of exp and mpc what gradients give. Raises ValueError."""
    return VALUE_BITS[dtype] / parse_name(codec).bits(VALUE_BITS[dtype])
