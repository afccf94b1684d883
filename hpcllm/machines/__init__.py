"""Machines as data: one TOML file each, in this folder or the user's own.

[cpu]   name, peak_fp32_gflops_per_core     what one core could do at best, clock x FLOPs a cycle
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hpcllm.errors import ConfigError

FOLDER = Path(__file__).parent


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


def peak_tflops(machine: str, threads: int) -> float | None:
    """Peak fp32 TFLOP/s of one rank that computes with `threads` cores; None without a machine. Raises ConfigError."""
    if not machine:
        return None
    try:
        return float(load(machine)["cpu"]["peak_fp32_gflops_per_core"]) * threads / 1000
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"run.machine = {machine!r} has no number cpu.peak_fp32_gflops_per_core") from error
