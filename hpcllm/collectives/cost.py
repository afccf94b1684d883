"""Cost of each algorithm: one formula for each, in seconds. Pure: no torch, no mpi4py.

    cost_s("allreduce", "two_step", size_bytes, coding, shape, rates)

       alpha-beta model        messages x (latency + injection)  +  bytes on the busiest link / its bandwidth
    +  work of the core        encode, decode, add, copy: bytes / measured rate
    -  what segments overlap   link between nodes | core

        core   e0 e1 e2 e3 ... d0 d1 d2         in S segments: longer part + shorter part / S
        link      w0 w1 w2 w3

Inside a node a message is a copy by the same core, so it overlaps with nothing. The ranks of a node share its link
to other nodes; neighbours in rank share a node. `size_bytes` is the whole array without a codec: x of an allreduce,
reduce-scatter, all-to-all and broadcast, `out` of an all-gather.

Source of the alpha-beta forms: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
operations in MPICH", sections 3-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hpcllm.collectives.strips import LEAST_VALUES, STREAM_VALUES, STREAMED, TURN_VALUES, Grid, takes_grid
from hpcllm.collectives.tuning import Coding, LibraryCall, Rates, Shape

SEGMENT_BYTES = 1 << 20  # of values: what the algorithms encode and send at once
STRIP_BYTES = 4 * TURN_VALUES
LEAST_PART_BYTES = 4 * LEAST_VALUES  # what one owner adds up at least
STREAM_BYTES = 4 * STREAM_VALUES
MEASURED_WHOLE = ("native", "node_window")  # rates.library and rates.window have all that they do
CACHED_BYTES = 4 << 20  # a rank's share of caches, about: rates are of pieces that fit

Formula = Callable[[float, Coding, Shape, Rates], float]


def cost_s(operation: str, algorithm: str, size_bytes: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """Predicted seconds of one call. Raises KeyError if there is no such algorithm."""
    formula = COSTS[operation][algorithm]
    if shape.ranks == 1 or size_bytes == 0:
        return rates.call_s
    from_memory_s = _work_s(max(0, size_bytes - CACHED_BYTES), rates.memory_gb_s)  # x, by whatever touches it first
    setup_s = 0.0 if algorithm in MEASURED_WHOLE else rates.setup_s
    return rates.call_s + setup_s + from_memory_s + formula(size_bytes, coding, shape, rates)


def bound_s(operation: str, size_bytes: float, ratio: float, shape: Shape, bandwidth_gb_s: float) -> float:
    """The least seconds that messages can take, whatever the algorithm: the busiest link never idle, all else free.

    bandwidth_gb_s: of a node's link, each way; of a rank's if all share one node. node_window sends no messages, so
    inside a node this is no bound on it.
    """
    return VOLUMES[operation](size_bytes, shape) / ratio / bandwidth_gb_s / 1e9


def message_cost_s(size_bytes: float, coding: Coding, same_node: bool, rates: Rates) -> float:
    """One message to one rank, encoded, sent, decoded, one after another."""
    link = rates.near if same_node else rates.far
    codec_s = 0.0 if coding.raw else _work_s(size_bytes, coding.encode_gb_s) + _work_s(size_bytes, coding.decode_gb_s)
    return rates.message_s + link.latency_s + link.carry_s(size_bytes / coding.ratio) + codec_s


# ---- the least that must cross a link: between nodes, or into a rank if there is one node


def _ends(shape: Shape) -> int:
    return shape.nodes if shape.nodes > 1 else shape.ranks


def _lanes(shape: Shape) -> int:
    """Ranks whose own blocks leave through one link: of the emptiest node, for a bound."""
    return shape.lanes if shape.nodes > 1 else 1


VOLUMES: dict[str, Callable[[float, Shape], float]] = {
    "allreduce": lambda size, shape: 2 * size * (_ends(shape) - 1) / _ends(shape),
    "reduce_scatter": lambda size, shape: size * (_ends(shape) - 1) / _ends(shape),
    "allgather": lambda size, shape: size * (_ends(shape) - 1) / _ends(shape),
    "alltoall": lambda size, shape: size * _lanes(shape) * (shape.ranks - _lanes(shape)) / shape.ranks,
    "broadcast": lambda size, shape: size * (shape.ranks > 1),
}


# ---- parts that the formulas share


def _work_s(size_bytes: float, rate_gb_s: float) -> float:
    return size_bytes / rate_gb_s / 1e9


def _latency_s(shape: Shape, rates: Rates) -> float:
    return max(rates.near.latency_s, rates.far.latency_s) if shape.nodes > 1 else rates.near.latency_s


def _segments(size_bytes: float, segment_bytes: float = SEGMENT_BYTES) -> float:
    """Number of segments as a real number: with whole ones a longer message could seem faster."""
    return max(1.0, size_bytes / segment_bytes)


def _spread(sent_bytes: float, shape: Shape, rates: Rates) -> tuple[float, float]:
    """Seconds (near, far) in which every rank sends `sent_bytes` in all, the same to each other rank."""
    others_near = shape.node_ranks - 1
    near = sent_bytes * others_near / (shape.ranks - 1)
    return rates.near.carry_s(near), rates.far.carry_s((sent_bytes - near) * shape.node_ranks)


def _neighbour(sent_bytes: float, shape: Shape, rates: Rates) -> tuple[float, float]:
    """Seconds (near, far) in which every rank sends to its right: of a node one rank crosses."""
    near = rates.near.carry_s(sent_bytes) if shape.node_ranks > 1 else 0.0
    return near, rates.far.carry_s(sent_bytes) if shape.nodes > 1 else 0.0


def _paired(bytes_of_level: Callable[[int], float], shape: Shape, rates: Rates) -> tuple[float, float]:
    """Seconds (near, far) of exchanges with partners at distances 1, 2, 4 ... among the largest power of two of ranks.

    Past the node all its ranks share the link at once.
    """
    near = far = 0.0
    node_places = (1 << _levels(shape)) / shape.nodes
    for level in range(_levels(shape)):
        if shape.nodes > 1 and 2 << level > node_places:
            far += rates.far.carry_s(bytes_of_level(level) * math.ceil(node_places))
        else:
            near += rates.near.carry_s(bytes_of_level(level))
    return near, far


def _levels(shape: Shape) -> int:
    return shape.ranks.bit_length() - 1


def _folded_s(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """Ranks beyond a power of two hand in their addend, encoded, and get the result, not encoded, from a neighbour."""
    if shape.ranks == 1 << _levels(shape):
        return 0.0
    link = rates.far if shape.nodes > 1 and shape.lanes == 1 else rates.near
    work = _encoded_s(size, coding) + _work_s(size, coding.add_gb_s)
    return 2 * (link.latency_s + rates.message_s) + link.carry_s(size / coding.ratio + size) + work


def _shifted(bytes_of_round: Callable[[int], float], shape: Shape, rates: Rates) -> tuple[float, float]:
    """Seconds (near, far) of messages to the ranks 1, 2, 4 ... further: so many of a node cross, until all do."""
    near = far = 0.0
    for number in range(_rounds(shape)):
        near += rates.near.carry_s(bytes_of_round(number))
        if shape.nodes > 1:
            far += rates.far.carry_s(bytes_of_round(number) * min(1 << number, shape.node_ranks))
    return (near if shape.node_ranks > 1 else 0.0), far


def _rounds(shape: Shape) -> int:
    return (shape.ranks - 1).bit_length()


def _overlapped(core_s: float, wire_s: tuple[float, float], segments: float) -> float:
    """The core encodes, adds and copies inside the node while the link between nodes is busy."""
    near_s, far_s = wire_s
    core_s += near_s
    return max(core_s, far_s) + min(core_s, far_s) / segments


def _placed_s(size_bytes: float, coding: Coding) -> float:
    """Decoding; uncoded bytes are received in their place."""
    return 0.0 if coding.raw else _work_s(size_bytes, coding.decode_gb_s)


def _encoded_s(size_bytes: float, coding: Coding) -> float:
    return 0.0 if coding.raw else _work_s(size_bytes, coding.encode_gb_s)


# ---- one formula for each algorithm


def _ring_allreduce(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    return _ring_reduce_scatter(size, coding, shape, rates) + _ring_allgather(size, coding, shape, rates)


def _ring_reduce_scatter(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    foreign = size * (shape.ranks - 1) / shape.ranks
    return _ring_s(size, _work_s(foreign, coding.add_gb_s) + _encoded_s(foreign, coding), coding, shape, rates)


def _ring_allgather(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    return _ring_s(size, _encoded_s(size / shape.ranks, coding) + _placed_s(size, coding), coding, shape, rates)


def _ring_s(size: float, work: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """One half of a ring: a chunk at each hop."""
    hops, chunk = shape.ranks - 1, size / shape.ranks
    wire = _neighbour(hops * chunk / coding.ratio, shape, rates)
    start = hops * (_latency_s(shape, rates) + _segments(chunk) * rates.message_s)
    return start + _overlapped(work, wire, _segments(chunk))


def _two_step_allreduce(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    near_s, far_s = _spread(2 * size * (shape.ranks - 1) / shape.ranks / coding.ratio, shape, rates)
    return near_s + _two_step_s(size, far_s, coding, shape, rates)


def _two_step_s(size: float, far_s: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """Seconds of all but the messages inside a node."""
    work = _scattered_sum_s(size, coding, shape.ranks) + _encoded_s(size / shape.ranks, coding)
    strips = _strips(size, shape.ranks, rates)
    start = 2 * _latency_s(shape, rates) + _leg_messages(size, strips, shape.ranks) * rates.message_s
    return start + _overlapped(work + _placed_s(size, coding), (0.0, far_s), strips)


def _grid_allreduce(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    near_s, far_s = _spread(2 * size * (shape.ranks - 1) / shape.ranks / coding.ratio, shape, rates)
    return near_s + _grid_s(size, far_s, coding, shape, rates)


def _grid_s(size: float, far_s: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """Seconds of all but the messages inside a node: two steps along a row, of their part two along a column."""
    grid = Grid(shape.ranks)
    part = size / grid.columns
    work = _scattered_sum_s(size, coding, grid.columns) + _scattered_sum_s(part, coding, grid.rows)
    work += _encoded_s(part / grid.rows, coding) + _placed_s(size, coding)
    strips, row = _strips(size, 2 * grid.columns, rates), -(-shape.ranks // grid.rows)
    messages = _leg_messages(size, strips, row) + _leg_messages(part, strips, grid.rows)
    return 4 * _latency_s(shape, rates) + messages * rates.message_s + _overlapped(work, (0.0, far_s), strips)


def _strips(size: float, owners: int, rates: Rates) -> float:
    """Number of strips, in which each owner has a part, as strip_values has it."""
    return _segments(size, min(rates.part_bytes * owners, STRIP_BYTES))


def _leg_messages(size: float, strips: float, ranks: int) -> float:
    """Addends and sums that the busiest rank sends: to the owners of parts, and as an owner of some to everybody."""
    owners = max(1.0, min(float(ranks), size / strips / LEAST_PART_BYTES))
    return strips * owners * (ranks - 1) / ranks + (ranks - 1) * max(1.0, strips * owners / ranks)


def _two_step_reduce_scatter(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    chunk, others = size / shape.ranks, shape.ranks - 1
    wire = _spread(others * chunk / coding.ratio, shape, rates)
    segments = _strips(size, shape.ranks, rates)
    start = _latency_s(shape, rates) + others * segments * rates.message_s
    return start + _overlapped(_scattered_sum_s(size, coding, shape.ranks), wire, segments)


def _scattered_sum_s(size: float, coding: Coding, ranks: int) -> float:
    """Encode what the others get, add up what comes."""
    foreign = size * (ranks - 1) / ranks
    return _encoded_s(foreign, coding) + _work_s(size, coding.add_gb_s)


def _recursive_doubling(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """Partners add the decoded bytes of both, in scratch memory; nothing overlaps."""
    level = _encoded_s(size, coding) + _work_s(size, coding.decode_gb_s) + _work_s(size, coding.add_gb_s)
    level += _work_s(size, rates.copy_gb_s) + _latency_s(shape, rates) + rates.message_s
    wire = _paired(lambda _: size / coding.ratio, shape, rates)
    return _levels(shape) * level + sum(wire) + _folded_s(size, coding, shape, rates)


def _rabenseifner(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """Halves go to the most distant partner first; what returns takes the same way back."""
    places = 1 << _levels(shape)
    foreign = size * (places - 1) / places
    work = _encoded_s(size, coding) + _work_s(foreign, coding.add_gb_s) + _placed_s(size, coding)
    wire = _paired(lambda level: 2 * size / coding.ratio * (1 << level) / places, shape, rates)
    start = 2 * _levels(shape) * (_latency_s(shape, rates) + rates.message_s)
    return start + work + sum(wire) + _folded_s(size, coding, shape, rates)


def window_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank copies into slots and out of them, and adds up: its own slice of x stays where it is."""
    return 2 * size * (ranks - 1) / ranks + size


