"""A prediction as JSON: units in the keys, gb = 1e9 bytes. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpcllm.plan.prediction import Prediction
from hpcllm.plan.training import training

TIMES = (
    "iteration_time_s", "compute_s", "tp_s", "pp_s", "bubble_s", "dp_exposed_s", "dp_hidden_s", "optimizer_s",
)  # fmt: skip
RATES = ("tflops_per_device_model", "tflops_per_device_hardware", "mfu", "tokens_per_s")


def as_dict(found: Prediction, tokens: float | None) -> dict[str, Any]:
    """Of one layout, and of a training on so many tokens; None: a usual number."""
    layout, cost = found.layout, training(found, tokens)
    return {
        **{key: getattr(found, key) for key in (*TIMES, *RATES)},
        "memory_gb_per_stage": list(found.memory_gb_per_stage),
        "memory_gb_usable": found.machine.device.usable_bytes / 1e9,
        "fits": found.fits,
        "tokens": cost.tokens,
        "days": cost.days,
        "node_hours": cost.node_hours,
        "device_hours": cost.device_hours,
        "energy_kwh_estimate": cost.energy_kwh,
        "trainer": layout.trainer,
        "layout": dataclasses.asdict(layout),
        "layout_text": layout.text(),
        "devices": layout.devices,
        "nodes": cost.nodes,
        "microbatches": layout.microbatches(found.global_batch),
        "global_batch": found.global_batch,
        "sequence_length": found.model.sequence,
        "model": found.model.name,
        "parameters": found.model.parameters,
        "machine": found.machine.name,
        "assumed_of_machine": list(found.machine.assumed),
    }
