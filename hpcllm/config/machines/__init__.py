"""Machines as data: one TOML file each, in this folder or the user's own.

    name                              what people call it
    nodes                             of the whole machine
    like                              a machine of this folder: what is not said here is as there, but for nodes, [cpu]
                                      and near_cores
    [cpu]      name, cores_per_node
               peak_fp32_gflops_per_core      what one core could do at best: clock x FLOPs a cycle
    [device]   name, per_node, memory_gb      a device is what one rank drives: a GPU, or half of one (GCD, tile)
               per_package                    devices in one housing, nearer to one another than to others; left out: 1
               family, multiprocessors        whose kernels are alike: plan/time/roofline.py; how many work at once
               cache_mb                       the last one before its memory
               usable_memory_gib              what drivers leave of its memory to processes
               hbm_gb_s                       of its own memory
               peak_bf16_tflops               of the data sheet, without sparsity; peak_fp16_tflops where it has no bf16
               gemm_bf16_tflops               what large matrix products reach
               near_cores                     those of each device, in the order of the devices: "49-55"
    [links]    kind                           inside a node, each way:
               pair_gb_s, package_gb_s        of two devices, the slowest pair; of two of a package, left out: the same
               device_gb_s                    of a device to all others at once
               message_share                  of these: what a large message gets
               collective_gb_s                bus bandwidth of the vendor's collectives over a node, large messages
               latency_s                      of a step of these
    [network]  nic, nics_per_node, nic_gb_s   of one, in each direction: the line rate
               latency_s                      of a message
               mpi_share                      of the line rate: what large messages of MPI get, all devices sending
               message_share, collective_share   the same of the vendor's library: its messages, its collectives (bus
                                              bandwidth), as training has them
               loss_per_doubling              a node's collectives over n nodes take (1 + this x log2 n) times as long
               topology, group_nodes          nodes of a dragonfly's group or of a fat tree's pod
               group_taper                    what can leave a group / what its nodes can send
    [power]    node_w, device_w               with all devices at work: an estimate

A number that nobody knows is left out; what the planner puts in its place: plan/machine.py. gb is 10^9 bytes. A number
out of RANGES would not fail but be planned with (no cores, a negative peak), so none is read; tables of measurements,
[kernels] and [tuning], are checked by those who use them. Pure: imports neither torch nor mpi4py.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hpcllm.config.input_files import read_text
from hpcllm.config.names import closest, shown
from hpcllm.config.rules import MOST_RANKS, Range
from hpcllm.errors import ConfigError

FOLDER = Path(__file__).parent
OF_ITS_OWN = (("cpu",), ("device", "near_cores"))  # of a file: never as in the machine that it is like
# Words of a device's name -> peak bf16 TFLOP/s of what PyTorch calls a device, dense, by the vendors' data sheets (an
# MI250X's halved for a GCD of it). The first line that fits counts. With a star: not looked up again.
DEVICES = (
    (("MI250X",), 191.5),  # 383
    (("MI250",), 181.0),  # 362.1 *
    (("MI300A",), 980.6),  # *
    (("MI300X",), 1307.0),
    (("GH200",), 989.0),
    (("H200",), 989.0),  # *
    (("H100", "PCIe"), 756.0),  # *
    (("H100", "NVL"), 835.0),  # *
    (("H100",), 989.0),
    (("A100",), 312.0),
)
# GB_S: a measurement on one rank, where nothing moves, divides by a nanosecond
GB_S, TFLOPS, GB, WATTS = (Range(0, most, above=True) for most in (1e9, 1e7, 1e6, 1e8))
SHARE, SECONDS = (Range(0, 1, above=True) for _ in range(2))
COUNT = Range(1, 1024)  # of devices or network cards of a node
RANGES: dict[str, dict[str, Range]] = {  # table -> key -> range
    "cpu": {"cores_per_node": Range(1, 1 << 16), "peak_fp32_gflops_per_core": Range(0, 1e6, above=True)},
    "device": {
        "per_node": COUNT,
        "per_package": COUNT,
        "multiprocessors": Range(1, 1 << 20),
        **dict.fromkeys(("cache_mb", "memory_gb", "usable_memory_gib"), GB),
        "hbm_gb_s": GB_S,
        **dict.fromkeys(("peak_bf16_tflops", "peak_fp16_tflops", "gemm_bf16_tflops"), TFLOPS),
    },
    "links": {
        **dict.fromkeys(("pair_gb_s", "package_gb_s", "device_gb_s", "collective_gb_s"), GB_S),
        "message_share": SHARE,
        "latency_s": SECONDS,
    },
    "network": {
        "nics_per_node": COUNT,
        "nic_gb_s": GB_S,
        "latency_s": SECONDS,
        **dict.fromkeys(("mpi_share", "message_share", "collective_share"), SHARE),
        "loss_per_doubling": Range(0, 10),
        "group_nodes": Range(0, MOST_RANKS),
        "group_taper": Range(0, 10, above=True),
    },
    "power": {"node_w": WATTS, "device_w": WATTS},
}
WHOLE = ("nodes", "cores_per_node", "per_node", "per_package", "multiprocessors", "nics_per_node", "group_nodes")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(machine: str) -> dict[str, Any]:
    """The tables of a machine by name or path, their numbers in range. Raises ConfigError."""
    tables = _complete(machine)
    try:
        _check_numbers(tables)
    except ConfigError as error:
        raise ConfigError(f"machine {shown(machine)}: {error}") from error
    return tables


def _complete(machine: str) -> dict[str, Any]:
    """The tables of a machine and of the one that it is like."""
    tables = _read(machine)
    base = tables.pop("like", None)
    if base is None:
        return tables
    if not isinstance(base, str) or base not in names() or "like" in _read(base):
        valid = ", ".join(name for name in names() if "like" not in _read(name))
        raise ConfigError(f"machine {shown(machine)}: like = {shown(base)} cannot be; valid: {valid}")
    return _joined(_read(base), tables)


def _read(machine: str) -> dict[str, Any]:
    path = FOLDER / f"{machine.lower()}.toml" if machine.lower() in names() else Path(machine)
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError is a ValueError
        near = closest(machine, names())
        raise ConfigError(
            f"machine {shown(machine)} is neither a known one nor a readable TOML file: {error}; "
            f"{f'did you mean {near}? ' if near else ''}known: {', '.join(names())}"
        ) from error


def _joined(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merge two machines: the values of `own`, and those of `base` that `own` does not give."""
    for *titles, key in OF_ITS_OWN:
        table = base
        for title in titles:
            table = table.get(title, {})
        table.pop(key, None)
    base.pop("nodes", None)
    merged = {**base, **own}
    for title in base.keys() & own.keys():
        if isinstance(base[title], dict) and isinstance(own[title], dict):
            merged[title] = {**base[title], **own[title]}
    return merged


