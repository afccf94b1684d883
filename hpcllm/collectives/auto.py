"""`auto`: the algorithm of a call, and whether to compress.

    plan(operation, n, codec, group)
        group has no tuning   fixed rules, selection.py: no clock has a say, so every run sums in the same order.
                              Between nodes a codec must win by 5 % with the coarse rates of assumed_rates.py, on the
                              wire that rank 0's network interfaces tell
        group has tuning      the cheapest by cost.py with measured rates; a codec must win by 5 % or it is not used

Rates that were measured with arrays on the CPU say nothing of a device, so there its rules hold even with tuning.

A codec is a permission to lose bits: a plan may say raw where int8 was requested. Rank 0 decides and broadcasts its
decision: two machines' rounding in a logarithm must not send ranks into different algorithms.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import Any

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group
from hpcllm.collectives.selection import Values, by_rule, choose, codec_by_rule
from hpcllm.collectives.tuning import Tuning

log = logging.getLogger(__name__)
DECISION_BYTES = 512  # of JSON, padded


@dataclass(frozen=True)
class Plan:
    """Algorithm and codec of all calls with the same operation, length, codec and dtype."""

    algorithm: str
    codec: Codec
    predicted_s: float | None = None  # None: chosen by rule
    why: str = "rule"


def plan(operation: str, n: int, codec: Codec, group: Group, place: str = "cpu") -> Plan:
    """Choose for n values: those of x, of `out` for an all-gather. Collective over group where it has tuning.

    place: the type of the values' device. The caller keeps the answer in group.plans.
    """
    made = _plan(operation, n, codec, group, place)
    words = (operation, n, codec.name, group.size, made.algorithm, made.codec.name, made.why)
    log.debug("%s of %d values as %s over %d ranks: %s, as %s (%s)", *words)
    return made


def _plan(operation: str, n: int, codec: Codec, group: Group, place: str) -> Plan:
    dtype = str(codec.dtype).removeprefix("torch.")
    if group.tuning is not None and n > 0 and place == "cpu":
        decision = _decided(operation, n, codec, dtype, group, group.tuning)
        if decision:
            chosen = codec if decision["codec"] == codec.name else Raw(codec.dtype)
            return Plan(decision["algorithm"], chosen, decision["predicted_s"], decision["why"])
    x = Values(n, codec.dtype.itemsize, dtype, codec.name, on_cpu=place == "cpu")
    if codec_by_rule(operation, x, group.shape, group.wire_gb_s) != codec.name:
        codec, x = Raw(codec.dtype), replace(x, codec="raw")
    may_block, has_shared = group.wire.waits.may_block(x.size_bytes), group.shared_arrays > 0
    return Plan(by_rule(operation, x, group.shape, may_block, has_shared), codec)


def _decided(operation: str, n: int, codec: Codec, dtype: str, group: Group, tuning: Tuning) -> dict[str, Any] | None:
    """Rank 0's choice, on every rank."""
    text = bytearray(DECISION_BYTES)
    if group.rank == 0:
        choice = choose(operation, n * codec.dtype.itemsize, codec.name, dtype, group.shape, tuning.rates)
        words = json.dumps(choice and vars(choice)).encode()
        text[: len(words)] = words
    group.wire.waits.all([group.comm.Ibcast(text)], lambda: f"rank 0 to plan an {operation} over {group.size} ranks")
    decision: dict[str, Any] | None = json.loads(text.rstrip(b"\0"))
    return decision
