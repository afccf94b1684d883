"""Predict what each rank of a run of our trainer holds, in bytes, before it is started; or bound it from below.

    parameters    weights in the type of compute         n b       n elements a rank, of b bytes; with adapters n is
                                                                   theirs, and the frozen weights come on top
    gradients     sums in float32                        4 n
    optimizer     two moments, masters where kept        8 n + 4 n
    activations   the most that a step has at once       once through the actions of the schedule
    buffers       gradients on their way to their owner, weights gathered for a while, the residual of error feedback
    texts         of a run that learns from rewards: keys and values while it generates, in place of activations, and
                  the reference, a copy of what is trained
    checkpoint    the copy that a thread writes while training goes on: a replica's share of all that is kept
    offloaded     what waits in host memory: the device has landings for the states of three buffers, and a window of
                  the activations beside those of one block

    shard           none    states    states+gradients    all          a replica's share of dp: n / dp
    parameters       n        n              n            n / dp
    gradients        n        n            n / dp         n / dp
    optimizer        n      n / dp         n / dp         n / dp       arXiv:1910.02054 figure 1

    predict         a rank of a run file, through the actions of its schedule
    layout_memory   all ranks of a layout: the same bytes, fast enough for a search. States once for each kind of rank,
                    passes once for each kind of stage, and of the schedule the few points that can be the largest
    lower_bound     the least that some rank of a layout needs, before its schedule is looked at: states of the mean
                    rank; blocks of the emptiest stage x what a block keeps x microbatches that rank 0 holds at once

Tensors only: the interpreter, libraries and MPI take some hundred MB more, and encoded messages are not counted. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from hpcllm.codecs.names import parse_name
from hpcllm.config.policies import FEEDBACK, is_exact
from hpcllm.config.schema import GROUP, Config, DataConfig, PipelineConfig, traffic_codecs
from hpcllm.model.shapes import BASE_BITS, StageSpan, is_adapter, parameter_shapes, shard_of, split_dim, split_sizes
from hpcllm.optim.flat_buffers import FlatBuffer, Traits, lay_out
from hpcllm.pipeline.actions import Op
from hpcllm.pipeline.schedules import Schedule
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.backward_pass import backward, second_half
from hpcllm.plan.memory.forward_pass import forward
from hpcllm.plan.memory.peak_points import PassUses, PeakPoint, layout_points, peak, points_of
from hpcllm.plan.memory.sizes import RankMemory, Sizes, Use, layout_sizes
from hpcllm.plan.models import HALVED, Model, fewest_blocks, kind_of, placement_of, spans_like, stage_spans
from hpcllm.plan.resolve import layer_spans, recompute_levels
from hpcllm.plan.run_config import config_of

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ON_THEIR_WAY = 3  # gradient buffers at most, besides those that are being filled: optim/buckets.py
# as optim/host_states.py and pipeline/host_activations.py, which import torch, have them
LANDINGS, SLAB_BYTES, WINDOW_TENSORS = 3, 32 << 20, 4 + 3
BLOCK_TOKENS, MOST_TEXTS = 16, 256  # as model/paged_cache.py and finetuning/rollouts.py have them
N = TypeVar("N", int, float)
SHARDS = ("none", "states", "states+gradients", "all")  # each shares what the one before does, and more


def predict(config: Config, schedule: Schedule, pp_rank: int, tp_rank: int = 0) -> RankMemory:
    """Predict for the ranks at one place of a replica. config: dp and vocabulary filled in."""
    placement = schedule.placement
    spans, levels = layer_spans(config, placement), recompute_levels(config, placement)
    stages = [placement.stage(pp_rank, chunk) for chunk in range(placement.chunks)]
    sizes = [chunk_sizes(config, levels[stage], tp_rank) for stage in stages]
    halves = {action.chunk for action in schedule.actions[pp_rank] if action.op is Op.BACKWARD_INPUT}
    uses = [
        pass_uses(replace(each, split=chunk in halves), spans[stage])
        for chunk, (each, stage) in enumerate(zip(sizes, stages, strict=True))
    ]
    points = points_of(schedule, pp_rank)
    rest = between_passes(config, tuple(spans[stage] for stage in stages), tp_rank)
    if config.pipeline.offload:
        rest = replace(rest, offloaded=rest.offloaded + _waiting_bytes(points, uses))
        uses = [
            _offloaded(use, replace(each, split=chunk in halves), spans[stage])
            for chunk, (use, each, stage) in enumerate(zip(uses, sizes, stages, strict=True))
        ]
    activations = target_bytes(config) + peak(points, uses, sizes[0].residual) + _whole_again_bytes(config)
    if config.finetuning.kind == "grpo":
        layers = sum(spans[stage].last_block - spans[stage].first_block for stage in stages)
        activations = max(activations, target_bytes(config) + _cache_bytes(config, layers))
        rest = replace(rest, parameters=rest.parameters + _reference_bytes(config, [spans[s] for s in stages], tp_rank))
    return replace(rest, activations=activations)


def _cache_bytes(config: Config, layers: int) -> int:
    """Return the bytes of the keys and values of texts, which are gone when the passes of a step begin."""
    model, mesh = config.model, config.mesh
    texts = min(config.data.global_batch // mesh.dp, MOST_TEXTS)
    longest = min(config.data.sequence_length + 1, model.max_sequence)
    channels = 2 * layers * model.key_value_heads // mesh.tp * model.head_dim
    tokens = BLOCK_TOKENS * math.ceil(longest / BLOCK_TOKENS)
    return texts * tokens * channels * ITEM_BYTES[config.precision.compute]


def _reference_bytes(config: Config, spans: Sequence[StageSpan], tp_rank: int) -> int:
    """Return the bytes of the copy of what is trained, as it was when the run began; 0 if no loss asks for it."""
    if not config.finetuning.reward.kl:
        return 0
    sizes = split_sizes(config.model, tuple(spans), config.mesh.tp, tp_rank, config.finetuning.adapter)
    return ITEM_BYTES[config.precision.compute] * sum(sizes.values())


def _shared(config: Config) -> Config:
    """Return the run with all that states depend on alone, the same for many layouts."""
    return replace(config, data=DataConfig(), pipeline=PipelineConfig(schedule=config.pipeline.schedule))


def _waiting_bytes(points: Sequence[PeakPoint], uses: Sequence[PassUses]) -> int:
    """Return the bytes of host memory for what passes keep until their backward pass, in slabs that each takes."""
    slabs = [SLAB_BYTES * math.ceil(use.forward.net / SLAB_BYTES) for use in uses]
    waiting = [PassUses(Use(size, size), Use(0, -size), Use(0, 0)) for size in slabs]
    return peak(points, waiting, 0)


def _offloaded(whole: PassUses, sizes: Sizes, span: StageSpan) -> PassUses:
    """Return what passes use of the device: what one block takes, or a window, and what a second half needs."""
    one = pass_uses(sizes, replace(span, last_block=min(span.last_block, span.first_block + 1)))
    window = max(0, WINDOW_TENSORS * max(sizes.residual, sizes.ffn, sizes.queries) - one.forward.net)
    left = whole.forward.net + whole.backward.net
    backward = one.forward.net + one.backward.peak + window + left
    return PassUses(Use(one.forward.peak + window, 0), Use(backward, left), whole.weights)


def layout_memory(model: Model, layout: Layout, global_batch: int) -> tuple[RankMemory, ...]:
    """Predict for each pipeline rank, the first one over tp. Raises ConfigError for an impossible run."""
    return tuple(_memory(model, layout, global_batch, range(layout.pp)))


def end_ranks_bound(model: Model, layout: Layout, global_batch: int) -> float:
    """Return bytes that the first pipeline rank or the last one needs at least: exact but for messages.

    One of them is the fullest: the first has most microbatches at once, the last the logits of those half gone back.
    """
    ends = _memory(model, layout, global_batch, {0, layout.pp - 1}, with_messages=False)
    return max(rank.on_device for rank in ends)


def _memory(
    model: Model, layout: Layout, global_batch: int, ranks: Collection[int], with_messages: bool = True
) -> Iterator[RankMemory]:
    """Predict for these pipeline ranks."""
    config = config_of(model, layout, global_batch)
    sizes = replace(chunk_sizes(config, layout.recompute), split=layout.schedule in HALVED)
    shared = _shared(config)
    for kinds, different, points in layout_points(model, layout, config.pipeline.microbatches, ranks, with_messages):
        uses = [pass_uses(sizes, span) for kind in different for span in spans_like([kind])]
        activations = target_bytes(config) + peak(points, uses, sizes.residual)
        yield replace(between_passes(shared, spans_like(kinds)), activations=activations)


def lower_bound(model: Model, layout: Layout, global_batch: int) -> float:
    """Return bytes that the fullest rank needs at least.

    Embeddings, buffers, and tensors that passes take for a while are not counted.
    """
    blocks = fewest_blocks(model.shape, layout.pp * layout.chunks, by_cost=layout.trainer == "hpcllm")
    one, further = _kept_by_blocks(layout_sizes(model, layout))
    held = _held_by_first_rank(layout, layout.microbatches(global_batch))
    return states_lower_bound(model, layout) + held * (one + (blocks - 1) * further)


def first_rank_bound(model: Model, layout: Layout, global_batch: int) -> float:
    """Return bytes that the first pipeline rank needs at least: all it keeps, and a pass with all it holds at once.

    Exact but for messages and for which of its chunks hold how much; its schedule is not made.
    """
    config = config_of(model, layout, global_batch)
    spans, placement = stage_spans(model, layout), placement_of(layout)
    mine = [spans[placement.stage(0, chunk)] for chunk in range(placement.chunks)]
    sizes = replace(chunk_sizes(config, layout.recompute), split=layout.schedule in HALVED)
    uses = [pass_uses(sizes, span) for span in mine]
    kept, held = min(use.forward.net for use in uses), _held_by_first_rank(layout, config.pipeline.microbatches)
    # a backward pass comes next; the second half of one may leave less room than what goes back with the first
    at_work = held * kept + (0 if layout.schedule in HALVED else min(use.backward.peak for use in uses))
    shared = _shared(config)
    states = between_passes(shared, spans_like([kind_of(span) for span in mine]))
    return states.on_device + target_bytes(config) + at_work


def states_lower_bound(model: Model, layout: Layout) -> float:
    """Return bytes that the fullest rank keeps from step to step at least: those of the mean rank."""
    n = model.parameters / layout.pp / layout.tp
    return sum(state_bytes(n, n / layout.dp, layout.shard, layout.item_bytes, layout.precision != "fp32"))


@lru_cache(maxsize=1 << 12)
def _kept_by_blocks(sizes: Sizes) -> tuple[int, int]:
    """Return the bytes that a first block keeps of a microbatch, and a block behind it."""
    one, two = (forward(sizes, StageSpan(0, blocks, False, False)).net for blocks in (1, 2))
    return one, two - one


def _held_by_first_rank(layout: Layout, microbatches: int) -> int:
    """Return how many microbatches rank 0 holds at once, summed over its chunks: pipeline/orders.py."""
    filling = min(microbatches, layout.pp)
    match layout.schedule:
        case "gpipe":
            return microbatches
        case "interleaved" if layout.chunks > 1:
            warmup = 2 * (layout.pp - 1) + (layout.chunks - 1) * filling
            return min(layout.chunks * microbatches, warmup + 1)
        case "zb-v":  # before its first microbatch comes back
            return min(microbatches + 1, 2 * layout.pp)
    return filling * layout.chunks


@lru_cache(maxsize=1 << 12)
def between_passes(config: Config, spans: tuple[StageSpan, ...], tp_rank: int = 0) -> RankMemory:
    """Predict all but activations, for ranks that have these parts of the model."""
    sizes = split_sizes(config.model, spans, config.mesh.tp, tp_rank, config.finetuning.adapter)
    n, item_bytes = sum(sizes.values()), ITEM_BYTES[config.precision.compute]
    share = math.ceil(n / config.mesh.dp)
    parameters, gradients, optimizer = state_bytes(n, share, config.optimizer.shard, item_bytes, _keeps_master(config))
    return RankMemory(
        parameters=parameters + _frozen_bytes(config, spans, tp_rank),
        gradients=gradients,
        optimizer=_landing_bytes(config, sizes) if config.optimizer.offload else optimizer,
        offloaded=optimizer if config.optimizer.offload else 0,
        activations=0,
        buffers=_buffers(config, sizes) + _residual(config, sizes),
        checkpoint=_checkpoint(config, sizes, any(span.has_embedding for span in spans), tp_rank),
    )


def _landing_bytes(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the bytes in which optimizer states are updated that rest in host memory."""
    flats = _flats(config, sizes)
    parts = 1 if config.optimizer.shard == "none" else config.mesh.dp
    longest = max(math.ceil(flat.size / parts) for flat in flats)
    return (12 if _keeps_master(config) else 8) * longest * min(LANDINGS, len(flats))


