"""Account of a run over all its starts: hours of nodes and devices, energy, and what that costs.

    start 1   |======x             steps that were made, then lost with the job, count too: they were paid for
    start 2        |=======x       goes on from a checkpoint, and adds to what stood at the end of the log
    start 3              |======|
    node-hours, kWh   3 bars together

Pure: meter.py and the training loop read the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcllm.config.schema import EnergyConfig
from hpcllm.system.json_lines import record_of

HOUR_S, KWH_J = 3600.0, 3.6e6
TAIL_BYTES = 1 << 20  # of a log; its records take about a thousandth of that
HOURS = {"gpu": "gpu_hours", "core": "core_hours"}
SUMS = ("node_hours", *HOURS.values(), "energy_kwh", "energy_gpus_kwh", "energy_tokens")  # over all starts of a run
MOST = 1e18  # of each sum: nothing reaches it, and all sums stay finite
WORDS = {"node_hours": "node-hours", "gpu_hours": "GPU-hours", "core_hours": "core-hours"}


@dataclass
class Account:
    """Account of one start, on top of `before`: a record of the log of earlier starts.

    devices: GPUs, or cores where `device` is "core". measured: whether some node tells its energy.
    """

    nodes: int
    devices: int
    device: str
    measured: bool
    prices: EnergyConfig
    before: dict[str, Any] = field(default_factory=dict)
    joules: float = 0.0
    gpu_joules: float = 0.0  # the part of the joules that GPUs drew, where it is known
    tokens: int = 0  # tokens that nodes whose energy was measured trained on

    def record(self, seconds: float) -> dict[str, float]:
        """Return the keys of a log record, after this start has taken so many seconds."""
        hours = seconds / HOUR_S
        taken = {"node_hours": self.nodes * hours, HOURS[self.device]: self.devices * hours}
        if self.measured:
            taken |= {"energy_kwh": self.joules / KWH_J, "energy_tokens": self.tokens}
        if self.gpu_joules:
            taken["energy_gpus_kwh"] = self.gpu_joules / KWH_J
        total = {key: self.before.get(key, 0) + taken.get(key, 0) for key in SUMS if key in taken or key in self.before}
        if total.get("energy_kwh"):
            total["tokens_per_kwh"] = total["energy_tokens"] / total["energy_kwh"]
        if self.prices.price_per_kwh or self.prices.price_per_node_hour:
            total["cost"] = cost(total, self.prices)
        return total


def cost(taken: dict[str, float], prices: EnergyConfig) -> float:
    """Return the cost in the currency of the prices."""
    energy = taken.get("energy_kwh", 0.0) * prices.price_per_kwh
    return energy + taken["node_hours"] * prices.price_per_node_hour


def rows(total: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, value) pairs for people, of a record."""
    hours = [f"{total[key]:.3g} {word}" for key, word in WORDS.items() if key in total]
    found = [("taken", ", ".join(hours))] if hours else []
    if "energy_kwh" in total:
        scope = f" ({total['energy_scope']})" if total.get("energy_scope") else ""
        tokens = f", {total['tokens_per_kwh']:,.0f} tokens/kWh" if "tokens_per_kwh" in total else ""
        found.append(("energy", f"{total['energy_kwh']:.3g} kWh{scope}{tokens}"))
    if "cost" in total:
        found.append(("cost", f"{total['cost']:,.2f}, by the prices of [energy]"))
    return found


def taken_before(log: Path) -> dict[str, Any]:
    """Return the newest record of a log that has a run's sums, all numbers; {} without one. Raises OSError."""
    if not log.exists():
        return {}
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        record = record_of(line)  # None: cut off by the end of a job, or by where the tail begins
        if record and "node_hours" in record and all(is_sum(record[key]) for key in SUMS if key in record):
            return record
    return {}


def is_sum(value: object) -> bool:
    """Return True for a number that a run can have taken."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST
