"""AdamW with decoupled weight decay (arXiv:1711.05101, algorithm 2) on one rank's stretch of a flat array.

    gradients  [ w3 . . . . | w2 . . | n2 ]     float32, the sums of this stretch
    exp_avg    [            |        |    ]     float32
    exp_avg_sq [            |        |    ]     float32
    weights    [            |        |    ]     float32: the model's own, or master weights where the model has 16 bits

PyTorch's fused kernel goes over each range once, and divides the gradients on the way: by the loss scale, and by how
far the norm is above its limit. Decay is for matrices; norms and biases, the vectors, are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcllm.config import OptimizerConfig
from hpcllm.optim.pieces import EXP_AVG, EXP_AVG_SQ, MASTER, MODEL, Piece, Range, ranges
from hpcllm.optim.sections import Section

ValuesOf = Callable[[Range], Tensor]  # the model's memory of a range


@dataclass
class Share:
    """What one rank updates of a section, and the state that this takes: zeros at first."""

    section: Section
    model: ValuesOf
    master: Tensor | None  # (owned,) float32; None: the model itself is that
    exp_avg: Tensor  # (owned,) float32
    exp_avg_sq: Tensor
    adamw: torch.optim.AdamW

    def update(self, learning_rate: float, divisor: float) -> None:
        """One step with the gradients over `divisor`; they are overwritten with that if it is not 1."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        # where PyTorch's own gradient scaler leaves its scale for the fused kernel
        self.adamw.grad_scale = torch.tensor(divisor) if divisor != 1.0 else None  # type: ignore[attr-defined]
        self.adamw.step()

    def set_updates(self, updates: int) -> None:
        """How many updates the state has seen; the correction of its bias follows from it."""
        for state in self.adamw.state.values():
            state["step"].fill_(updates)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """All that is kept of values [start, end) of the section's array, a part of what this rank owns."""
        flat = self.section.flat
        kept = {MASTER: self.master, EXP_AVG: self.exp_avg, EXP_AVG_SQ: self.exp_avg_sq}
        for part in ranges(flat.names, flat.sizes, start, end):
            yield Piece(MODEL, part.name, part.start, part.end, self.model(part))
            for kind, memory in kept.items():
                if memory is not None:
                    yield Piece(kind, part.name, part.start, part.end, _of(memory, part, self.section.start))


def make_share(
    section: Section,
    model: ValuesOf,
    gradients: Tensor,
    keeps_master: bool,
    is_matrix: Callable[[str], bool],
    config: OptimizerConfig,
) -> Share:
    """gradients: (owned,) float32, the memory that every update reads. is_matrix: by the name of a parameter."""
    flat, start = section.flat, section.start
    parts = list(ranges(flat.names, flat.sizes, start, section.end))
    exp_avg, exp_avg_sq = (torch.zeros(section.owned) for _ in range(2))
    master = torch.empty(section.owned) if keeps_master else None
    weights = []
    for part in parts:
        values = model(part)
        if master is not None:
            values = _of(master, part, start).copy_(values)
        weight = nn.Parameter(values)
        weight.grad = _of(gradients, part, start)
        weights.append(weight)
    groups = [
        {"params": [w for w, p in zip(weights, parts, strict=True) if is_matrix(p.name) is decays], "weight_decay": d}
        for decays, d in ((True, config.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True
    )
    for weight, part in zip(weights, parts, strict=True):
        moments = {"exp_avg": _of(exp_avg, part, start), "exp_avg_sq": _of(exp_avg_sq, part, start)}
        adamw.state[weight] = {"step": torch.zeros(()), **moments}
    return Share(section, model, master, exp_avg, exp_avg_sq, adamw)


def _of(memory: Tensor, part: Range, start: int) -> Tensor:
    """A range's part of memory that begins at value `start` of the array."""
    first = part.place - start
    return memory[first : first + part.end - part.start]
