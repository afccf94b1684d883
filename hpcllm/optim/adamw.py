"""AdamW with decoupled weight decay (arXiv:1711.05101, algorithm 2) on one rank's stretch of a flat array.

    gradients  [ w3 . . . . | w2 . . | n2 ]     float32, the sums of this stretch
    exp_avg    [            |        |    ]     float32
    exp_avg_sq [            |        |    ]     float32
    weights    [            |        |    ]     float32: the model's own, or master weights where the model has 16 bits

PyTorch's fused kernel goes over everything once, and divides the gradients on the way: by the loss scale, and by how
far the norm is above its limit. Decay is for matrices; norms and biases, the vectors, are left alone. Neighbours in
memory are one tensor to the kernel, so on a device an update is a launch or two for a whole array, and no Python a
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim.adamw import adamw

from hpcllm.config import OptimizerConfig
from hpcllm.optim.pieces import EXP_AVG, EXP_AVG_SQ, MASTER, MODEL, Piece, Range, ranges
from hpcllm.optim.sections import Section

ValuesOf = Callable[[Range], Tensor]  # the model's memory of a range


@dataclass
class _Alike:
    """What is updated with the same decay: lists of flat tensors of the same lengths."""

    weight_decay: float
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    exp_avg: list[Tensor] = field(default_factory=list)
    exp_avg_sq: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)  # () float32 each, as the kernel wants it

    def add(self, *tensors: Tensor) -> None:
        """A range's weights, gradients and moments; joined with those of the range before if they lie behind them."""
        lists = (self.weights, self.gradients, self.exp_avg, self.exp_avg_sq)
        if self.weights and all(_follows(x, kept[-1]) for x, kept in zip(tensors, lists, strict=True)):
            for x, kept in zip(tensors, lists, strict=True):
                kept[-1] = kept[-1].as_strided((kept[-1].numel() + x.numel(),), (1,))
            return
        for x, kept in zip(tensors, lists, strict=True):
            kept.append(x)
        self.steps.append(tensors[0].new_zeros(()))


@dataclass
class Share:
    """What one rank updates of a section, and the state that this takes: zeros at first."""

    section: Section
    model: ValuesOf
    master: Tensor | None  # (owned,) float32; None: the model itself is that
    exp_avg: Tensor  # (owned,) float32
    exp_avg_sq: Tensor
    config: OptimizerConfig
    alike: tuple[_Alike, ...]

    def update(self, learning_rate: float, divisor: float) -> None:
        """One step with the gradients over `divisor`; they are overwritten with that if it is not 1."""
        for group in self.alike:
            adamw(
                group.weights,
                group.gradients,
                group.exp_avg,
                group.exp_avg_sq,
                [],
                group.steps,
                fused=True,
                grad_scale=self.exp_avg.new_full((), divisor) if divisor != 1.0 else None,
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=learning_rate,
                weight_decay=group.weight_decay,
                eps=self.config.epsilon,
                maximize=False,
            )

    def set_updates(self, updates: int) -> None:
        """How many updates the state has seen; the correction of its bias follows from it."""
        for group in self.alike:
            for step in group.steps:
                step.fill_(updates)

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
    exp_avg, exp_avg_sq = (gradients.new_zeros(section.owned) for _ in range(2))
    master = gradients.new_empty(section.owned) if keeps_master else None
    matrices, vectors = _Alike(config.weight_decay), _Alike(0.0)
    for part in ranges(flat.names, flat.sizes, start, section.end):
        values = model(part)
        if master is not None:
            values = _of(master, part, start).copy_(values)
        group = matrices if is_matrix(part.name) else vectors
        group.add(values, *(_of(memory, part, start) for memory in (gradients, exp_avg, exp_avg_sq)))
    return Share(section, model, master, exp_avg, exp_avg_sq, config, (matrices, vectors))


def _follows(x: Tensor, before: Tensor) -> bool:
    """Whether x begins where `before` ends, in the same memory."""
    same = x.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    return same and x.storage_offset() == before.storage_offset() + before.numel()


def _of(memory: Tensor, part: Range, start: int) -> Tensor:
    """A range's part of memory that begins at value `start` of the array."""
    first = part.place - start
    return memory[first : first + part.end - part.start]
