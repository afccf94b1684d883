"""A machine as the planner sees it: devices, links inside a node, links between nodes, power. From machines/*.toml.

    node   device ---- links ---- device          [links]    of two devices; of one to all others
              \\                    /
              NIC   NIC   NIC   NIC               [network]  line rate, and what collectives and messages get of it
                \\    |     |    /
                  switches                        group_nodes, group_taper: what leaves a group of nodes

What a file leaves out is filled in with what is usual, and named in `assumed`. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcllm import machines
from hpcllm.collectives.tuning import Tuning, from_tables
from hpcllm.errors import ConfigError
from hpcllm.plan.time.kernel_times import MeasuredKernels, read_measured_kernels
from hpcllm.rules import nearest


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank drives."""

    name: str
    per_node: int
    per_package: int = 1
    family: str = "nvidia-ampere"  # whose kernels are alike: families.py
    multiprocessors: int = 108  # that work on tiles of a matrix product: SM, CU, Xe core
    cache_mb: float = 40.0  # the last one before its memory
    memory_gb: float  # of its name
    usable_memory_gib: float  # what drivers leave of it to processes
    hbm_gb_s: float
    peak_bf16_tflops: float  # of 16-bit matrix products: of fp16 where it has no bf16
    gemm_bf16_tflops: float  # what large matrix products reach
    has_bf16: bool = True
    measured: MeasuredKernels | None = None  # what `perf step --calibrate` found here: [kernels.fp32...]

    @property
    def usable_bytes(self) -> float:
        return self.usable_memory_gib * (1 << 30)


