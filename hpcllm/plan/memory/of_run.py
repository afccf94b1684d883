"""What each rank of a run holds, in bytes, before it is started.

    parameters    weights in the type of compute         n b       n elements a rank, of b bytes
    gradients     sums in float32                        4 n
    optimizer     two moments, masters where kept        8 n + 4 n
    activations   the most that a step has at once       once through the actions of the schedule
    buffers       gradients on their way to their owner, weights gathered for a while, what error feedback owes
    checkpoint    the copy that a thread writes while training goes on: a replica's share of all that is kept

    shard           none    states    states+gradients    all          a replica's share of dp: n / dp
    parameters       n        n              n            n / dp
    gradients        n        n            n / dp         n / dp
    optimizer        n      n / dp         n / dp         n / dp       arXiv:1910.02054 figure 1

Tensors only: the interpreter, libraries and MPI take some hundred MB more, and encoded messages are not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpcllm.codecs.names import parse_name
from hpcllm.config import Config, traffic_codecs
from hpcllm.layout import recompute_of, spans_of
from hpcllm.model.shapes import StageSpan
from hpcllm.model.shards import shard_of, split_dim, split_sizes
from hpcllm.optim.flat import Flat, Traits, lay_out
from hpcllm.pipeline.actions import Op
from hpcllm.pipeline.schedules import Schedule
from hpcllm.plan.memory.backward_pass import backward, second_half
from hpcllm.plan.memory.forward_pass import forward
from hpcllm.plan.memory.moments import PassUses, moments_of, peak
from hpcllm.plan.memory.sizes import Level, Sizes
from hpcllm.policy import FEEDBACK, is_exact

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ON_THEIR_WAY = 3  # gradient buffers at most, besides those that are being filled: optim/passing.py


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  # at their peak in a step
    buffers: int
    checkpoint: int

    @property
    def states(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.states + self.activations + self.buffers + self.checkpoint


def predict(config: Config, schedule: Schedule, pp_rank: int, tp_rank: int = 0) -> RankMemory:
    """The memory of the ranks of one place in a replica. config: dp and vocabulary filled in (layout.check_layout)."""
    placement = schedule.placement
    spans = spans_of(config, placement)
    stages = [placement.stage(pp_rank, chunk) for chunk in range(placement.chunks)]
    levels = recompute_of(config, placement)
    chunks = [(chunk_sizes(config, levels[stage], tp_rank), spans[stage]) for stage in stages]
    kept = between_passes(config, [spans[stage] for stage in stages], tp_rank)
    return replace(kept, activations=_activations(config, schedule, pp_rank, chunks))


def between_passes(config: Config, spans: Sequence[StageSpan], tp_rank: int = 0) -> RankMemory:
    """The same without activations, of ranks that have these parts of the model."""
    sizes = parameter_sizes(config, spans, tp_rank)
    n, item_bytes, shard = sum(sizes.values()), ITEM_BYTES[config.precision.compute], config.optimizer.shard
    share = math.ceil(n / config.mesh.dp)
    updated = n if shard == "none" else share
    return RankMemory(
        parameters=item_bytes * (share if shard == "all" else n),
        gradients=4 * (n if shard in ("none", "states") else share),
        optimizer=(12 if _keeps_master(config) else 8) * updated,
        activations=0,
        buffers=_buffers(config, sizes) + _surplus(config, sizes),
        checkpoint=_checkpoint(config, sizes, any(span.has_embedding for span in spans), tp_rank),
    )


def parameter_sizes(config: Config, spans: Sequence[StageSpan], tp_rank: int) -> dict[str, int]:
    """Elements that a rank has of each of its parameters; a tied embedding that is first and last there is one."""
    return split_sizes(config.model, spans, config.mesh.tp, tp_rank)


def chunk_sizes(config: Config, level: str, tp_rank: int = 0) -> Sizes:
    rows = shard_of("embedding.weight", (config.model.vocabulary, 1), tp_rank, config.mesh.tp)[1][0]
    return Sizes(
        model=config.model,
        samples=config.data.global_batch // config.mesh.dp // config.pipeline.microbatches,
        sequence=config.data.sequence_length,
        vocabulary=rows,
        tp=config.mesh.tp,
        sequence_parallel=config.mesh.sequence_parallel,
        item_bytes=ITEM_BYTES[config.precision.compute],
        level=_level(level),
        loss_tokens=config.pipeline.loss_tokens,
    )


def _level(word: str) -> Level:
    return "full" if word == "full" else "selective" if word == "selective" else "none"


def _keeps_master(config: Config) -> bool:
    """Whether the model's weights are not themselves what AdamW updates."""
    is_lossy = not parse_name(traffic_codecs(config.communication)["parameters"]).lossless
    gathered = config.optimizer.shard in ("states", "states+gradients")
    return config.precision.compute != "fp32" or (gathered and is_lossy)


