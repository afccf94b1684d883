"""AdamW with decoupled weight decay (arXiv:1711.05101, algorithm 2) on one rank's share of a flat buffer.

    gradients  [ w3 . . . . | w2 . . | n2 ]     float32, the sums of this share
    exp_avg    [            |        |    ]     float32
    exp_avg_sq [            |        |    ]     float32
    weights    [            |        |    ]     float32: the model's own, or master weights where the model has 16 bits

PyTorch's fused kernel goes over everything once, and divides the gradients on the way: by the loss scale, and by how
far the norm is above its limit. Decay is for matrices; norms and biases, the vectors, are left alone. Neighbours in
memory are one tensor to the kernel, so on a device an update is a launch or two for a whole buffer, and no Python a
parameter.

The learning rate warms up linearly, then follows a cosine down to a fraction of the peak:

    peak      ,-~~-.
             /      `.
            /         `-.___  final_fraction * peak
        0  /
           0  warmup_steps  steps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim.adamw import adamw

from hpcllm.config.schema import OptimizerConfig
from hpcllm.optim.flat_buffers import EXP_AVG, EXP_AVG_SQ, MASTER, MODEL, Piece, Range
from hpcllm.optim.shard_spec import ShardSpec

ValuesOf = Callable[[Range], Tensor]  # the model's memory of a range


@dataclass
class _DecayGroup:
    """Tensors that are updated with the same decay: lists of flat tensors of the same lengths."""

    weight_decay: float
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    exp_avg: list[Tensor] = field(default_factory=list)
    exp_avg_sq: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)  # () float32 each, as the kernel wants it

    def add(self, *tensors: Tensor) -> None:
        """Append a range's weights, gradients and moments; merged with the range before if they lie right behind it."""
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
    """Values of one flat buffer that a rank updates, and the state that this takes: zeros at first."""

    spec: ShardSpec
    model: ValuesOf
    master: Tensor | None  # (owned,) float32; None: the model itself is that
    exp_avg: Tensor  # (owned,) float32
    exp_avg_sq: Tensor
    config: OptimizerConfig
    decay_groups: tuple[_DecayGroup, ...]
    homes: Mapping[str, Tensor] = field(default_factory=dict)  # by kind, where states rest (host_states.py)

    def update(self, learning_rate: float, divisor: float) -> None:
        """Make one step with the gradients over `divisor`; they are overwritten with that if it is not 1."""
        for group in self.decay_groups:
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
        """Set how many updates the state has seen; the correction of its bias follows from it."""
        for group in self.decay_groups:
            for step in group.steps:
                step.fill_(updates)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Weights and state of values [start, end) of the buffer, a part of what this rank owns."""
        kept = {MASTER: self.master, EXP_AVG: self.exp_avg, EXP_AVG_SQ: self.exp_avg_sq}
        kept |= self.homes
        for part in self.spec.buffer.ranges(start, end):
            yield Piece(MODEL, part.name, part.start, part.end, self.model(part))
            for kind, memory in kept.items():
                if memory is not None:
                    yield Piece(kind, part.name, part.start, part.end, _part_of(memory, part, self.spec.start))


def state_kinds(keeps_master: bool) -> list[str]:
    """Kinds of state that a share has for each value, float32 each."""
    return [EXP_AVG, EXP_AVG_SQ, *([MASTER] if keeps_master else [])]


def make_share(
    spec: ShardSpec,
    model: ValuesOf,
    gradients: Tensor,
    keeps_master: bool,
    is_matrix: Callable[[str], bool],
    config: OptimizerConfig,
    landing: Sequence[Tensor] = (),
    homes: Sequence[Tensor] = (),
) -> Share:
    """A rank's share of one buffer with new state, its master weights filled from the model.

    gradients: (owned,) float32, the memory that every update reads. is_matrix: by the name of a parameter. landing,
    homes: (owned,) float32 of each kind of state, where it is updated and where it rests (host_states.py); (): one.
    """
    start, kinds = spec.start, state_kinds(keeps_master)
    memory = dict(zip(kinds, landing or [gradients.new_zeros(spec.owned) for _ in kinds], strict=True))
    exp_avg, exp_avg_sq, master = memory[EXP_AVG], memory[EXP_AVG_SQ], memory.get(MASTER)
    matrices, vectors = _DecayGroup(config.weight_decay), _DecayGroup(0.0)
    for part in spec.buffer.ranges(start, spec.end):
        values = model(part)
        if master is not None:
            values = _part_of(master, part, start).copy_(values)
        group = matrices if is_matrix(part.name) else vectors
        group.add(values, *(_part_of(memory, part, start) for memory in (gradients, exp_avg, exp_avg_sq)))
    rest = dict(zip(kinds, homes, strict=True)) if homes else {}
    if rest and master is not None:
        rest[MASTER].copy_(master)
    return Share(spec, model, master, exp_avg, exp_avg_sq, config, (matrices, vectors), rest)


def _follows(x: Tensor, before: Tensor) -> bool:
    """True if x begins where `before` ends, in the same memory."""
    same = x.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    return same and x.storage_offset() == before.storage_offset() + before.numel()


def _part_of(memory: Tensor, part: Range, start: int) -> Tensor:
    """The part that belongs to a range; memory begins at value `start` of the buffer."""
    first = part.place - start
    return memory[first : first + part.end - part.start]


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of update number `step` (0-based) of a run of `steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step + 1 - config.warmup_steps) / max(1, steps - config.warmup_steps))
    fraction = config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * fraction
