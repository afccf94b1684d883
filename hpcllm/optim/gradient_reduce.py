"""The sum of one flat buffer of gradients: over which ranks, by which codec, exactly in the first steps.

    allreduce        replicas (dp) -- codec, algorithm --> sum ; then over the others in turn
    reduce_scatter   replicas --> this rank's share of the sum ; then that share is allreduced over the others
    gather           replicas --> all shares of the sum, behind the next forward pass where sums are late
    others           tp, for parameters of which each tp rank saw a part of the sequence; both ends of the pipeline, for
                     a tied embedding

A codec with error feedback keeps its residual for the next sum, on each rank; checkpoints keep it too
(checkpoint/state.py). Stochastic rounding is keyed by seed, buffer, step, sum and rank, so a step's bits repeat.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpcllm.codecs import Codec, find_codec
from hpcllm.codecs.names import parse_name
from hpcllm.collectives import Group, allgather, allreduce, reduce_scatter
from hpcllm.collectives.feedback import ErrorFeedback
from hpcllm.config.policies import FEEDBACK


@dataclass(frozen=True)
class ReduceStep:
    """Time of a sum, which decides its random numbers and whether it is exact."""

    step: int
    exact: bool
    part: int = 0  # number of the sum among the step's sums of one buffer


EXACT_STEP = ReduceStep(0, exact=True)


@dataclass
class GradientReduce:
    """Sums one flat buffer over its groups."""

    replicas: Group
    others: tuple[Group, ...]
    codec_name: str  # as in the run file
    algorithm: str
    key: tuple[int, ...]  # seed and buffer; what makes its random numbers its own
    device: torch.device  # where the buffer is
    _feedbacks: dict[int, ErrorFeedback] = field(default_factory=dict)  # by the id of a group

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self.replicas, *self.others)

    @property
    def is_alone(self) -> bool:
        """True if this rank has nobody to sum with."""
        return all(group.size == 1 for group in self.groups)

    def allreduce(self, x: torch.Tensor, groups: tuple[Group, ...], step: ReduceStep) -> None:
        """Sum x (n,) float32 over each of `groups` in turn, in place; the same bits on all of their ranks.

        groups: all of them, or `others` for what reduce_scatter has summed. Collective over them.
        """
        for group in groups:
            if group.size > 1:
                codec = self._codec(group, x, step)
                if isinstance(codec, ErrorFeedback):
                    codec.allreduce(x)
                else:
                    allreduce(x, group, codec, self.algorithm)

    def reduce_scatter(self, x: torch.Tensor, share: torch.Tensor, step: ReduceStep) -> None:
        """x (n,) float32 -> share: this replica's chunk_range of the sum over replicas. Collective over them.

        share may be that chunk of x: what the sum is made of is read for the last time where it is written.
        """
        if self.replicas.size == 1:
            share.copy_(x)
            return
        codec = self._codec(self.replicas, x, step, "reduce_scatter")
        if isinstance(codec, ErrorFeedback):
            codec.reduce_scatter(x, share)
        else:
            reduce_scatter(x, self.replicas, codec, self.algorithm, share)

    def gather(self, x: torch.Tensor, share: torch.Tensor, step: ReduceStep) -> None:
        """x (n,) float32 <- each replica's share, through the codec the owner's too. Collective over replicas.

        share: this replica's, in its place of x. Its random numbers are those of a part of its own. As it is it goes
        by a ring: the library's all-gather would only move on when it is polled, and is not counted.
        """
        codec = self._codec(self.replicas, share, dataclasses.replace(step, part=1))
        allgather(share, self.replicas, codec, "ring" if codec == "raw" else "auto", out=x)

    def residuals(self, n: int, share: int | None) -> dict[str, torch.Tensor]:
        """Residuals of error feedback between two steps, by what each belongs to; none without feedback.

        n: values of the buffer. share: this replica's, where each gets its own; None: they get the whole sum.
        """
        if not self.codec_name.endswith(FEEDBACK):
            return {}
        codec = find_codec(self.codec_name.removesuffix(FEEDBACK), device=self.device.type)
        sums = [(self.replicas, n, "allreduce" if share is None else "reduce_scatter")]
        sums += [(group, n if share is None else share, "allreduce") for group in self.others]
        found = {}
        for number, (group, values, operation) in enumerate(sums):
            if values and group.size > 1:
                feedback = self._feedback(group, values, codec, operation)
                place = f"rank {group.rank} of {group.size} on {group.nodes} nodes, values {feedback.lane} of {values}"
                found[f"sum {number}, {operation} {feedback.algorithm}, {self.codec_name}, {place}"] = feedback.residual
        return found

    def _codec(self, group: Group, x: torch.Tensor, step: ReduceStep, operation: str = "allreduce") -> str | Codec:
        """A name, a codec with this step's random numbers, or one with feedback, for x over the group."""
        n = x.numel()
        name = "raw" if step.exact else self.codec_name.removesuffix(FEEDBACK)
        if name == "raw" or not n:
            return "raw"
        codec = find_codec(name, device=self.device.type)
        if parse_name(name).stochastic:
            words = (*self.key, step.step, group.rank, *([step.part] if step.part else []))
            digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
            codec = dataclasses.replace(codec, key=int.from_bytes(digest, "big"))  # type: ignore[type-var]
        if not self.codec_name.endswith(FEEDBACK):
            return codec
        feedback = self._feedback(group, n, codec, operation)
        feedback.codec = codec
        return feedback

    def _feedback(self, group: Group, n: int, codec: Codec, operation: str) -> ErrorFeedback:
        if id(group) not in self._feedbacks:
            self._feedbacks[id(group)] = ErrorFeedback(n, group, codec, operation, self.device)
        return self._feedbacks[id(group)]


def squares(arrays: Sequence[Tensor], like: Tensor) -> Tensor:
    """Sum of all squares, () float64 on the device of `like`, where the arrays are: a few kernels, and no wait."""
    values = [x for x in arrays if x.numel()]
    return add_squares(torch._foreach_norm(values) if values else [], like)


def add_squares(norms: Sequence[Tensor], like: Tensor) -> Tensor:
    """Sum of the squares of norms, each () on the device of `like`; () float64."""
    if not norms:
        return like.new_zeros((), dtype=torch.float64)
    return torch.stack(list(norms)).double().square().sum()