def _activations(config: Config, schedule: Schedule, pp_rank: int, chunks: Sequence[tuple[Sizes, StageSpan]]) -> int:
    """The peak over one step: what is kept of each microbatch, messages, and what the work at hand takes."""
    halves = {action.chunk for action in schedule.actions[pp_rank] if action.op is Op.BACKWARD_INPUT}
    uses = [pass_uses(sizes.with_split(chunk in halves), span) for chunk, (sizes, span) in enumerate(chunks)]
    return target_bytes(config) + peak(moments_of(schedule, pp_rank), uses, chunks[0][0].residual)


def pass_uses(sizes: Sizes, span: StageSpan) -> PassUses:
    """Of a microbatch through one chunk."""
    return PassUses(forward(sizes, span), backward(sizes, span), second_half(sizes, span))


def target_bytes(config: Config) -> int:
    """Of a step's tokens, as numbers of 64 bits."""
    return 8 * config.data.global_batch // config.mesh.dp * config.data.sequence_length


def _buffers(config: Config, sizes: Mapping[str, int]) -> int:
    """Of a sharded optimizer, besides what it shares."""
    shard, dp = config.optimizer.shard, config.mesh.dp
    if shard == "none":
        return 0
    flats = _flats(config, sizes)
    total = 4 * math.ceil(max(flat.size for flat in flats) / dp)  # a section's share of a sum
    if shard in ("states+gradients", "all"):
        filling = len({(f.traits.exact, f.traits.whole, f.traits.summed) for f in flats})
        largest = sorted((flat.size for flat in flats), reverse=True)
        total += 4 * sum(largest[: filling + ON_THEIR_WAY])
    elif _keeps_master(config) and config.precision.compute == "fp32":
        total += 4 * max((flat.size for flat in flats if not flat.traits.exact), default=0)  # differences, coded
    if shard == "all":
        units: Counter[str] = Counter()
        for flat in flats:
            units[flat.traits.unit] += flat.size
        blocks = sorted((size for unit, size in units.items() if unit), reverse=True)
        total += ITEM_BYTES[config.precision.compute] * (units[""] + sum(blocks[:2]))  # the one at work and the next
    return total


def _surplus(config: Config, sizes: Mapping[str, int]) -> int:
    """Of error feedback: at most a value for each gradient that is coded."""
    if not traffic_codecs(config.communication)["gradients"].endswith(FEEDBACK) or config.mesh.dp == 1:
        return 0
    return 4 * sum(size for name, size in sizes.items() if not is_exact(name, config.communication.exact))


def _checkpoint(config: Config, sizes: Mapping[str, int], is_first: bool, tp_rank: int) -> int:
    """Of each parameter once in the job: a tied embedding on the first stage, what tp does not split on its first rank.

    None where the loop writes by itself, as it does at the end of a run.
    """
    if not (config.checkpoint.asynchronous and config.checkpoint.every_steps):
        return 0
    written = sum(
        size
        for name, size in sizes.items()
        if (is_first or name != "embedding.weight") and (tp_rank == 0 or split_dim(name) is not None)
    )
    item_bytes = ITEM_BYTES[config.precision.compute] + (12 if _keeps_master(config) else 8)
    surplus = _surplus(config, sizes) if config.checkpoint.feedback else 0
    return item_bytes * math.ceil(written / config.mesh.dp) + surplus


def _flats(config: Config, sizes: Mapping[str, int]) -> list[Flat]:
    """How the parameters lie in flat arrays, as far as their sizes go (optim/sections.py)."""
    communication, tp = config.communication, config.mesh.tp

    def traits(name: str) -> Traits:
        whole = tp == 1 or split_dim(name) is None
        block = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        unit = block if config.optimizer.shard == "all" else ""
        return Traits(is_exact(name, communication.exact), whole, whole and config.mesh.sequence_parallel, unit=unit)

    return lay_out(sizes, traits, communication.bucket_mib * 2**18)
