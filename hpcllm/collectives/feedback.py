"""Error feedback: the error that a lossy codec made in one sum is corrected in the next.

    step t     x - residual  --encode--> bytes --> everybody         new residual = decoded - (x - residual)
                    ^                      |                                    |
                    `----------------------+------------------------------------'   kept to step t + 1

    sum over steps of the results = sum over steps and ranks of x + sum over ranks of the last residual

so the error of what has been added up over all steps does not grow with their number: it is at most that of one
encoding a rank. Both encodings of a two-step sum are fed back, in one array of n values: a rank encodes addends of the
others' chunks and sums of its own, so each value is encoded once in a step, and its place says which residual is its.
A reduce-scatter has the first encoding alone: a rank has no residual for the chunk that is its own.

Values that are not finite are passed on as such, and the residual of their blocks is zero afterwards. Zero is always
valid: a run that goes on without the residual of the last step, or with other ranks, loses what one step is worth.
Source: Seide et al. 2014, "1-bit stochastic gradient descent", section 3; both encodings: Tang et al. 2019,
"DoubleSqueeze", arXiv:1905.05957, algorithm 1.
"""

from __future__ import annotations

import numpy as np
import torch

from hpcllm.codecs.blocks import Doubles
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives import allreduce, reduce_scatter
from hpcllm.collectives.group import Group
from hpcllm.collectives.node import slices


class ErrorFeedback:
    """A lossy codec of float32 that remembers, for one operation on one array, always the same n values, of one group.

    lane: the values that this rank encodes. Between two sums residual (lane's values,) float32 may be read, written and
    zeroed, and codec replaced by the same with another key.
    """

    lossless = False

    def __init__(
        self, n: int, group: Group, codec: Codec, operation: str = "allreduce", device: torch.device | str = "cpu"
    ) -> None:
        """operation: allreduce or reduce_scatter. device: where the arrays are, and the codec works.

        Raises ValueError where there is nothing to feed back.
        """
        if codec.lossless or codec.dtype != torch.float32:
            raise ValueError(f"error feedback is for lossy codecs of float32, not for {codec.name} of {codec.dtype}")
        self.n, self.group, self.codec = n, group, codec
        self.name, self.dtype = f"{codec.name}+ef", codec.dtype
        self.block, self.fixed_rate = codec.block, codec.fixed_rate
        by_node = operation == "allreduce" and group.nodes > 1  # a single node's two_level encodes nothing
        self.algorithm = "two_level" if by_node else "two_step"
        cuts = slices(n, group.lanes, group.node.size) if by_node else np.array([0, n])
        place = group.node.rank if by_node else 0
        self.lane = slice(int(cuts[place]), int(cuts[place + 1]))
        self.residual = torch.zeros(self.lane.stop - self.lane.start, device=device)

    def allreduce(self, x: torch.Tensor) -> None:
        """Sum x, n values of float32, over the group in place; the same bits on every rank. Collective over group.

        Raises ValueError for another array, StallError, CodecError.
        """
        self._check(x)
        allreduce(x, self.group, self, self.algorithm)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Sum x, n values of float32, and write this rank's chunk of the sum to out. Collective over group.

        Only what others sum is encoded, and fed back. Raises as `allreduce`.
        """
        self._check(x)
        reduce_scatter(x, self.group, self, self.algorithm, out)

    def _check(self, x: torch.Tensor) -> None:
        if x.numel() != self.n:
            raise ValueError(f"error feedback of {self.n} values, but the array has {x.numel()}")

    def encoded_bytes(self, n: int) -> int:
        return self.codec.encoded_bytes(n)

    def used_bytes(self, data: torch.Tensor, n: int) -> int:
        return self.codec.used_bytes(data, n)

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:
        n = values.numel()
        if not n:
            return self.codec.encode(values, out, index)
        residual = self.residual[index % self.residual.numel() :][:n]  # index counts the values of all ranks in turn
        wanted = torch.sub(values, residual, out=residual)
        data = self.codec.encode(wanted, out, index)
        self.codec.decode_add(data, wanted.neg_())  # the new residual
        residual.nan_to_num_(0.0, 0.0, 0.0)
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.codec.decode(data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.codec.decode_add(data, out)

    def bound(self, values: Doubles) -> Doubles:
        """Largest error of values from which the residual has been subtracted."""
        return self.codec.bound(values)
