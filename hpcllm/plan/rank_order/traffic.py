"""Count the bytes of one step, by the axis over which they travel, as the codecs leave them.

    over dp            each (stage, tp): gradients summed, weights gathered where the optimizer is sharded
    over tp            each (dp, stage): activations and their gradients inside split layers
    between stages     each (dp, tp): activations forward, their gradients backward, a tied embedding's gradient

What crosses depends on the homes (nodes, or packages) of a group's ranks: of a collective over k homes at least

    all-gather, reduce-scatter  (k - 1) x size       all-reduce  2 (k - 1) x size       collectives/cost.py, VOLUMES

and of a message all of it, if its ends have different homes. Two-level sums and rings in rank order come down to that;
two-step sums of ranks that share a home send more. Left out: words of control, the loss, sums of a few norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.names import parse_name
from hpcllm.collectives.assumed_rates import NEAR_GB_S
from hpcllm.config.policies import FEEDBACK, TRAFFIC, is_exact
from hpcllm.config.schema import Config, traffic_codecs
from hpcllm.model.shapes import StageSpan, split_sizes
from hpcllm.pipeline.actions import Placement
from hpcllm.plan.memory.predict import ITEM_BYTES
from hpcllm.plan.resolve import layer_spans, recompute_levels

Bytes = NDArray[np.float64]
Homes = NDArray[np.int64]  # (dp, pp, tp): node, or package, of the rank with these coordinates
PINNED_GB_S = 25.0  # a device and pinned memory of its host, over PCIe 4 x16 or Infinity Fabric: assumed
ALLREDUCE = 2  # in units of (k - 1) x size; an all-gather and a reduce-scatter are 1
# over tp, in the same units of a microbatch's hidden states (model/linear.py): plain, sequence parallel
BLOCK, BLOCK_FORWARD, HEAD, EMBEDDING = (8, 10), (4, 4), (2, 3), (2, 2)


@dataclass(frozen=True)
class Traffic:
    """Bytes a step: of a collective, for each home of its ranks but one; of messages, all of them."""

    over_dp: dict[str, Bytes]  # kind -> (pp, tp)
    over_tp: dict[str, Bytes]  # kind -> (pp,)
    between_stages: dict[str, Bytes]  # kind -> (pp, pp): from, to; of one (dp, tp)

    def crossing(self, homes: Homes) -> dict[str, float]:
        """Return kind of traffic -> bytes a step of the whole job that leave a home."""
        of_dp, of_tp = _distinct(homes, 0) - 1, _distinct(homes, 2) - 1
        apart = (homes[:, :, None] != homes[:, None]).sum((0, 3))  # (pp, pp)
        crossing = dict.fromkeys(TRAFFIC, 0.0)
        for volumes, count in ((self.over_dp, of_dp), (self.over_tp, of_tp.sum(0)), (self.between_stages, apart)):
            for kind, sizes in volumes.items():
                crossing[kind] += float((sizes * count).sum())
        return crossing


def staged_s(config: Config, placement: Placement) -> float:
    """Return the seconds a step of the messages of a rank, on average, where each lies in pinned host memory.

    config, placement: as of step_traffic. All ranks share a node: to the host, to another process, to its device. By
    assumed rates, and none of it hidden behind the computation. Raises MeshError.
    """
    shape = config.mesh.dp, placement.ranks, config.mesh.tp
    ranks = math.prod(shape)
    sent = sum(step_traffic(config, placement).crossing(np.arange(ranks).reshape(shape)).values()) / ranks
    return sent * (2 / PINNED_GB_S + 1 / NEAR_GB_S) / 1e9


def staged_text(seconds: float) -> str:
    """Return for people what staged_s says."""
    return f"the devices of this node exchange all messages through the host, about {seconds:.2g} s of each step"


def _distinct(homes: Homes, axis: int) -> Homes:
    """Count the different homes along an axis."""
    ordered = np.sort(homes, axis)
    count: Homes = 1 + (np.diff(ordered, axis=axis) != 0).sum(axis)
    return count


def step_traffic(config: Config, placement: Placement) -> Traffic:
    """Count one optimizer step. config: of a ResolvedRun, dp and vocabulary filled in. Raises MeshError."""
    spans = layer_spans(config, placement)
    stages = [
        [spans[placement.stage(rank, chunk)] for chunk in range(placement.chunks)] for rank in range(placement.ranks)
    ]
    tp = config.mesh.tp
    adapter = config.finetuning.adapter
    sizes = [[split_sizes(config.model, mine, tp, tp_rank, adapter) for tp_rank in range(tp)] for mine in stages]
    return Traffic(
        over_dp={
            "gradients": np.array([[_gradients(config, each) for each in of_tp] for of_tp in sizes]),
            "parameters": np.array([[_parameters(config, each) for each in of_tp] for of_tp in sizes]),
        },
        over_tp={"tensor": _tensor(config, placement, spans)},
        between_stages=_messages(config, placement) | {"gradients": _tied(config, placement)},
    )


def _gradients(config: Config, sizes: dict[str, int]) -> float:
    """Return the bytes of gradients; a replica that keeps its share only sends what each microbatch adds."""
    size = sum(count * _gradient_bytes(config, name) for name, count in sizes.items())
    match config.optimizer.shard:
        case "none":
            return ALLREDUCE * size
        case "states":
            return size
    return size * config.pipeline.microbatches


def _gradient_bytes(config: Config, parameter: str) -> float:
    """Return the bytes of one gradient on the wire."""
    codec = traffic_codecs(config.communication)["gradients"].removesuffix(FEEDBACK)
    exact = is_exact(parameter, config.communication.exact)
    return parse_name("raw" if exact else codec).bits(32) / 8


def _parameters(config: Config, sizes: dict[str, int]) -> float:
    """Return the bytes of gathered weights: once a step; all sharded: by block in each pass (optim/weights.py)."""
    shard, whole = config.optimizer.shard, sum(sizes.values())
    if shard == "none":
        return 0.0
    if shard == "all":
        blocks = {name.split(".")[1] for name in sizes if name.startswith("blocks.")}
        in_blocks = sum(count for name, count in sizes.items() if name.startswith("blocks."))
        # the last block stays at the turn from forward to backward, the first one from there to the next microbatch
        more = (len(blocks) - 1) * (2 * config.pipeline.microbatches - 1) / max(1, len(blocks))
        return (whole + in_blocks * more) * _value_bytes(config, "parameters")
    return whole * _value_bytes(config, "parameters")


def _value_bytes(config: Config, kind: str) -> float:
    """Return the bytes of one value in the type of compute, on the wire."""
    codec = parse_name(traffic_codecs(config.communication)[kind])
    return codec.bits(8 * ITEM_BYTES[config.precision.compute]) / 8


def _hidden(config: Config) -> int:
    """Return the values of a microbatch's hidden states, the whole sequence."""
    samples = config.data.global_batch // config.mesh.dp // config.pipeline.microbatches
    return samples * config.data.sequence_length * config.model.hidden


