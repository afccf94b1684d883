"""Sizes of the tensors of one microbatch on one rank, a ledger of bytes that come and go, and what a rank holds. Pure.

take 4   take 2   drop 4   take 3          Use(peak=6, net=5)
....     ......   ..       .....
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcllm.config.schema import ModelConfig
from hpcllm.plan.layouts import Layout
from hpcllm.plan.models import Model


@dataclass(frozen=True)
class Use:
    """Change of the memory in use by a stretch of work, counted from where it starts."""

    peak: int
    net: int


@dataclass
class Ledger:
    """Bytes in use, and the most that there were."""

    now: int = 0
    peak: int = 0

    def take(self, *sizes: int) -> None:
        """Add tensors, sizes in bytes; the last is taken while all others are still there."""
        self.now += sum(sizes)
        self.peak = max(self.peak, self.now)

    def drop(self, *sizes: int) -> None:
        self.now -= sum(sizes)

    def use(self) -> Use:
        return Use(self.peak, self.now)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, by what they are for."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float  # at their peak in a step
    buffers: float
    checkpoint: float = 0
    offloaded: float = 0  # states and activations in host memory, which the device has no more than a window of
    by_turns: float = 0  # part of activations: kept for several microbatches, which come and go by turns (megatron.py)

    @property
    def states(self) -> float:
        """Bytes that stay from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.on_device + self.in_host

    @property
    def on_device(self) -> float:
        """Bytes where the rank computes."""
        return self.states + self.activations + self.buffers

    @property
    def in_host(self) -> float:
        """Bytes in the host's memory, beside a device."""
        return self.checkpoint + self.offloaded


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shape, layout and choices that decide the sizes of a microbatch's tensors on one rank."""

    model: ModelConfig
    samples: int  # samples of a microbatch
    sequence: int
    vocabulary: int  # rows of the tables on this rank
    tp: int = 1
    sequence_parallel: bool = False
    item_bytes: int = 4  # bytes of a weight or an activation
    level: str = "none"  # level of recomputation
    split: bool = False  # the backward pass comes in two halves
    loss_tokens: int = 0
    frozen: bool = False  # weights get no gradient, but for adapters, whose are small

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence

    @property
    def parts(self) -> int:
        """Number of parts of the sequence on the residual stream."""
        return self.tp if self.sequence_parallel else 1

    @property
    def recomputes(self) -> bool:
        """True if cheap tensors are recomputed in the backward pass."""
        return self.level == "selective"

    @property
    def residual(self) -> int:
        """Bytes of a tensor of the residual stream, this rank's part of the sequence."""
        return self.channels(self.model.hidden) // self.parts

    @property
    def gathered(self) -> int:
        """Bytes of a tensor of the residual stream, gathered over tp; 0 where that is no tensor of its own."""
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
        """Bytes that attention keeps of its scores: a float32 for each query."""
        return 4 * self.tokens * self.model.heads // self.tp

    @property
    def scores(self) -> int:
        """Number of attention scores of this rank."""
        return self.samples * self.model.heads * self.sequence * self.sequence // self.tp

    def channels(self, channels: int) -> int:
        """Return the bytes of a tensor of so many channels a token."""
        return self.tokens * channels * self.item_bytes

    def as_float32(self, size: int) -> int:
        """Return the bytes of a tensor of this size once its values are float32."""
        return size * 4 // self.item_bytes

    def weights(self, *outputs: int) -> int:
        """Return the bytes of the weight gradients of layers that read the residual stream, or write it."""
        return 0 if self.frozen else sum(outputs) * self.model.hidden * self.item_bytes


def layout_sizes(model: Model, layout: Layout) -> Sizes:
    """Return the sizes on the rank over tp that has most rows of the vocabulary."""
    return Sizes(
        model=model.shape,
        samples=layout.micro_batch,
        sequence=model.sequence,
        vocabulary=-(-model.shape.vocabulary // layout.tp),
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        item_bytes=layout.item_bytes,
        level=layout.recompute,
    )
