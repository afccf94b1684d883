"""How one array of gradients is summed: over which ranks, by which codec, exactly in the first steps.

    all on all       replicas (dp) -- codec, algorithm --> sum ; then over the others in turn
    each its share   replicas -- reduce-scatter --> own stretch of the sum ; then that stretch over the others
    others           tp, for what each of its ranks saw a part of the sequence for; both ends of the pipeline, for a
                     tied embedding

A codec with error feedback keeps what it owes for the next sum, on each rank; checkpoints keep that too
(checkpoint/surplus.py). Stochastic rounding is keyed by seed, array, step, sum and rank, so a step's bits repeat.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field

import torch

from hpcllm.codecs import Codec, find_codec
from hpcllm.codecs.names import parse_name
from hpcllm.collectives import Group, allreduce, reduce_scatter
from hpcllm.collectives.feedback import ErrorFeedback
from hpcllm.policy import FEEDBACK


@dataclass(frozen=True)
class Moment:
    """When a sum is made, which decides its random numbers and whether it is exact."""

    step: int
    exact: bool
    part: int = 0  # of the step's sum of one array


EXACTLY = Moment(0, exact=True)


@dataclass
class Summation:
    """Sums one array over its groups."""

    replicas: Group
    others: tuple[Group, ...]
    codec_name: str  # as in the run file
    algorithm: str
    key: tuple[int, ...]  # seed and array; what makes its random numbers its own
    device: torch.device  # of the array
    _surplus: dict[int, ErrorFeedback] = field(default_factory=dict)  # of each group, by its id

    @property
    def is_alone(self) -> bool:
        """Whether this rank has nobody to sum with."""
        return all(group.size == 1 for group in (self.replicas, *self.others))

    def everywhere(self, x: torch.Tensor, moment: Moment) -> None:
        """Sum x (n,) float32 over all groups in place; the same bits on all of their ranks. Collective over them."""
        self._allreduce(x, self.replicas, moment)
        self.over_others(x, moment)

    def shared_out(self, x: torch.Tensor, share: torch.Tensor, moment: Moment) -> None:
        """x (n,) float32 -> share: this replica's chunk_range of the sum over replicas. Collective over them."""
        if self.replicas.size == 1:
            share.copy_(x)
            return
        codec = self._codec(self.replicas, x, moment, "reduce_scatter")
        if isinstance(codec, ErrorFeedback):
            codec.reduce_scatter(x, share)
        else:
            reduce_scatter(x, self.replicas, codec, self.algorithm, share)

    def over_others(self, x: torch.Tensor, moment: Moment) -> None:
        """Sum what the replicas have summed, x or a share of it, in place. Collective over the other groups."""
        for group in self.others:
            self._allreduce(x, group, moment)

    def owed(self, n: int, share: int | None) -> dict[str, torch.Tensor]:
        """What error feedback owes between two steps, by what it belongs to; nothing without feedback.

        n: values of the array. share: this replica's, where each gets its own; None: they get the whole sum.
        """
        if not self.codec_name.endswith(FEEDBACK):
            return {}
        codec = find_codec(self.codec_name.removesuffix(FEEDBACK), device=self.device.type)
        sums = [(self.replicas, n, "allreduce" if share is None else "reduce_scatter")]
        sums += [(group, n if share is None else share, "allreduce") for group in self.others]
        owed = {}
        for number, (group, values, operation) in enumerate(sums):
            if values and group.size > 1:
                feedback = self._feedback(group, values, codec, operation)
                place = f"rank {group.rank} of {group.size} on {group.nodes} nodes, values {feedback.lane} of {values}"
                owed[f"sum {number}, {operation} {feedback.algorithm}, {self.codec_name}, {place}"] = feedback.surplus
        return owed

    def _allreduce(self, x: torch.Tensor, group: Group, moment: Moment) -> None:
        if group.size == 1:
            return
        codec = self._codec(group, x, moment)
        if isinstance(codec, ErrorFeedback):
            codec.allreduce(x)
        else:
            allreduce(x, group, codec, self.algorithm)

    def _codec(self, group: Group, x: torch.Tensor, moment: Moment, operation: str = "allreduce") -> str | Codec:
        """For x over the group: a name, a codec with this moment's random numbers, or one with feedback."""
        n = x.numel()
        name = "raw" if moment.exact else self.codec_name.removesuffix(FEEDBACK)
        if name == "raw" or not n:
            return "raw"
        codec = find_codec(name, device=self.device.type)
        if parse_name(name).stochastic:
            words = (*self.key, moment.step, group.rank, *([moment.part] if moment.part else []))
            digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
            codec = dataclasses.replace(codec, key=int.from_bytes(digest, "big"))  # type: ignore[type-var]
        if not self.codec_name.endswith(FEEDBACK):
            return codec
        feedback = self._feedback(group, n, codec, operation)
        feedback.codec = codec
        return feedback

    def _feedback(self, group: Group, n: int, codec: Codec, operation: str) -> ErrorFeedback:
        if id(group) not in self._surplus:
            self._surplus[id(group)] = ErrorFeedback(n, group, codec, operation, self.device)
        return self._surplus[id(group)]
