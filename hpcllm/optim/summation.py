"""How one bucket of gradients is summed: over which ranks, by which codec, exactly in the first steps.

    replicas (dp)  -- codec, algorithm -->  sum  -- ends of the pipeline, a tied embedding only -->  sum

A codec with error feedback keeps what it lost for the next step, on each rank; a run that goes on from a checkpoint
begins with nothing lost. Stochastic rounding is keyed by seed, step, bucket and rank, so a step's bits repeat.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field

import torch

from hpcllm.codecs import Codec, find_codec
from hpcllm.codecs.names import parse_name
from hpcllm.collectives import Group, allreduce
from hpcllm.policy import FEEDBACK


@dataclass
class Summation:
    """Sums one bucket over its groups, one after another."""

    groups: tuple[Group, ...]
    codec_name: str  # as in the run file
    algorithm: str
    key: tuple[int, ...]  # seed and bucket; what makes its random numbers its own
    _lost: dict[int, ErrorFeedback] = field(default_factory=dict)

    def run(self, x: torch.Tensor, step: int, exact: bool) -> None:
        """Sum x (n,) float32 over all groups in place; the same bits on all of their ranks. Collective over them."""
        for number, group in enumerate(self.groups):
            if exact or self.codec_name == "raw":
                allreduce(x, group, "raw", self.algorithm)
            elif self.codec_name.endswith(FEEDBACK):
                self._feedback(number, x.numel()).allreduce(x)
            else:
                allreduce(x, group, self._codec(step, group.rank), self.algorithm)

    def _codec(self, step: int, rank: int) -> Codec | str:
        if not parse_name(self.codec_name).stochastic:
            return self.codec_name
        digest = hashlib.blake2b(repr((*self.key, step, rank)).encode(), digest_size=8).digest()
        codec = find_codec(self.codec_name)
        keyed: Codec = dataclasses.replace(codec, key=int.from_bytes(digest))  # type: ignore[type-var, call-arg]
        return keyed

    def _feedback(self, number: int, n: int) -> ErrorFeedback:
        from hpcllm.collectives.feedback import ErrorFeedback
        if number not in self._lost:
            codec = find_codec(self.codec_name.removesuffix(FEEDBACK))
            self._lost[number] = ErrorFeedback(n, self.groups[number], codec)
        return self._lost[number]