def _in_window(copied_bytes: Callable[[float, int], float]) -> Formula:
    """A node's window, measured as one link; copied_bytes(size, ranks): through slots and added up, by one rank."""
    return lambda size, _, shape, rates: rates.window.latency_s + rates.window.carry_s(copied_bytes(size, shape.ranks))


def _two_level(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """The node's sum through its window beside each lane's sum between nodes, strip by strip."""
    node, between = Shape(shape.node_ranks), Shape(shape.nodes, shape.nodes)
    if shape.nodes == 1:
        return _in_window(window_bytes)(size, coding, node, rates)
    inside = rates.window.carry_s(window_bytes(size, node.ranks)) if node.ranks > 1 else 0.0
    crossing = 2 * size * (shape.nodes - 1) / shape.nodes / coding.ratio  # of all lanes together
    sum_s = _grid_s if takes_grid(shape.nodes) else _two_step_s
    outside = sum_s(size / shape.lanes, rates.far.carry_s(crossing), coding, between, rates)
    strips = max(1.0, min(float(STREAMED), size / shape.lanes / shape.nodes / STREAM_BYTES))
    return rates.window.latency_s * strips * (node.ranks > 1) + max(inside, outside) + inside / strips


def _bruck_allgather(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """Rounds of Bruck's allgather: each moves as many parts as a rank has, or all that are missing."""
    part = size / shape.ranks
    wire = _shifted(lambda k: part / coding.ratio * min(1 << k, shape.ranks - (1 << k)), shape, rates)
    work = _encoded_s(part, coding) + _work_s(size, coding.decode_gb_s)
    return _rounds(shape) * (_latency_s(shape, rates) + rates.message_s) + work + sum(wire)


def _pairwise_alltoall(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    others = shape.ranks - 1
    foreign = size * others / shape.ranks
    wire = _spread(foreign / coding.ratio, shape, rates)
    work = _encoded_s(foreign, coding) + _placed_s(foreign, coding) + _work_s(size / shape.ranks, rates.copy_gb_s)
    segments = _segments(size / shape.ranks)
    start = _latency_s(shape, rates) + others * segments * rates.message_s
    return start + _overlapped(work, wire, segments)


def _bruck_alltoall(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """Half of the blocks travel in each round, gathered before and spread out after it."""
    work = _encoded_s(size, coding) + _work_s(size, coding.decode_gb_s)
    work += _work_s(_rounds(shape) * size / coding.ratio, rates.copy_gb_s)
    wire = _shifted(lambda _: size / 2 / coding.ratio, shape, rates)
    return _rounds(shape) * (_latency_s(shape, rates) + rates.message_s) + work + sum(wire)


def _binomial_broadcast(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """Rounds to other nodes first cross with one message a node, the last rounds stay inside."""
    far_rounds = math.ceil(math.log2(shape.nodes))
    near_rounds = _rounds(shape) - far_rounds
    wire = far_rounds * rates.far.carry_s(size / coding.ratio) + near_rounds * rates.near.carry_s(size / coding.ratio)
    start = far_rounds * rates.far.latency_s + near_rounds * rates.near.latency_s + _rounds(shape) * rates.message_s
    return start + wire + _encoded_s(size, coding) + _placed_s(size, coding)


def _ring_broadcast(size: float, coding: Coding, shape: Shape, rates: Rates) -> float:
    """A chain: the last rank gets the first segment after ranks - 1 hops, then one after another."""
    wire = _neighbour(size / coding.ratio, shape, rates)
    segments = _segments(size, SEGMENT_BYTES / 2)
    filling = (shape.ranks - 1) * (_latency_s(shape, rates) + rates.message_s + max(wire) / segments)
    work = _encoded_s(size, coding) + _placed_s(size, coding)
    return filling + segments * rates.message_s + _overlapped(work, wire, segments)


def _native(operation: str) -> Formula:
    """The library, as measured: small messages in log2(ranks) rounds, long ones at the bound's volume."""

    def formula(size: float, _: Coding, shape: Shape, rates: Rates) -> float:
        link = rates.far if shape.nodes > 1 else rates.near
        call = rates.library.get(operation, LibraryCall(link.latency_s, link.bandwidth_gb_s))
        return _rounds(shape) * call.latency_s + call.carry_s(VOLUMES[operation](size, shape), size)

    return formula


COSTS: dict[str, dict[str, Formula]] = {
    "allreduce": {
        "native": _native("allreduce"),
        "node_window": _in_window(window_bytes),
        "two_step": _two_step_allreduce,
        "grid": _grid_allreduce,
        "two_level": _two_level,
        "recursive_doubling": _recursive_doubling,
        "rabenseifner": _rabenseifner,
        "ring": _ring_allreduce,
    },
    "reduce_scatter": {
        "native": _native("reduce_scatter"),
        "node_window": _in_window(lambda size, ranks: size * (ranks - 1) / ranks + size),  # others' addends; the own
        "two_step": _two_step_reduce_scatter,
        "ring": _ring_reduce_scatter,
    },
    "allgather": {
        "native": _native("allgather"),
        "node_window": _in_window(lambda size, _: size),  # the own part goes in, the others' come out
        "ring": _ring_allgather,
        "bruck": _bruck_allgather,
    },
    "alltoall": {"native": _native("alltoall"), "pairwise": _pairwise_alltoall, "bruck": _bruck_alltoall},
    "broadcast": {"native": _native("broadcast"), "binomial": _binomial_broadcast, "ring": _ring_broadcast},
}
