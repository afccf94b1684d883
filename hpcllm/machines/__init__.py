"""Machines as data: one TOML file each, in this folder or the user's own.

    name                              what people call it
    [cpu]      name, cores_per_node
               peak_fp32_gflops_per_core      what one core could do at best: clock x FLOPs a cycle
    [device]   name, per_node, memory_gb      a device is what one rank drives: a GPU, or half of one (GCD, tile)
               per_package                    devices in one housing, nearer to one another than to others; left out: 1
               hbm_gb_s                       of its own memory
               peak_bf16_tflops               of the data sheet, without sparsity
               gemm_bf16_tflops               what large matrix products reach
               near_cores                     those of each device, in the order of the devices: "49-55"
    [network]  nic, nics_per_node, nic_gb_s    of one, in each direction

A number that nobody knows is left out. gb is 10^9 bytes. Pure: imports neither torch nor mpi4py.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hpcllm.errors import ConfigError

FOLDER = Path(__file__).parent
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


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(machine: str) -> dict[str, Any]:
    """The tables of a machine by name or path. Raises ConfigError."""
    path = FOLDER / f"{machine}.toml" if machine in names() else Path(machine)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"run.machine = {machine!r} is neither a known machine ({', '.join(names())}) nor a readable TOML "
            f"file: {error}"
        ) from error


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
