"""Ranges of the numbers of a machine file, checked for whoever reads one: planner, layout, training. Pure.

    [cpu]  [device]  [links]  [network]  [power]  nodes      keys and units: machines/__init__.py

A value out of range would not fail but be planned with: no cores, a negative peak, a share above 1. Tables of
measurements, [kernels] and [tuning], are checked by those who use them.
"""

from __future__ import annotations

from typing import Any

from hpcllm.config.names import shown
from hpcllm.config.rules import MOST_RANKS, Range
from hpcllm.errors import ConfigError

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


def check_numbers(tables: dict[str, Any]) -> None:
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
