"""Lab 8: time and memory of layouts by hand. Fill in this file, then run `hpcllm course check`.

Model, Layout and Machine are dataclasses: print(Layout(dp=2, tp=4)). The sheet says what their fields mean.
"""

from __future__ import annotations

from hpcllm.course.labs.planner.given import Layout, Machine, Model


def parameters(model: Model) -> int:
    """Count all parameters of a model."""
    raise NotImplementedError


def flops(model: Model, tokens: int) -> float:
    """Count the FLOPs of the forward and backward pass of so many tokens, nothing recomputed."""
    raise NotImplementedError


def memory_bytes(model: Model, layout: Layout, batch: int) -> dict[str, float]:
    """Count the bytes of a device of the first stage: parameters, gradients, states, activations.

    batch: samples of a step, over all replicas.
    """
    raise NotImplementedError


def step_seconds(model: Model, layout: Layout, machine: Machine, batch: int) -> float:
    """Predict the seconds of a step."""
    raise NotImplementedError


def sustained_efficiency(model: Model, layout: Layout, machine: Machine, batch: int, seconds: float) -> float:
    """Find the efficiency with which step_seconds gives what was measured, whatever the machine says."""
    raise NotImplementedError


def best_layout(model: Model, machine: Machine, devices: int, batch: int) -> Layout | None:
    """Find the fastest layout of all devices whose memory is enough; None if there is none."""
    raise NotImplementedError


PREDICTIONS: dict[str, float | None] = {  # of the sheet's GPT
    "billions": None,  # of parameters, in 10^9
    "gigabytes": None,  # of a device of the first stage, 10^9 bytes each
    "seconds": None,  # of a step
}
