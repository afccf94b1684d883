"""Learning rate: linear warm-up, then a cosine down to a fraction of the peak. Pure.

peak      ,-~~-.
         /      `.
        /         `-.___  final_fraction * peak
    0  /
       0  warmup_steps  steps
"""

from __future__ import annotations

import math

from hpcllm.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Rate of update number `step` (0-based) of a run of `steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step + 1 - config.warmup_steps) / max(1, steps - config.warmup_steps))
    fraction = config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * fraction
