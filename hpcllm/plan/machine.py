"""Read a machine for the planner: devices, links inside a node, links between nodes, power. From machines/*.toml.

    node   device ---- links ---- device          [links]    between two devices; from one to all others
              \\                    /
              NIC   NIC   NIC   NIC               [network]  line rate, and what collectives and messages get of it
                \\    |     |    /
                  switches                        group_nodes, group_taper: what leaves a group of nodes

Missing values are filled in with usual ones, which are named in `assumed`. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcllm.collectives.tuning import Tuning, from_tables
from hpcllm.config import machines
from hpcllm.config.names import nearest
from hpcllm.errors import ConfigError
from hpcllm.plan.time.kernel_times import MeasuredKernels, read_measured_kernels


@dataclass(frozen=True, kw_only=True)
class Device:
    """Device of one rank: a GPU, a part of one, or a share of a node's CPUs."""

    name: str
    per_node: int
    per_package: int = 1
    family: str = "nvidia-ampere"  # row of roofline.FAMILIES
    multiprocessors: int = 108  # units that work on tiles of a matrix product: SM, CU, Xe core
    cache_mb: float = 40.0  # last cache before the memory
    memory_gb: float  # nominal
    usable_memory_gib: float  # the part that drivers leave to processes
    hbm_gb_s: float
    peak_bf16_tflops: float  # 16-bit matrix products; fp16 where the device has no bf16
    gemm_bf16_tflops: float  # reached by large matrix products
    has_bf16: bool = True
    measured: MeasuredKernels | None = None  # found by `perf step --calibrate`: [kernels.fp32...]

    @property
    def usable_bytes(self) -> float:
        return self.usable_memory_gib * (1 << 30)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Links between the devices of a node. Bandwidths are each way."""

    pair_gb_s: float  # between two devices, the slowest pair
    package_gb_s: float  # between two devices of one package
    device_gb_s: float  # from a device to all others at once
    message_share: float  # share of these that large messages get
    collective_gb_s: float  # bus bandwidth of the library's collectives over all devices of a node
    latency_s: float  # one step of a collective


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Network between nodes. Bandwidths are each way."""

    nics_per_node: int
    nic_gb_s: float  # line rate
    latency_s: float  # one message
    mpi_share: float  # share of the line rate that large messages of MPI get
    message_share: float  # share of the line rate that large messages of the device's library get: NCCL, RCCL
    collective_share: float  # share of the line rate that the library's collectives get (bus bandwidth)
    loss_per_doubling: float  # collectives over n nodes take (1 + this x log2 n) times as long
    topology: str = "not known"
    group_nodes: int = 0  # nodes of a dragonfly's group or a fat tree's pod; 0: one group is the whole machine
    group_taper: float = 1.0  # bandwidth out of a group / bandwidth of its nodes

    @property
    def node_gb_s(self) -> float:
        """Line rate of all NICs of a node."""
        return self.nics_per_node * self.nic_gb_s