def _frozen_bytes(config: Config, spans: tuple[StageSpan, ...], tp_rank: int) -> int:
    """Return the bytes of the weights that adapters leave as they are; 0 where all weights are trained."""
    adapter, item_bytes = config.finetuning.adapter, ITEM_BYTES[config.precision.compute]
    shapes = {name: shape for span in spans for name, shape in parameter_shapes(config.model, span).items()}
    total = 0
    for name, shape in shapes.items() if adapter.rank else ():
        local = shard_of(name, shape, tp_rank, config.mesh.tp)[1]
        is_linear = name.startswith("blocks.") and len(shape) == 2
        if is_linear and adapter.base in BASE_BITS:
            padded = local[0] * GROUP * math.ceil(local[1] / GROUP)
            total += int(padded * parse_name(f"{adapter.base}:{GROUP}").bits(0) / 8)
        else:
            total += math.prod(local) * (2 if is_linear and adapter.base == "bf16" else item_bytes)
    return total


def _whole_again_bytes(config: Config) -> int:
    """Return the bytes of the largest frozen weight that is made whole for a product; 0 where they are as they compute.

    Each is freed before the next; of joint layers too.
    """
    held, compute = config.finetuning.adapter.base, config.precision.compute
    if held in ("compute", compute):
        return 0
    shapes = parameter_shapes(config.model, StageSpan(0, 1, False, False))
    parts = (shard_of(name, shape, 0, config.mesh.tp)[1] for name, shape in shapes.items() if len(shape) == 2)
    return ITEM_BYTES[compute] * max(rows * GROUP * math.ceil(columns / GROUP) for rows, columns in parts)