def _check_numbers(tables: dict[str, Any]) -> None:
    """Raise ConfigError for a table that is none, or a number that no machine can have."""
    if "nodes" in tables:
        _check("nodes", tables["nodes"], Range(1, MOST_RANKS))
    name = tables.get("name", "a machine")
    if not (isinstance(name, str) and name.isprintable()):
        raise ConfigError(f"name = {shown(name)}; valid: a printable name")
    for title, ranges in RANGES.items():
        table = tables.get(title, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{title} = {shown(table)} should be a table")
        for key in ranges.keys() & table.keys():
            _check(f"{title}.{key}", table[key], ranges[key])


def _check(key: str, value: Any, valid: Range) -> None:
    is_whole = key.rpartition(".")[2] in WHOLE
    is_number = type(value) is int or (type(value) is float and (value.is_integer() or not is_whole))
    if not is_number or value not in valid:
        raise ConfigError(f"{key} = {shown(value)}; valid: a {'whole ' * is_whole}number, {valid}")


def peak_tflops(machine: str, threads: int, on_device: bool = False) -> float | None:
    """Peak TFLOP/s of one rank: bf16 on its device, or fp32 on `threads` cores. None without a machine.

    Raises ConfigError.
    """
    if not machine:
        return None
    if on_device:
        return _number(machine, "device", "peak_bf16_tflops")
    return _number(machine, "cpu", "peak_fp32_gflops_per_core") * threads / 1000


def peak_of_device(name: str) -> float | None:
    """Peak bf16 TFLOP/s of a device by the name that its driver gives; None: not known."""
    return next((peak for words, peak in DEVICES if all(word in name for word in words)), None)


def _number(machine: str, table: str, key: str) -> float:
    try:
        return float(load(machine)[table][key])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"run.machine = {machine!r} has no number {table}.{key}") from error