@dataclass(frozen=True, kw_only=True)
class Power:
    """Estimated power of a node with all its devices at work, and of one device as part of it."""

    node_w: float
    device_w: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine as the planner knows it."""

    name: str
    device: Device
    links: Links
    fabric: Fabric
    power: Power
    nodes: int = 0  # number of nodes of the machine; 0: not known
    tuning: Tuning | None = None  # measured by `perf tune`: tables [tuning.near], [tuning.codec...] ...
    assumed: tuple[str, ...] = ()  # values that the file leaves out


Tables = dict[str, dict[str, Any]]
DERIVED = ("has_bf16", "measured")  # fields of a part that no table has as a key
FOR_OTHERS = {"device": ("near_cores", "peak_fp16_tflops"), "links": ("kind",), "network": ("nic",), "power": ()}
MAY_BE_ZERO = ("group_nodes", "loss_per_doubling")
PARTS: dict[str, type] = {"device": Device, "links": Links, "network": Fabric, "power": Power}


def read_machine(given: str | Path | Machine) -> Machine:
    """Read a machine by name or path. Raises ConfigError for a file with missing or impossible values."""
    if isinstance(given, Machine):
        return given
    tables = machines.load(str(given))
    if "device" not in tables:
        raise ConfigError(f"machine {str(given)!r} has no [device]: nothing to plan for")
    try:
        return _machine(tables)
    except ConfigError as error:
        raise ConfigError(f"machine {str(given)!r}: {error}") from error


def _machine(file: dict[str, Any]) -> Machine:
    parts = {title: _table(title, file.get(title, {})) for title in PARTS}
    if "peak_bf16_tflops" not in parts["device"] and "peak_fp16_tflops" in parts["device"]:
        parts["device"].update(has_bf16=False, peak_bf16_tflops=parts["device"]["peak_fp16_tflops"])
    assumed = []
    for title, key, value in _usual(parts):
        if key not in parts[title]:
            parts[title][key] = value
            if key != "package_gb_s" or parts["device"].get("per_package", 1) > 1:
                assumed.append(f"{title}.{key} = {value:.4g}")
    device, links, fabric, power = (_made(title, parts[title]) for title in PARTS)
    if "kernels" in file:
        device = dataclasses.replace(device, measured=read_measured_kernels(file["kernels"]))
    return Machine(
        name=str(file.get("name", "a machine without a name")),
        device=device,
        links=links,
        fabric=fabric,
        power=power,
        nodes=int(_number(file, "nodes")) if "nodes" in file else 0,
        tuning=from_tables(file["tuning"]) if "tuning" in file else None,
        assumed=tuple(assumed),
    )


def _usual(tables: Tables) -> Iterator[tuple[str, str, float]]:
    """Yield usual values of keys that a file may leave out; later ones may use earlier ones.

    Drivers keep 0.2 to 1.5 % of HBM, and a GB of its name is a GiB. Large matrix products reach 0.65 (MI250X) to 0.9
    (A100) of the peak. A pair's bandwidth is that of PCIe 4 x16. The network's shares are those of NCCL on InfiniBand;
    what its collectives lose with each doubling of the nodes is that of Leonardo, where half is lost at 256 nodes.
    """
    yield "device", "usable_memory_gib", 0.985 * _number(tables["device"], "memory_gb", "device")
    yield "device", "gemm_bf16_tflops", 0.8 * _number(tables["device"], "peak_bf16_tflops", "device")
    yield "links", "pair_gb_s", 25.0
    yield "links", "package_gb_s", _number(tables["links"], "pair_gb_s", "links")
    yield "links", "device_gb_s", _number(tables["links"], "pair_gb_s", "links")
    yield "links", "message_share", 0.8
    yield "links", "collective_gb_s", 0.8 * _number(tables["links"], "device_gb_s", "links")
    yield "links", "latency_s", 4e-6
    yield "network", "latency_s", 5e-6
    yield "network", "mpi_share", 0.9
    yield "network", "message_share", 0.85
    yield "network", "collective_share", 0.8
    yield "network", "loss_per_doubling", 0.125
    yield "power", "device_w", 500.0
    per_node = _number(tables["device"], "per_node", "device")
    yield "power", "node_w", 1.5 * per_node * _number(tables["power"], "device_w", "power")


def _table(title: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{title} = {table!r} should be a table")
    own = (field.name for field in dataclasses.fields(PARTS[title]) if field.name not in DERIVED)
    valid = [*own, *FOR_OTHERS[title]]
    for key in table:
        if key not in valid:
            raise ConfigError(f"{title} has no key {key!r}; {nearest(key, valid)}")
    return dict(table)


def _number(table: Mapping[str, Any], key: str, title: str = "") -> float:
    value: Any = table.get(key)
    most = 1.0 if key.endswith("_share") else 1e15
    if type(value) not in (int, float) or not 1e-15 <= value <= most:  # also rejects NaN
        valid = "a number above 0" + ", up to 1" * (most == 1.0)
        raise ConfigError(f"{title}{'.' if title else ''}{key} = {value!r}; valid: {valid}")
    return float(value)


def _made(title: str, table: dict[str, Any]) -> Any:
    """Build the dataclass of a part from its own keys; files of machines have more."""
    every = dataclasses.fields(PARTS[title])
    fields = [field for field in every if field.name in table or field.default is dataclasses.MISSING]
    return PARTS[title](**{field.name: _value(title, field, table) for field in fields})


def _value(title: str, field: dataclasses.Field[Any], table: dict[str, Any]) -> Any:
    value: Any = table.get(field.name)
    if field.type in ("int", "float") and not (value == 0 and field.name in MAY_BE_ZERO):
        value = _number(table, field.name, title)
    if field.type == "int" and value != int(value):
        raise ConfigError(f"{title}.{field.name} = {value!r}; valid: a whole number")
    if field.type == "str" and (type(value) is not str or not value):
        raise ConfigError(f"{title}.{field.name} = {value!r}; valid: a name")
    return int(value) if field.type == "int" else value