def state_bytes(n: N, share: N, shard: str, item_bytes: int, keeps_master: bool) -> tuple[N, N, N]:
    """Return the bytes of weights, gradients and optimizer states of n elements, `share` of them a replica's."""
    level = SHARDS.index(shard)
    return (
        item_bytes * (share if level >= SHARDS.index("all") else n),
        4 * (share if level >= SHARDS.index("states+gradients") else n),
        (12 if keeps_master else 8) * (share if level >= SHARDS.index("states") else n),
    )


def chunk_sizes(config: Config, level: str, tp_rank: int = 0) -> Sizes:
    """Return the sizes of a microbatch's tensors in a chunk. level: of its recomputation."""
    rows = shard_of("embedding.weight", (config.model.vocabulary, 1), tp_rank, config.mesh.tp)[1][0]
    return Sizes(
        model=config.model,
        samples=config.data.global_batch // config.mesh.dp // config.pipeline.microbatches,
        sequence=config.data.sequence_length,
        vocabulary=rows,
        tp=config.mesh.tp,
        sequence_parallel=config.mesh.sequence_parallel,
        item_bytes=ITEM_BYTES[config.precision.compute],
        level=level,
        loss_tokens=config.pipeline.loss_tokens,
        frozen=config.finetuning.adapter.rank > 0,
    )


