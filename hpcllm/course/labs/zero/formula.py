"""AdamW by its formula with one fault, in float64: what comes of mistakes in the update of a range. Pure.

gradients, clipped as they should be --> a step with the fault --> parameters, to be compared with a student's
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.config.schema import OptimizerConfig

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """Values of a step. raw: the mean gradient before clipping."""

    x: Values
    mean: Values  # exp_avg
    square: Values  # exp_avg_sq
    gradient: Values
    raw: Values
    number: int
    config: OptimizerConfig


Fault = Callable[[Step], Mapping[str, Any]]  # what it takes in place of the right values, by name


def run(fault: Fault, start: Values, raw: Values, clipped: Values, config: OptimizerConfig) -> Values:
    """Return the parameters (n,) after a step for each row of the gradients (steps, n)."""
    state = Step(start, np.zeros_like(start), np.zeros_like(start), clipped[0], raw[0], 0, config)
    for number, (gradient, before) in enumerate(zip(clipped, raw, strict=True), start=1):
        state = step(replace(state, gradient=gradient, raw=before, number=number), fault)
    return state.x


def step(state: Step, fault: Fault) -> Step:
    """Make one step. The fault may replace any of the values below, which come in this order."""
    config, changed = state.config, fault(state)
    beta1, beta2 = changed.get("betas", (config.beta1, config.beta2))
    mean = changed.get("old_mean", state.mean) * beta1 + changed.get("new1", 1 - beta1) * changed.get(
        "g", state.gradient
    )
    new_square = changed.get("g2", lambda _: state.gradient**2)(mean)
    square = changed.get("old_square", state.square) * beta2 + changed.get("new2", 1 - beta2) * new_square
    number = state.number + changed.get("late", 0)
    correction1, correction2 = changed.get("corrections", (1 - beta1**number, 1 - beta2**number))
    a, b = mean / correction1, square / correction2
    root = changed.get("root", lambda b, _: np.sqrt(b) + config.epsilon)(b, correction2)
    move = config.learning_rate * a / root
    x = changed.get("x", lambda x, move, rate: x * (1 - rate) - move)(
        state.x, move, config.learning_rate * config.weight_decay
    )
    keeps_a, keeps_b = changed.get("keeps", (False, False))
    return replace(state, x=x, mean=a if keeps_a else mean, square=b if keeps_b else square)


def _corrected(state: Step, first: bool, second: bool, swapped: bool = False) -> dict[str, Any]:
    one, other = 1 - state.config.beta1**state.number, 1 - state.config.beta2**state.number
    pair = (other, one) if swapped else (one, other)
    return {"corrections": (pair[0] if first else 1.0, pair[1] if second else 1.0)}


FAULTS: dict[str, list[Fault]] = {  # key of the hint: what makes it
    "half_correction": [lambda s: _corrected(s, True, False), lambda s: _corrected(s, False, True)],
    "correction_betas": [
        lambda s: _corrected(s, True, True, swapped=True),
        lambda s: {"corrections": (1 - s.config.beta1 * s.number, 1 - s.config.beta2 * s.number)},
        lambda s: {"corrections": (1 - s.config.beta1 * s.number, 1 - s.config.beta2**s.number)},
        lambda s: {"corrections": (1 - s.config.beta1, 1 - s.config.beta2)},
    ],
    "late_correction": [lambda _: {"late": 1}],
    "corrected_state": [
        lambda _: {"keeps": (True, True)},
        lambda _: {"keeps": (True, False)},
        lambda _: {"keeps": (False, True)},
    ],
    "epsilon": [
        lambda s: {"root": lambda b, _: np.sqrt(b + s.config.epsilon)},
        lambda s: {"root": lambda b, _: np.sqrt(b + s.config.epsilon**2)},
        lambda s: {"root": lambda b, c: np.sqrt(b) + s.config.epsilon / np.sqrt(c)},
        lambda _: {"root": lambda b, _: np.sqrt(b)},
        lambda s: {"root": lambda b, _: np.maximum(np.sqrt(b), s.config.epsilon)},
    ],
    "no_root": [lambda s: {"root": lambda b, _: b + s.config.epsilon}],
    "betas": [
        lambda s: {"betas": (s.config.beta2, s.config.beta1)},
        lambda s: {"betas": (s.config.beta2, s.config.beta1)} | _corrected(s, True, True),
    ],
    "squares": [lambda _: {"g2": lambda mean: mean**2}, lambda s: {"g2": lambda _: np.abs(s.gradient)}],
    "one_minus": [
        lambda _: {"new1": 1.0, "new2": 1.0},
        lambda _: {"new1": 1.0},
        lambda _: {"new2": 1.0},
        lambda s: {"new1": s.config.beta1, "new2": s.config.beta2, "old_mean": s.mean / s.config.beta1
                   * (1 - s.config.beta1), "old_square": s.square / s.config.beta2 * (1 - s.config.beta2)},
    ],
    "states_lost": [
        lambda s: {"old_mean": 0 * s.mean, "old_square": 0 * s.square},
        lambda s: {"old_mean": 0 * s.mean},
        lambda s: {"old_square": 0 * s.square},
    ],
    "clip_late": [
        lambda s: {"g": s.raw},
        lambda s: {"g2": lambda _: s.raw**2},
    ],
    "ascent": [lambda _: {"x": lambda x, move, rate: x * (1 - rate) + move}],
    "decay": [
        lambda s: {"x": lambda x, move, _: x * (1 - s.config.weight_decay) - move},
        lambda _: {"x": lambda x, move, rate: x * (1 + rate) - move},
        lambda _: {"x": lambda x, move, rate: x * (1 - rate) ** 2 - move},
        lambda _: {"x": lambda x, move, rate: (x - move) * (1 - rate)},
    ],
}  # fmt: skip


def faults() -> Iterator[tuple[str, Fault]]:
    """Yield each fault with the key of its hint."""
    yield from ((key, fault) for key, several in FAULTS.items() for fault in several)
