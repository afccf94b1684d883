"""Our own collectives and messages on a machine: the formulas of collectives/cost.py, with its links as rates.

    a machine file with [tuning...]     what `perf tune` measured there
    else                                links and NICs as the file has them, and of a device's memory

    algorithm    as `auto` takes it: collectives/rules.py
    NICs         of a node, shared by its groups; in a ring one rank of a group crosses, over the NIC that it reaches
    switches     a ring's neighbours are near, partners of two-step anywhere: topology.py

Codecs that nobody measured are bound by memory here: bytes that they touch over a part of its bandwidth. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from hpcllm.codecs.names import parse_name
from hpcllm.collectives.choice import find_coding
from hpcllm.collectives.cost import cost_s, message_cost_s
from hpcllm.collectives.rates import VALUE_BITS, Coding, Link, Rates, Shape, nominal_ratio
from hpcllm.collectives.rules import Values, by_rule
from hpcllm.plan.machine import Machine
from hpcllm.plan.network.library import inside_gb_s, rank_gb_s
from hpcllm.plan.network.topology import Spread, Way, crowded, neighbours_share, scattered_share

NEIGHBOURS = ("ring", "native")  # algorithms that send to the next rank only
# Estimates, where no file says better: seconds of a call, of what an algorithm prepares, of starting a message between
# devices; parts of the memory's bandwidth that a codec's kernel uses. Blocks are read once and written once; exp, mpc
# and zfp work on bits.
CALL_S, SETUP_S, MESSAGE_S = 5e-6, 20e-6, 1e-6
PART_OF_BANDWIDTH = {"raw": 0.8, "exp": 0.2, "mpc": 0.2, "zfp": 0.1}
PART_OF_BLOCKS = 0.5
TURN_VALUES = 1 << 22  # of two_step on a device: collectives/two_step.py, which imports torch


def collective_s(
    operation: str, size_bytes: float, coding: Coding, dtype: str, group: Spread, machine: Machine
) -> float:
    """Of a group that lies so on nodes, the others of its node at work, too. size_bytes: of the whole array."""
    algorithm = algorithm_of(operation, size_bytes, coding, dtype, group, machine)
    rates = _rates(machine, group, in_a_row=algorithm in NEIGHBOURS)
    if machine.device.family != "cpu":
        rates = replace(rates, turn_bytes=TURN_VALUES * VALUE_BITS[dtype] // 8)
    return cost_s(operation, algorithm, size_bytes, coding, _shape(group), rates)


def algorithm_of(operation: str, size_bytes: float, coding: Coding, dtype: str, group: Spread, machine: Machine) -> str:
    """The name of the one that does it."""
    item_bytes = VALUE_BITS[dtype] // 8
    on_cpu = machine.device.family == "cpu"
    values = Values(round(size_bytes / item_bytes), item_bytes, dtype, coding.name, on_cpu)
    return by_rule(operation, values, _shape(group), may_block=False)


def _shape(group: Spread) -> Shape:
    return Shape(group.ranks, group.nodes, group.least)


def message_s(size_bytes: float, coding: Coding, over: Way, machine: Machine, nodes: int) -> float:
    """nodes: of the whole job."""
    rates = machine.tuning.rates if machine.tuning else _estimated(machine, over.in_package)
    if over.senders and not machine.tuning:
        fabric = machine.fabric
        share = fabric.mpi_share * neighbours_share(fabric, nodes, over.nodes)
        one_gb_s = share * min(rank_gb_s(machine), fabric.node_gb_s / over.senders)
        rates = replace(rates, far=Link(fabric.latency_s, one_gb_s))
    elif over.senders:
        rates = replace(rates, far=replace(rates.far, bandwidth_gb_s=rates.far.bandwidth_gb_s / over.senders))
    return message_cost_s(size_bytes, coding, same_node=not over.senders, rates=rates)


def coding_of(codec: str, dtype: str, machine: Machine) -> Coding:
    """As measured, else what its bytes take of the device's memory."""
    measured = find_coding(codec, dtype, machine.tuning.rates) if machine.tuning else None
    if measured:
        return measured
    kind, value_bytes = parse_name(codec).kind, VALUE_BITS[dtype] / 8
    rate_gb_s = PART_OF_BANDWIDTH.get(kind, PART_OF_BLOCKS) * machine.device.hbm_gb_s
    ratio = nominal_ratio(codec, dtype)
    moved, added = 1.0 + 1.0 / ratio, 1.0 / ratio + 8.0 / value_bytes  # bytes for each byte of values; sums are float32
    return Coding(codec, ratio, rate_gb_s / moved, rate_gb_s / moved, rate_gb_s / added)


def _rates(machine: Machine, group: Spread, in_a_row: bool) -> Rates:
    """Links as the group has them."""
    if machine.tuning:
        rates = machine.tuning.rates
        return replace(rates, far=replace(rates.far, bandwidth_gb_s=rates.far.bandwidth_gb_s / group.together))
    fabric, rates = machine.fabric, _estimated(machine, group.in_package)
    if in_a_row:
        crossing = min(fabric.node_gb_s / group.together, rank_gb_s(machine))
        share = neighbours_share(fabric, group.nodes, group.hop_nodes)
    else:
        crossing = min(fabric.node_gb_s / group.together, group.least * rank_gb_s(machine))
        share = scattered_share(fabric, group.nodes)
        if group.most > 1:  # to all ranks of the node at once: over several links, where it has them
            inside = inside_gb_s(group.most, group.in_package, machine.links)
            rates = replace(rates, near=replace(rates.near, bandwidth_gb_s=inside))
    far = Link(fabric.latency_s, fabric.mpi_share * share * crossing / crowded(fabric, group.nodes))
    return replace(rates, far=far, window=_messages(rates.near))


def _messages(near: Link) -> Link:
    """What stands for a node's window where arrays are on devices: a reduce-scatter and an all-gather by messages.

    They move 2 (n - 1) / n of x, for which the window's formula counts one x more.
    """
    return Link(2 * near.latency_s, 1.5 * near.bandwidth_gb_s)


def _estimated(machine: Machine, in_package: bool) -> Rates:
    """Of messages by MPI between devices; far is still a node's line rate."""
    links, fabric, hbm_gb_s = machine.links, machine.fabric, machine.device.hbm_gb_s
    pair_gb_s = links.package_gb_s if in_package else links.pair_gb_s
    near = Link(links.latency_s, links.message_share * pair_gb_s)
    return Rates(
        near=near,
        far=Link(fabric.latency_s, fabric.mpi_share * fabric.node_gb_s),
        window=_messages(near),
        call_s=CALL_S,
        setup_s=SETUP_S,
        message_s=MESSAGE_S,
        copy_gb_s=PART_OF_BANDWIDTH["raw"] * hbm_gb_s / 2,
        memory_gb_s=PART_OF_BANDWIDTH["raw"] * hbm_gb_s,
    )
