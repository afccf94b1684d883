"""How long the messages and collectives of a layout take on a machine.

    trainer     collectives                                        messages between stages
    hpcllm      own algorithms: own_network.py                     MPI, through the policy's codec
    megatron    NCCL, RCCL ...: library_network.py                 the same library

Every time is of one rank, with all ranks of its node doing the same at once, so that they share its NICs. Sizes are
bytes of the whole array without a codec: x of a sum, `out` of an all-gather. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import Machine
from hpcllm.plan.network import library as library_network
from hpcllm.plan.network import own as own_network
from hpcllm.plan.network.topology import Spread, Way, spread, way
from hpcllm.policy import codecs_of

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Network:
    """The links of a machine as the ranks of a layout share them."""

    machine: Machine
    layout: Layout

    def tensor_s(self, operation: str, size_bytes: float) -> float:
        """A collective over tp: "allreduce", "reduce_scatter", "allgather"."""
        return self._collective_s("tp", operation, size_bytes, "tensor", DTYPES[self.layout.precision])

    def data_s(self, operation: str, size_bytes: float) -> float:
        """A collective over dp: sums of gradients in float32, all-gathers of weights."""
        shared_s = self._shared_s(operation, size_bytes)
        if shared_s is not None:
            return shared_s
        if operation == "allgather":
            return self._collective_s("dp", operation, size_bytes, "parameters", DTYPES[self.layout.precision])
        return self._collective_s("dp", operation, size_bytes, "gradients", "float32")

    def message_s(self, size_bytes: float, source: int, target: int) -> float:
        """From each rank of pipeline rank `source` to its twin in `target`, all of them sending."""
        over = self.way(source, target)
        if self.layout.trainer != "hpcllm":
            return library_network.message_s(size_bytes, over, self.machine, self.nodes)
        coding = own_network.coding_of(self.codecs["forward"], DTYPES[self.layout.precision], self.machine)
        return own_network.message_s(size_bytes, coding, over, self.machine, self.nodes)

    def _collective_s(self, axis: str, operation: str, size_bytes: float, kind: str, dtype: str) -> float:
        group = self.spread(axis)
        if group.ranks == 1 or not size_bytes:
            return 0.0
        if self.layout.trainer != "hpcllm":
            return library_network.collective_s(operation, size_bytes, group, self.machine)
        coding = own_network.coding_of(self.codecs[kind], dtype, self.machine)
        return own_network.collective_s(operation, size_bytes, coding, dtype, group, self.machine)

    def _shared_s(self, operation: str, size_bytes: float) -> float | None:
        """Our trainer's float32 arrays in the memory that a node's CPUs share, where that was measured."""
        times = self.machine.device.measured.of(4) if self.machine.device.measured else None
        raw = self.codecs["parameters" if operation == "allgather" else "gradients"] == "raw"
        if times is None or self.layout.trainer != "hpcllm" or not raw or self.spread("dp").nodes > 1:
            return None
        curve = times.curves.get(operation)
        return curve.at(size_bytes / 4) if curve and self.layout.dp > 1 else None

    def by_cores(self, axis: str) -> bool:
        """Whether the cores that compute also carry what ranks along the axis exchange: CPUs of one node."""
        return self.machine.device.family == "cpu" and self.spread(axis).nodes == 1

    def how(self, axis: str, operation: str, size_bytes: float) -> str:
        """What a collective of tp or dp goes by, for people."""
        if axis == "dp" and self._shared_s(operation, size_bytes) is not None:
            return "in shared memory, as measured"
        group = self.spread(axis)
        if self.layout.trainer != "hpcllm":
            return f"library, bus {library_network.bus_gb_s(group, self.machine):.3g} GB/s"
        kind = "tensor" if axis == "tp" else "parameters" if operation == "allgather" else "gradients"
        dtype = "float32" if kind == "gradients" else DTYPES[self.layout.precision]
        coding = own_network.coding_of(self.codecs[kind], dtype, self.machine)
        algorithm = own_network.algorithm_of(operation, size_bytes, coding, dtype, group, self.machine)
        return f"{algorithm}, codec {coding.name}"

    @property
    def nodes(self) -> int:
        """Of the whole job."""
        return -(-self.layout.devices // self.machine.device.per_node)

    @cached_property
    def codecs(self) -> dict[str, str]:
        """Kind of traffic -> codec; error feedback costs nothing on the wire."""
        return {kind: name.removesuffix("+ef") for kind, name in codecs_of(self.layout.policy, {}).items()}

    def spread(self, axis: str) -> Spread:
        """How the groups along an axis lie on nodes."""
        return spread(self.layout, axis, self.machine.device.per_node, self.machine.device.per_package)

    def way(self, source: int, target: int) -> Way:
        """Of messages between two pipeline ranks."""
        return way(self.layout, source, target, self.machine.device.per_node, self.machine.device.per_package)