def _messages(config: Config, placement: Placement) -> dict[str, Bytes]:
    """Count messages from virtual stage to virtual stage; between two of one rank there is none."""
    values = _hidden(config) * config.pipeline.microbatches
    if config.mesh.sequence_parallel:
        values //= config.mesh.tp
    forward, backward = np.zeros((2, placement.ranks, placement.ranks))
    for stage in range(placement.stages - 1):
        here, there = placement.home(stage)[0], placement.home(stage + 1)[0]
        if here != there:
            forward[here, there] += values * _value_bytes(config, "forward")
            backward[there, here] += values * _value_bytes(config, "backward")
    return {"forward": forward, "backward": backward}


def _tied(config: Config, placement: Placement) -> Bytes:
    """Count the sum over first and last stage of a tied embedding's gradient, or of their shares of it."""
    between = np.zeros((placement.ranks, placement.ranks))
    last = placement.home(placement.stages - 1)[0]
    if config.model.tied and last != 0 and not config.finetuning.adapter.rank:
        values = config.model.vocabulary * config.model.hidden / config.mesh.tp
        share = 1 if config.optimizer.shard == "none" else config.mesh.dp
        between[0, last] = between[last, 0] = values / share * _gradient_bytes(config, "embedding.weight")
    return between


def _tensor(config: Config, placement: Placement, spans: list[StageSpan]) -> Bytes:
    """Count the collectives over tp of each stage's blocks, embedding and head."""
    way = int(config.mesh.sequence_parallel)
    recomputes = [level == "full" for level in recompute_levels(config, placement)]
    exchanges = np.zeros(placement.ranks)
    for stage, span in enumerate(spans):
        blocks = (span.last_block - span.first_block) * (BLOCK[way] + recomputes[stage] * BLOCK_FORWARD[way])
        exchanges[placement.home(stage)[0]] += blocks + span.has_head * HEAD[way] + span.has_embedding * EMBEDDING[way]
    size = _hidden(config) * _value_bytes(config, "tensor") * config.pipeline.microbatches
    return exchanges * (size if config.mesh.tp > 1 else 0)
