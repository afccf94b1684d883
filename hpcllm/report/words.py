"""How the numbers of a report are called and shown, in one place for the summary and the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcllm.energy.account import WORDS
from hpcllm.printable import size_text


@dataclass(frozen=True)
class Quantity:
    key: str  # in facts.py
    label: str
    show: Callable[[Any], str]
    better: Literal["", "lower", "higher"] = ""  # "" too where runs of different length would not compare


def plain(value: Any) -> str:
    return str(value)


def count(value: Any) -> str:
    return f"{value:,.0f}"


def short(value: Any) -> str:
    """Three digits, and all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def digits4(value: Any) -> str:
    return f"{value:.4f}"


def percent(value: Any) -> str:
    return f"{100 * value:.1f} %"


def large(value: Any) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:,}"


def mesh(value: Any) -> str:
    return " ".join(f"{axis}={size}" for axis, size in value.items()) if isinstance(value, Mapping) else str(value)


QUANTITIES = (
    Quantity("state", "state", plain),
    Quantity("step", "steps made", count),
    Quantity("parameters", "parameters", large),
    Quantity("tokens", "tokens trained on", large),
    Quantity("ranks", "ranks", count),
    Quantity("mesh", "mesh", mesh),
    Quantity("nodes", "nodes", count),
    Quantity("device_name", "device", plain),
    Quantity("loss", "training loss, last, nats a token", digits4, "lower"),
    Quantity("validation_loss", "validation loss, last", digits4, "lower"),
    Quantity("best_validation_loss", "validation loss, best", digits4, "lower"),
    Quantity("best_validation_step", "validation loss, best, at step", count),
    Quantity("bits_per_byte", "bits a byte of held-out text", digits4, "lower"),
    Quantity("median_tokens_per_s", "tokens/s, median", short, "higher"),
    Quantity("median_step_s", "seconds a step, median", short, "lower"),
    Quantity("median_tflops_per_device", "TFLOP/s a rank, median", short, "higher"),
    Quantity("median_mfu", "MFU, median", percent, "higher"),
    Quantity("median_communication_share", "share of a step spent waiting, median", percent, "lower"),
    Quantity("memory_gb", "memory, the most of any rank, GB", short, "lower"),
    Quantity("node_hours", WORDS["node_hours"], short),
    Quantity("gpu_hours", WORDS["gpu_hours"], short),
    Quantity("core_hours", WORDS["core_hours"], short),
    Quantity("energy_kwh", "energy, kWh", short),
    Quantity("energy_gpus_kwh", "energy of GPUs among it, kWh", short),
    Quantity("energy_scope", "energy was measured of", plain),
    Quantity("tokens_per_kwh", "tokens a kWh", short, "higher"),
    Quantity("cost", "cost, by the prices of [energy]", lambda value: f"{value:,.2f}"),
    Quantity("checkpoints", "checkpoints written", count),
    Quantity("checkpoint_bytes", "bytes of one", size_text),
    Quantity("median_checkpoint_gb_s", "checkpoints, GB/s, median", short, "higher"),
    Quantity("checkpoint_waits_s", "seconds waited for checkpoints, all together", short),
    Quantity("starts", "starts", count),
    Quantity("overflows", "logged steps skipped, as gradients overflowed", count),
)


def rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of all that is known of a run, but for what its state says too."""
    shown = [quantity for quantity in QUANTITIES if quantity.key in facts and quantity.key != "step"]
    return [(quantity.label, quantity.show(facts[quantity.key])) for quantity in shown]