@lru_cache(maxsize=1 << 12)
def pass_uses(sizes: Sizes, span: StageSpan) -> PassUses:
    """Count the passes of a microbatch through one chunk."""
    return PassUses(forward(sizes, span), backward(sizes, span), second_half(sizes, span))


def target_bytes(config: Config) -> int:
    """Return the bytes of a step's tokens, targets and positions on a rank, as numbers of 64 bits."""
    return 24 * config.data.global_batch // config.mesh.dp * config.data.sequence_length


def _keeps_master(config: Config) -> bool:
    """Return True if AdamW updates other values than the model's weights."""
    is_lossy = not parse_name(traffic_codecs(config.communication)["parameters"]).lossless
    gathered = config.optimizer.shard in ("states", "states+gradients")
    return config.precision.compute != "fp32" or (gathered and is_lossy)


def _buffers(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a sharded optimizer besides its share."""
    shard, dp = config.optimizer.shard, config.mesh.dp
    if shard == "none":
        return 0
    flats = _flats(config, sizes)
    total = 4 * math.ceil(max(flat.size for flat in flats) / dp)  # a replica's share of a sum
    if shard in ("states+gradients", "all"):
        filling = len({(f.traits.exact, f.traits.whole, f.traits.tp_partial) for f in flats})
        largest = sorted((flat.size for flat in flats), reverse=True)
        total += 4 * sum(largest[: filling + ON_THEIR_WAY])
    elif _keeps_master(config) and config.precision.compute == "fp32":
        total += 4 * max((flat.size for flat in flats if not flat.traits.exact), default=0)  # differences, encoded
    if shard == "all":
        units: Counter[str] = Counter()
        for flat in flats:
            units[flat.traits.unit] += flat.size
        blocks = sorted((size for unit, size in units.items() if unit), reverse=True)
        total += ITEM_BYTES[config.precision.compute] * (units[""] + sum(blocks[:2]))  # the one at work and the next
    return total


def _residual(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the bytes of error feedback's residual: at most a value for each gradient that is encoded."""
    if not traffic_codecs(config.communication)["gradients"].endswith(FEEDBACK) or config.mesh.dp == 1:
        return 0
    return 4 * sum(size for name, size in sizes.items() if not is_exact(name, config.communication.exact))


def _checkpoint(config: Config, sizes: Mapping[str, int], is_first: bool, tp_rank: int) -> int:
    """Return the bytes of a rank's share of the copy that a thread writes; 0 where the loop writes by itself.

    Each parameter counts once in the job: a tied embedding on the first stage, unsplit ones on the first tp rank.
    """
    if not (config.checkpoint.asynchronous and config.checkpoint.every_steps):
        return 0
    written = sum(
        size
        for name, size in sizes.items()
        if (is_first or name != "embedding.weight") and (tp_rank == 0 or split_dim(name) is not None)
    )
    item_bytes = ITEM_BYTES[config.precision.compute] + (12 if _keeps_master(config) else 8)
    residual = _residual(config, sizes) if config.checkpoint.feedback else 0
    return item_bytes * math.ceil(written / config.mesh.dp) + residual


def _flats(config: Config, sizes: Mapping[str, int]) -> list[FlatBuffer]:
    """Lay the parameters out in flat buffers, as far as their sizes go, as the optimizer does."""
    communication, tp = config.communication, config.mesh.tp
    is_shared = (
        config.model.tied and config.mesh.pp > 1 and config.pipeline.schedule != "zb-v"
    )  # has both ends on rank 0

    def traits(name: str) -> Traits:
        whole = tp == 1 or split_dim(name) is None
        block = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        unit = block if config.optimizer.shard == "all" else ""
        partial = whole and (config.mesh.sequence_parallel or (tp > 1 and is_adapter(name)))
        shared = is_shared and name == "embedding.weight"
        return Traits(is_exact(name, communication.exact), whole, partial, shared, unit)

    return lay_out(sizes, traits, communication.bucket_mib * 2**18)
