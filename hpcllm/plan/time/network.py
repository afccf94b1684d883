"""Predict how long the messages and collectives of a layout take on a machine.

    trainer     collectives                                               messages between stages
    hpcllm      own algorithms: formulas of collectives/cost.py           MPI, through the policy's codec
    megatron    the library that comes with a device: NCCL, RCCL, oneCCL  the same library

Every time is of one rank, with all ranks of its node doing the same at once, so that they share its NICs. Sizes are
bytes of the whole array without a codec: x of a sum, `out` of an all-gather.

Ours: the algorithm that `auto` takes (collectives/selection.py), with rates that `perf tune` measured ([tuning...] of a
machine file), else the links and NICs of the file. A ring crosses nodes over one NIC of a group and has near
neighbours; partners of two-step are anywhere. Codecs that nobody measured are bound by the device's memory.

The library:   seconds = start + steps x hop + V x size x (ranks - 1) / ranks / bus bandwidth      V: 2 of an all-reduce

    ring     ranks - 1 steps a pass, over as many rings at once as there are NICs, each byte through a node's NICs once.
             short words are passed on as they come: a word's way counts. Of long ones each is taken over as a whole: a
             NIC pays for each of the ranks - 1 parts, so many ranks make a message of their own size slow
    tree     an all-reduce, if that is sooner: up and down, log2 of the nodes
    short    words that carry their own flag: short steps, a small part of the bandwidth; long: the other way round
    bus bandwidth of a group: inside a node that of its links; between nodes its part of the NICs, if that is less

Sources: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md (bus bandwidth); github.com/NVIDIA/nccl, src/graph/tuning.cc
(a start of 7 to 14 us; steps of 1 to 3 us over NVLink and 3 to 14 us between nodes, by protocol). Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from hpcllm.codecs.names import parse_name
from hpcllm.collectives.cost import cost_s, message_cost_s
from hpcllm.collectives.selection import Values, by_rule, find_coding
from hpcllm.collectives.strips import DEVICE_SEGMENT_VALUES
from hpcllm.collectives.tuning import VALUE_BITS, Coding, Link, Rates, Shape, nominal_ratio
from hpcllm.config.policies import codecs_of
from hpcllm.config.schema import DTYPES
from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import Links, Machine
from hpcllm.plan.time.topology import Spread, Way, congestion, neighbours_share, scattered_share, spread, way

VOLUME = {"allreduce": 2.0, "reduce_scatter": 1.0, "allgather": 1.0, "broadcast": 1.0}
START_S = 9e-6  # start of a kernel, until it moves its first byte
# RCCL over 8 GCDs, 4 bytes to 1 MiB: 37 us and 10 GB/s of short words, then 95 us and 86 GB/s (perf/plan/network.md)
SHORT_PART = 1 / 8  # share of the bandwidth that short words get
LONG_STEPS = 2.5  # factor on the time of a step that gets the whole bandwidth
PROXY_S = 4e-6  # added to a step between nodes: a thread of the host hands the NIC what the device has written

NEIGHBOURS = ("ring", "native")  # algorithms that send to the next rank only
# Estimates, where no file says better: seconds of a call, of what an algorithm prepares, of starting a message between
# devices; parts of the memory's bandwidth that a codec's kernel uses. Blocks are read once and written once; exp, mpc
# and zfp work on bits.
CALL_S, SETUP_S, MESSAGE_S = 5e-6, 20e-6, 1e-6
PART_OF_BANDWIDTH = {"raw": 0.8, "exp": 0.2, "mpc": 0.2, "zfp": 0.1}
PART_OF_BLOCKS = 0.5


Traffic = tuple[str, str, float] | tuple[Way, float]  # axis and operation of a collective, path of a message; bytes


@dataclass(frozen=True)
class Network:
    """The links of a machine as the ranks of a layout share them."""

    machine: Machine
    layout: Layout
    known: dict[Traffic, float] = field(default_factory=dict, compare=False, repr=False)  # seconds worked out

    def tensor_s(self, operation: str, size_bytes: float) -> float:
        """Return the seconds of a collective over tp: "allreduce", "reduce_scatter", "allgather"."""
        return self._collective_s("tp", operation, size_bytes)

    def data_s(self, operation: str, size_bytes: float) -> float:
        """Return the seconds of a collective over dp: sums of gradients in float32, all-gathers of weights."""
        shared_s = self._shared_s(operation, size_bytes)
        return self._collective_s("dp", operation, size_bytes) if shared_s is None else shared_s

    def message_s(self, size_bytes: float, source: int, target: int) -> float:
        """Return the seconds of a message from each rank of pipeline rank `source` to `target`, all sending at once."""
        path = self.way(source, target)
        if (path, size_bytes) not in self.known:
            self.known[path, size_bytes] = self._path_s(size_bytes, path)
        return self.known[path, size_bytes]

    def _path_s(self, size_bytes: float, path: Way) -> float:
        if self.layout.trainer != "hpcllm":
            return library_message_s(size_bytes, path, self.machine, self.nodes)
        coding = coding_of(self.codecs["forward"], DTYPES[self.layout.precision], self.machine)
        return mpi_message_s(size_bytes, coding, path, self.machine, self.nodes)

    def _collective_s(self, axis: str, operation: str, size_bytes: float) -> float:
        key = axis, operation, size_bytes
        if key not in self.known:
            self.known[key] = self._worked_out_s(axis, operation, size_bytes)
        return self.known[key]

    def _worked_out_s(self, axis: str, operation: str, size_bytes: float) -> float:
        group, machine = self.spread(axis), self.machine
        if group.ranks == 1 or not size_bytes:
            return 0.0
        if self.layout.trainer != "hpcllm":
            return library_collective_s(operation, size_bytes, group, machine)
        algorithm, coding, dtype = self._chosen(axis, operation, size_bytes)
        rates = _rates(machine, group, in_a_row=algorithm in NEIGHBOURS)
        if machine.device.family != "cpu":
            rates = replace(rates, part_bytes=DEVICE_SEGMENT_VALUES * VALUE_BITS[dtype] // 8)
        return cost_s(operation, algorithm, size_bytes, coding, Shape(group.ranks, group.nodes, group.least), rates)

    def _chosen(self, axis: str, operation: str, size_bytes: float) -> tuple[str, Coding, str]:
        """Return the algorithm that `auto` takes for a collective of our trainer, its codec and its data type."""
        kind = "tensor" if axis == "tp" else "parameters" if operation == "allgather" else "gradients"
        dtype = "float32" if kind == "gradients" else DTYPES[self.layout.precision]
        coding, group = coding_of(self.codecs[kind], dtype, self.machine), self.spread(axis)
        item_bytes, on_cpu = VALUE_BITS[dtype] // 8, self.machine.device.family == "cpu"
        values = Values(round(size_bytes / item_bytes), item_bytes, dtype, coding.name, on_cpu)
        shape = Shape(group.ranks, group.nodes, group.least)
        return by_rule(operation, values, shape, may_block=False), coding, dtype

    def _shared_s(self, operation: str, size_bytes: float) -> float | None:
        """Return the measured time of our float32 arrays in a node's shared memory; None where that is not measured."""
        times = self.machine.device.measured.of(4) if self.machine.device.measured else None
        raw = self.codecs["parameters" if operation == "allgather" else "gradients"] == "raw"
        if times is None or self.layout.trainer != "hpcllm" or not raw or self.spread("dp").nodes > 1:
            return None
        curve = times.curves.get(operation)
        return curve.at(size_bytes / 4) if curve and self.layout.dp > 1 else None

    def uses_cores(self, axis: str) -> bool:
        """Return True if the cores that compute also carry what ranks along the axis exchange: CPUs of one node."""
        return self.machine.device.family == "cpu" and self.spread(axis).nodes == 1

    def describe(self, axis: str, operation: str, size_bytes: float) -> str:
        """Say in words how a collective of tp or dp is done."""
        if axis == "dp" and self._shared_s(operation, size_bytes) is not None:
            return "in shared memory, as measured"
        if self.layout.trainer != "hpcllm":
            return f"library, bus {bus_gb_s(self.spread(axis), self.machine):.3g} GB/s"
        algorithm, coding, _ = self._chosen(axis, operation, size_bytes)
        return f"{algorithm}, codec {coding.name}"

    @property
    def nodes(self) -> int:
        """Number of nodes of the whole job."""
        return -(-self.layout.devices // self.machine.device.per_node)

    @cached_property
    def codecs(self) -> dict[str, str]:
        """Kind of traffic -> codec; error feedback costs nothing on the wire."""
        return {kind: name.removesuffix("+ef") for kind, name in codecs_of(self.layout.policy, {}).items()}

    def spread(self, axis: str) -> Spread:
        """Place the groups along an axis on nodes."""
        return spread(self.layout, axis, self.machine.device.per_node, self.machine.device.per_package)

    def way(self, source: int, target: int) -> Way:
        """Trace the messages between two pipeline ranks."""
        return way(self.layout, source, target, self.machine.device.per_node, self.machine.device.per_package)


def library_collective_s(operation: str, size_bytes: float, group: Spread, machine: Machine) -> float:
    """Return the seconds of a library collective while the other groups of the node do the same."""
    moved = VOLUME[operation] * size_bytes * (group.ranks - 1) / group.ranks
    (short_s, long_s), carry_s = _library_steps_s(operation, group, machine), moved / bus_gb_s(group, machine) / 1e9
    return START_S + min(short_s + carry_s / SHORT_PART, LONG_STEPS * long_s + carry_s)


def _library_steps_s(operation: str, group: Spread, machine: Machine) -> tuple[float, float]:
    """Return the seconds of the steps with short and with long words."""
    near_s, far_s = machine.links.latency_s, machine.fabric.latency_s + PROXY_S
    if group.nodes == 1:
        return (VOLUME[operation] * (group.ranks - 1) * near_s,) * 2
    passed_s = VOLUME[operation] * ((group.ranks - group.nodes) * near_s + (group.nodes - 1) * far_s)
    crossed_s = VOLUME[operation] * (group.ranks - 1) * far_s
    if operation != "allreduce":
        return passed_s, crossed_s
    tree_s = 2.0 * ((group.most - 1) * near_s + math.ceil(math.log2(group.nodes)) * far_s)
    return min(passed_s, tree_s), min(crossed_s, tree_s)


def library_message_s(size_bytes: float, path: Way, machine: Machine, nodes: int) -> float:
    """Return the seconds of a message of the library. nodes: of the whole job."""
    links, fabric = machine.links, machine.fabric
    if not path.senders:
        pair_gb_s = links.package_gb_s if path.in_package else links.pair_gb_s
        return START_S + links.latency_s + size_bytes / (links.message_share * pair_gb_s) / 1e9
    share = fabric.message_share * neighbours_share(fabric, nodes, path.nodes)
    rate_gb_s = share * min(rank_gb_s(machine), fabric.node_gb_s / path.senders)
    return START_S + fabric.latency_s + PROXY_S + size_bytes / rate_gb_s / 1e9


def bus_gb_s(group: Spread, machine: Machine) -> float:
    """Return what a rank of the group sends and receives at once, in a ring of the library."""
    inside = inside_gb_s(group.most, group.in_package, machine.links) if group.most > 1 else math.inf
    if group.nodes == 1:
        return inside
    fabric = machine.fabric
    share = fabric.collective_share * neighbours_share(fabric, group.nodes, group.hop_nodes)
    nics_gb_s = min(fabric.node_gb_s / group.together, group.least * rank_gb_s(machine))
    return min(inside, nics_gb_s * share / congestion(fabric, group.nodes))


def inside_gb_s(ranks: int, in_package: bool, links: Links) -> float:
    """Return the bandwidth of a rank among `ranks` ranks of one node: few of them have few links to one another."""
    if in_package:
        return links.message_share * min(links.device_gb_s, (ranks - 1) * links.package_gb_s)
    return min(links.collective_gb_s, links.message_share * (ranks - 1) * links.pair_gb_s)


def rank_gb_s(machine: Machine) -> float:
    """Return the line rate of the NICs that a rank reaches by itself: one, or its part of a node's if more."""
    fabric = machine.fabric
    return fabric.nic_gb_s * max(1.0, fabric.nics_per_node / machine.device.per_node)


def mpi_message_s(size_bytes: float, coding: Coding, path: Way, machine: Machine, nodes: int) -> float:
    """Return the seconds of a message by MPI, encoded. nodes: of the whole job."""
    rates = machine.tuning.rates if machine.tuning else _estimated(machine, path.in_package)
    if path.senders and not machine.tuning:
        fabric = machine.fabric
        share = fabric.mpi_share * neighbours_share(fabric, nodes, path.nodes)
        one_gb_s = share * min(rank_gb_s(machine), fabric.node_gb_s / path.senders)
        rates = replace(rates, far=Link(fabric.latency_s, one_gb_s))
    elif path.senders:
        rates = replace(rates, far=replace(rates.far, bandwidth_gb_s=rates.far.bandwidth_gb_s / path.senders))
    return message_cost_s(size_bytes, coding, same_node=not path.senders, rates=rates)


def coding_of(codec: str, dtype: str, machine: Machine) -> Coding:
    """Return ratio and rates of a codec: as measured, else from the bytes that it moves in the device's memory."""
    measured = find_coding(codec, dtype, machine.tuning.rates) if machine.tuning else None
    if measured:
        return measured
    kind, value_bytes = parse_name(codec).kind, VALUE_BITS[dtype] / 8
    rate_gb_s = PART_OF_BANDWIDTH.get(kind, PART_OF_BLOCKS) * machine.device.hbm_gb_s
    ratio = nominal_ratio(codec, dtype)
    moved, added = 1.0 + 1.0 / ratio, 1.0 / ratio + 8.0 / value_bytes  # bytes for each byte of values; sums are float32
    return Coding(codec, ratio, rate_gb_s / moved, rate_gb_s / moved, rate_gb_s / added)


def _rates(machine: Machine, group: Spread, in_a_row: bool) -> Rates:
    """Return the rates of the links as the group shares them."""
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
    far = Link(fabric.latency_s, fabric.mpi_share * share * crossing / congestion(fabric, group.nodes))
    return replace(rates, far=far, window=_window(rates.near))


def _window(near: Link) -> Link:
    """Return what stands for a node's window where arrays are on devices: a reduce-scatter and an all-gather.

    They move 2 (n - 1) / n of x, for which the window's formula counts one x more.
    """
    return Link(2 * near.latency_s, 1.5 * near.bandwidth_gb_s)


def _estimated(machine: Machine, in_package: bool) -> Rates:
    """Return rates of messages by MPI between devices; `far` is still a node's line rate."""
    links, fabric, hbm_gb_s = machine.links, machine.fabric, machine.device.hbm_gb_s
    pair_gb_s = links.package_gb_s if in_package else links.pair_gb_s
    near = Link(links.latency_s, links.message_share * pair_gb_s)
    return Rates(
        near=near,
        far=Link(fabric.latency_s, fabric.mpi_share * fabric.node_gb_s),
        window=_window(near),
        call_s=CALL_S,
        setup_s=SETUP_S,
        message_s=MESSAGE_S,
        copy_gb_s=PART_OF_BANDWIDTH["raw"] * hbm_gb_s / 2,
        memory_gb_s=PART_OF_BANDWIDTH["raw"] * hbm_gb_s,
    )
