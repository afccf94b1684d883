"""Cost of a whole training with a layout: time, device-hours, node-hours, and energy as an estimate.

    time = tokens / (tokens/s)      node-hours = nodes x time      energy = nodes x watts of a node at load x time

Nodes are counted whole, for they are allocated and draw power whole. The watts stand in the machine's file: of a node
with all its devices at work, without cooling, switches and storage. Checkpoints, validation and restarts are not
counted. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcllm.plan.prediction import Prediction

TOKENS_PER_PARAMETER = 20  # about optimal for a given amount of work: arXiv:2203.15556
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Cost of training on a number of tokens."""

    tokens: float
    nodes: int
    time_s: float
    device_hours: float
    node_hours: float
    energy_kwh: float  # an estimate

    @property
    def days(self) -> float:
        return self.time_s / 86400


def training_cost(found: Prediction, tokens: float | None = None) -> TrainingCost:
    """Return the cost of training on `tokens`; None: 20 for each of the model's parameters."""
    if tokens is None:
        tokens = float(TOKENS_PER_PARAMETER * found.model.parameters)
    nodes = -(-found.layout.devices // found.machine.device.per_node)
    time_s = tokens / found.tokens_per_s
    return TrainingCost(
        tokens=tokens,
        nodes=nodes,
        time_s=time_s,
        device_hours=found.layout.devices * time_s / 3600,
        node_hours=nodes * time_s / 3600,
        energy_kwh=nodes * found.machine.power.node_w * time_s / JOULES_PER_KWH,
    )
