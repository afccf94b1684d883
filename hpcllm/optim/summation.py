"""How one bucket of gradients is summed: over which ranks, by which codec, exactly in the first steps.

    replicas (dp)  -- codec, algorithm -->  sum  -- ends of the pipeline, a tied embedding only -->  sum

A codec with error feedback keeps what it owes for the next step, on each rank; a run that goes on from a checkpoint
begins owing nothing. Stochastic rounding is keyed by seed, step, bucket and rank, so a step's bits repeat.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field

import torch

from hpcllm.codecs import Codec, find_codec
from hpcllm.codecs.names import parse_name
from hpcllm.collectives import Group, allreduce
from hpcllm.collectives.feedback import ErrorFeedback
from hpcllm.policy import FEEDBACK


@dataclass
class Summation:
    """Sums one bucket over its groups, one after another."""

    groups: tuple[Group, ...]
    codec_name: str  # as in the run file
    algorithm: str
    key: tuple[int, ...]  # seed and bucket; what makes its random numbers its own
    _surplus: dict[int, ErrorFeedback] = field(default_factory=dict)  # of each group, by its id

    def run(self, x: torch.Tensor, step: int, exact: bool) -> None:
        """Sum x (n,) float32 over all groups in place; the same bits on all of their ranks. Collective over them."""
        for group in self.groups:
            if exact or self.codec_name == "raw":
                allreduce(x, group, "raw", self.algorithm)
            elif self.codec_name.endswith(FEEDBACK):
                feedback = self._feedback(group, x.numel())
                feedback.codec = self._codec(step, group.rank)
                feedback.allreduce(x)
            else:
                allreduce(x, group, self._codec(step, group.rank), self.algorithm)

    def _codec(self, step: int, rank: int) -> Codec:
        name = self.codec_name.removesuffix(FEEDBACK)
        codec = find_codec(name)
        if not parse_name(name).stochastic:
            return codec
        digest = hashlib.blake2b(repr((*self.key, step, rank)).encode(), digest_size=8).digest()
        keyed: Codec = dataclasses.replace(codec, key=int.from_bytes(digest, "big"))  # type: ignore[type-var]
        return keyed

    def _feedback(self, group: Group, n: int) -> ErrorFeedback:
        if id(group) not in self._surplus:
            self._surplus[id(group)] = ErrorFeedback(n, group, find_codec(self.codec_name.removesuffix(FEEDBACK)))
        return self._surplus[id(group)]
