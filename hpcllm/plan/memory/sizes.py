"""Sizes of the tensors of one microbatch on one rank, in bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hpcllm.config import ModelConfig

Level = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What decides the sizes of a microbatch's tensors on one rank."""

    model: ModelConfig
    samples: int  # of a microbatch
    sequence: int
    vocabulary: int  # rows of the tables on this rank
    tp: int = 1
    sequence_parallel: bool = False
    item_bytes: int = 4  # of weights and activations
    level: Level = "none"
    split: bool = False  # the backward pass comes in two halves
    loss_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence

    @property
    def parts(self) -> int:
        return self.tp if self.sequence_parallel else 1

    @property
    def remakes(self) -> bool:
        """Whether what is cheap to make is made again in the backward pass."""
        return self.level == "selective"

    @property
    def joint(self) -> bool:
        """Whether the linear layers that read one tensor are one operation."""
        return self.tp > 1 or self.remakes

    @property
    def residual(self) -> int:
        """A tensor of the residual stream, this rank's part of the sequence."""
        return self.channels(self.model.hidden) // self.parts

    @property
    def whole(self) -> int:
        """The same, gathered; 0 where that is no tensor of its own."""
        return self.channels(self.model.hidden) if self.parts > 1 else 0

    @property
    def queries(self) -> int:
        return self.channels(self.model.heads * self.model.head_dim) // self.tp

    @property
    def keys(self) -> int:
        return self.channels(self.model.key_value_heads * self.model.head_dim) // self.tp

    @property
    def ffn(self) -> int:
        return self.channels(self.model.ffn) // self.tp

    @property
    def log_sums(self) -> int:
        """What attention keeps of its scores: a float32 for each query."""
        return 4 * self.tokens * self.model.heads // self.tp

    def with_split(self, split: bool) -> Sizes:
        return replace(self, split=split)

    def channels(self, channels: int) -> int:
        return self.tokens * channels * self.item_bytes

    def as_float32(self, size: int) -> int:
        return size * 4 // self.item_bytes

    def weights(self, *outputs: int) -> int:
        """Of layers that read the residual stream, or write it."""
        return sum(outputs) * self.model.hidden * self.item_bytes

    @property
    def keeps_input(self) -> bool:
        """Whether the input of a norm stays; in 16 bit an RMSNorm keeps a float32 copy in its place."""
        return self.remakes or self.level == "full" or self.item_bytes == 4 or self.model.norm == "layernorm"
