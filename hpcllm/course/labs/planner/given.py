"""Records that the functions of this lab take: a model, a layout, a machine. Pure.

devices = dp x tp x pp     batch = dp x microbatches x micro_batch     ranks in order: tp as neighbours, dp, pp
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A decoder without biases. No weight is used twice: embedding and output layer have a table each."""

    layers: int
    hidden: int
    heads: int  # of hidden / heads channels each
    ffn: int  # channels inside the feed-forward network
    vocabulary: int
    sequence: int  # tokens of a sample
    gated: bool = False  # the feed-forward network has three matrices, not two


@dataclass(frozen=True)
class Layout:
    """A way to spread a step over devices. The schedule is 1F1B."""

    dp: int = 1  # replicas of the model
    tp: int = 1  # devices that share each layer
    pp: int = 1  # stages of the pipeline
    micro_batch: int = 1  # samples of a microbatch
    recompute: bool = False  # each layer keeps its input alone, and does its forward pass once more
    shard: bool = False  # optimizer states are spread over dp


@dataclass(frozen=True)
class Machine:
    """Devices in nodes. Rates are those of one device."""

    peak_flops_per_s: float
    efficiency: float  # share of the peak that training sustains
    memory_bytes: float
    node: int  # devices of a node
    latency_s: float  # of a message, before its first byte
    near_bytes_per_s: float  # inside a node
    far_bits_per_s: float  # between nodes
