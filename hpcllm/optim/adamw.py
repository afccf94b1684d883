"""AdamW with decoupled weight decay (arXiv:1711.05101, algorithm 2) on one rank's share of a flat buffer.

    gradients  [ w3 . . . . | w2 . . | n2 ]     float32, the sums of this share
    exp_avg    [            |        |    ]     float32
    exp_avg_sq [            |        |    ]     float32
    weights    [            |        |    ]     float32: the model's own, or master weights where the model has 16 bits
    narrowed   [            |        |    ]     the model's own, if those are masters: a kernel rounds them to it

Our kernel (gpu/fused_adamw.py) or, where there is none, PyTorch's fused one goes over everything once, and divides the
gradients on the way: by the loss scale, and by how far the norm is above its limit. Decay is for matrices; norms and
biases, the vectors, are left alone. As all lies flat, an update is a launch for a whole buffer, and no Python a
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
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from hpcllm.codecs.gpu.launch import launcher_of
from hpcllm.config.schema import OptimizerConfig
from hpcllm.optim.flat_buffers import EXP_AVG, EXP_AVG_SQ, MASTER, MODEL, Piece, Range
from hpcllm.optim.gpu import fused_adamw
from hpcllm.optim.gpu.fused_adamw import Numbers, Operands
from hpcllm.optim.shard_spec import ShardSpec


@dataclass
class Share:
    """Values of one flat buffer that a rank updates, and the state that this takes: zeros at first."""

    spec: ShardSpec
    model: Tensor  # (owned,) the model's memory
    master: Tensor | None  # (owned,) float32; None: the model itself is that
    operands: Operands  # with the state
    config: OptimizerConfig
    homes: Mapping[str, Tensor] = field(default_factory=dict)  # by kind, where states rest (host_states.py)
    updates: int = 0  # that the state has seen

    def update(self, learning_rate: float, divisor: float, narrowed: Tensor | None = None) -> bool:
        """Make one step with the gradients over `divisor`, which may be overwritten with that.

        narrowed: (owned,) the model's memory, if it may be written now. Returns True if the new master weights have
        been rounded to it.
        """
        self.updates += 1
        numbers = Numbers(self.updates, learning_rate, divisor, self.config)
        launcher, _ = launcher_of(self.operands.weights.device.type)
        if launcher is None:
            update_by_pytorch(self.operands, numbers)
            return False
        rounds = self.master is not None and narrowed is not None
        fused_adamw.update(launcher, self.operands, numbers, narrowed if rounds else None)
        return rounds

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Weights and state of values [start, end) of the buffer, a part of what this rank owns."""
        kept = {MASTER: self.master, EXP_AVG: self.operands.exp_avg, EXP_AVG_SQ: self.operands.exp_avg_sq}
        kept |= self.homes
        for part in self.spec.buffer.ranges(start, end):
            yield Piece(MODEL, part.name, part.start, part.end, _part_of(self.model, part, self.spec.start))
            for kind, memory in kept.items():
                if memory is not None:
                    yield Piece(kind, part.name, part.start, part.end, _part_of(memory, part, self.spec.start))


def state_kinds(keeps_master: bool) -> list[str]:
    """Kinds of state that a share has for each value, float32 each."""
    return [EXP_AVG, EXP_AVG_SQ, *([MASTER] if keeps_master else [])]


def make_share(
    spec: ShardSpec,
    model: Tensor,
    gradients: Tensor,
    keeps_master: bool,
    is_matrix: Callable[[str], bool],
    config: OptimizerConfig,
    landing: Sequence[Tensor] = (),
    homes: Sequence[Tensor] = (),
) -> Share:
    """A rank's share of one buffer with new state, its master weights filled from the model.

    model: (owned,), the model's memory; gradients: (owned,) float32, the memory that every update reads. is_matrix: by
    the name of a parameter. landing, homes: (owned,) float32 of each kind of state, where it is updated and where it
    rests (host_states.py); (): one.
    """
    kinds = state_kinds(keeps_master)
    memory = dict(zip(kinds, landing or [gradients.new_zeros(spec.owned) for _ in kinds], strict=True))
    master = memory.get(MASTER)
    weights = model if master is None else master.copy_(model)
    operands = Operands(weights, gradients, memory[EXP_AVG], memory[EXP_AVG_SQ], _edges(spec, is_matrix))
    rest = dict(zip(kinds, homes, strict=True)) if homes else {}
    if rest and master is not None:
        rest[MASTER].copy_(master)
    return Share(spec, model, master, operands, config, rest)


def update_by_pytorch(operands: Operands, numbers: Numbers) -> None:
    """Update weights and moments in place; the gradients become what they are divided by, if that is not 1."""
    config, scalar = numbers.config, partial(torch.full, (), dtype=torch.float32, device=operands.weights.device)
    step, scale = scalar(numbers.number), scalar(numbers.divisor) if numbers.divisor != 1.0 else None
    for weight_decay, parts in zip((config.weight_decay, 0.0), _by_decay(operands), strict=True):
        if parts:
            weights, gradients, exp_avg, exp_avg_sq = (list(each) for each in zip(*parts, strict=True))
            torch._fused_adamw_(
                weights,
                gradients,
                exp_avg,
                exp_avg_sq,
                [],
                [step] * len(parts),
                lr=numbers.learning_rate,
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=weight_decay,
                eps=config.epsilon,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
            )


def _by_decay(operands: Operands) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Weights, gradients and moments of each stretch between two edges: those that are decayed, and the others."""
    arrays = operands.weights, operands.gradients, operands.exp_avg, operands.exp_avg_sq
    found: tuple[list[list[Tensor]], list[list[Tensor]]] = [], []
    for number, (start, end) in enumerate(pairwise((0, *operands.edges, operands.weights.numel()))):
        if start < end:
            found[number % 2].append([array[start:end] for array in arrays])
    return found


def _edges(spec: ShardSpec, is_matrix: Callable[[str], bool]) -> tuple[int, ...]:
    """Places in a share where matrices, the first by convention, give way to vectors, and these to matrices."""
    edges: list[int] = []
    for part in spec.buffer.ranges(spec.start, spec.end):
        if is_matrix(part.name) != (len(edges) % 2 == 0):
            edges.append(part.place - spec.start)
    return tuple(edges)


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