@dataclass(frozen=True, kw_only=True)
class Links:
    """What connects the devices of a node. Bandwidths are each way."""

    pair_gb_s: float  # of two devices, of the slowest pair
    package_gb_s: float  # of two devices of one package
    device_gb_s: float  # of a device to all others at once
    message_share: float  # of these: what large messages get
    collective_gb_s: float  # of a device, in the library's collectives over all devices of a node (bus bandwidth)
    latency_s: float  # of a collective's step


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What connects nodes. Bandwidths are each way."""

    nics_per_node: int
    nic_gb_s: float  # line rate
    latency_s: float  # of a message
    mpi_share: float  # of the line rate: what large messages of MPI get
    message_share: float  # of the line rate: what large messages of the device's library get: NCCL, RCCL
    collective_share: float  # of the line rate: what the library's collectives get (bus bandwidth)
    loss_per_doubling: float = 0.0  # these over n nodes take (1 + this x log2 n) times as long
    topology: str = "not known"
    group_nodes: int = 0  # of a dragonfly's group or a fat tree's pod; 0: one group is the whole machine
    group_taper: float = 1.0  # what can leave a group / what its nodes can send

    @property
    def node_gb_s(self) -> float:
        """Line rate of a node."""
        return self.nics_per_node * self.nic_gb_s


@dataclass(frozen=True, kw_only=True)
class Power:
    """An estimate: of a node with all its devices at work, and of one device as part of it."""

    node_w: float
    device_w: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    name: str
    device: Device
    links: Links
    fabric: Fabric
    power: Power
    nodes: int = 0  # of the whole machine; 0: not known
    tuning: Tuning | None = None  # what `perf tune` measured here, as tables [tuning.near], [tuning.codec...] ...
    assumed: tuple[str, ...] = ()  # what the file leaves out


Tables = dict[str, dict[str, Any]]
FOUND = ("has_bf16", "measured")  # keys of a part that no table has by that name
FOR_OTHERS = {"device": ("near_cores", "peak_fp16_tflops"), "links": ("kind",), "network": ("nic",), "power": ()}
MAY_BE_ZERO = ("group_nodes", "loss_per_doubling")
PARTS: dict[str, type] = {"device": Device, "links": Links, "network": Fabric, "power": Power}


def read_machine(given: str | Path | Machine) -> Machine:
    """By name or path. Raises ConfigError for a file that says too little, or what cannot be."""
    if isinstance(given, Machine):
        return given
    tables = machines.load(str(given))
    if "device" not in tables:
        raise ConfigError(f"machine {str(given)!r} has no [device]: nothing to plan for")
    try:
        return _machine(tables)
    except ConfigError as error:
        raise ConfigError(f"machine {str(given)!r}: {error}") from error


def _machine(tables: dict[str, Any]) -> Machine:
    said = {title: _table(title, tables.get(title, {})) for title in PARTS}
    if "peak_bf16_tflops" not in said["device"] and "peak_fp16_tflops" in said["device"]:
        said["device"].update(has_bf16=False, peak_bf16_tflops=said["device"]["peak_fp16_tflops"])
    assumed = tuple(_fill(said))
    device, links, fabric, power = (_made(title, said[title]) for title in PARTS)
    if "kernels" in tables:
        device = dataclasses.replace(device, measured=read_measured_kernels(tables["kernels"]))
    return Machine(
        name=str(tables.get("name", "a machine without a name")),
        device=device,
        links=links,
        fabric=fabric,
        power=power,
        nodes=int(_number(tables, "nodes")) if "nodes" in tables else 0,
        tuning=from_tables(tables["tuning"]) if "tuning" in tables else None,
        assumed=assumed,
    )


def _fill(said: Tables) -> Iterator[str]:
    """What is usual, where `said` is silent; yields what was filled in."""
    for title, key, value in _usual(said):
        if key not in said[title]:
            said[title][key] = value
            if key != "package_gb_s" or said["device"].get("per_package", 1) > 1:
                yield f"{title}.{key} = {value:.4g}"


def _usual(said: Tables) -> Iterator[tuple[str, str, float]]:
    """What is filled in where a file is silent; later rows may use what earlier ones filled in.

    Drivers keep 0.2 to 1.5 % of HBM, and a GB of its name is a GiB. Large matrix products reach 0.65 (MI250X) to 0.9
    (A100) of the peak. A pair's bandwidth is that of PCIe 4 x16. The network's shares are those of NCCL on InfiniBand.
    """
    yield "device", "usable_memory_gib", 0.985 * _number(said["device"], "memory_gb", "device")
    yield "device", "gemm_bf16_tflops", 0.8 * _number(said["device"], "peak_bf16_tflops", "device")
    yield "links", "pair_gb_s", 25.0
    yield "links", "package_gb_s", _number(said["links"], "pair_gb_s", "links")
    yield "links", "device_gb_s", _number(said["links"], "pair_gb_s", "links")
    yield "links", "message_share", 0.8
    yield "links", "collective_gb_s", 0.8 * _number(said["links"], "device_gb_s", "links")
    yield "links", "latency_s", 4e-6
    yield "network", "latency_s", 5e-6
    yield "network", "mpi_share", 0.9
    yield "network", "message_share", 0.85
    yield "network", "collective_share", 0.8
    yield "power", "device_w", 500.0
    yield (
        "power",
        "node_w",
        1.5 * _number(said["device"], "per_node", "device") * _number(said["power"], "device_w", "power"),
    )


def _table(title: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{title} = {table!r} should be a table")
    valid = [*(field.name for field in dataclasses.fields(PARTS[title]) if field.name not in FOUND), *FOR_OTHERS[title]]
    for key in table:
        if key not in valid:
            raise ConfigError(f"{title} has no key {key!r}; {nearest(key, valid)}")
    return dict(table)


def _number(table: Mapping[str, Any], key: str, title: str = "") -> float:
    value: Any = table.get(key)
    most = 1.0 if key.endswith("_share") else 1e15
    if type(value) not in (int, float) or not 1e-15 <= value <= most:  # also refuses NaN
        valid = "a number above 0" + ", up to 1" * (most == 1.0)
        raise ConfigError(f"{title}{'.' if title else ''}{key} = {value!r}; valid: {valid}")
    return float(value)


def _made(title: str, said: dict[str, Any]) -> Any:
    """The part's dataclass, of the keys that are its own: the files of machines say more."""
    fields = [field for field in dataclasses.fields(PARTS[title]) if field.name in said or not _has_default(field)]
    return PARTS[title](**{field.name: _value(title, field, said) for field in fields})


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING


def _value(title: str, field: dataclasses.Field[Any], said: dict[str, Any]) -> Any:
    value: Any = said.get(field.name)
    if field.type in ("int", "float") and not (value == 0 and field.name in MAY_BE_ZERO):
        value = _number(said, field.name, title)
    if field.type == "int" and value != int(value):
        raise ConfigError(f"{title}.{field.name} = {value!r}; valid: a whole number")
    if field.type == "str" and (type(value) is not str or not value):
        raise ConfigError(f"{title}.{field.name} = {value!r}; valid: a name")
    return int(value) if field.type == "int" else value
