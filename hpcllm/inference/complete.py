"""Many prompts -> their texts, on one process or on dp x pp x tp ranks.

    requests   0 1 2 3 4 5 6 ...        dp replica 0:  0 2 4 6 ...  --> Batch --> texts as they end --+--> all ranks
                                        dp replica 1:  1 3 5 ...    --> Batch --> texts as they end --+

Which replica makes a text, and beside which others, changes nothing but rounding: draws depend on the seed of the
request and on the text alone. Replicas meet every ROUND_PASSES passes, to hand over what has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpcllm.errors import ConfigError
from hpcllm.inference.batch import Batch, Limits, NextTokens, Request, Text
from hpcllm.inference.cached_model import CachedModel, block_bytes
from hpcllm.model.paged_cache import BLOCK_TOKENS, BlockPool, blocks_for
from hpcllm.model.sampling import Sampling, check_prompt
from hpcllm.model.transformer import Decoder
from hpcllm.system.hardware.node import find_free_memory, memory_limit

if TYPE_CHECKING:
    from hpcllm.mpi.mesh import Mesh
    from hpcllm.mpi.wait import Waits
    from hpcllm.pipeline.actions import Placement

ROUND_PASSES = 64  # of a batch between two exchanges of finished texts over dp
FREE_SHARE = 0.5  # of the memory that is free, for the cache of all ranks of a node, where nothing else is asked for
UNKNOWN_BYTES = 1 << 60
IsOver = Callable[[Text], bool]


@dataclass(frozen=True)
class BatchSettings:
    """Bounds of many texts: new tokens of each, texts at once, bytes of keys and values on a rank."""

    tokens: int = 200
    texts: int = 32
    cache_bytes: int | None = None  # None: half of the memory that is free
    stops: frozenset[int] = frozenset()  # tokens that end a text

    def check(self) -> None:
        """Raise ConfigError for a setting that is out of range."""
        if self.tokens < 0 or self.texts < 1:
            raise ConfigError(f"tokens = {self.tokens}, texts = {self.texts}: valid: 0 or more tokens, 1 or more texts")


def generate_batch(
    decoder: Decoder,
    requests: Sequence[Request],
    sampling: Sampling,
    settings: BatchSettings,
    vocabulary: int,
    mesh: Mesh | None = None,
    is_over: IsOver = lambda _: False,
) -> Iterator[Text]:
    """Yield a text for each request, as they come to their end, on all ranks. Collective over the mesh.

    vocabulary: token ids below this stand for text. is_over: called after each new token of a text, which ends there
    if that is True; the same on all ranks. Raises, before the first text, DataError for a prompt that is empty or has
    other tokens and ConfigError for settings out of range; NonFiniteError, StallError on the way.
    """
    sampling.check()
    settings.check()
    for request in requests:
        check_prompt(request.prompt, vocabulary)
    batch = make_batch(decoder, requests, sampling, settings, vocabulary, mesh, is_over)
    return _exchanged(batch, requests, mesh) if mesh and mesh.dp.size > 1 else _finished(batch)


def make_batch(
    decoder: Decoder,
    requests: Sequence[Request],
    sampling: Sampling,
    settings: BatchSettings,
    vocabulary: int,
    mesh: Mesh | None = None,
    is_over: IsOver = lambda _: False,
) -> Batch:
    """Make the batch of this rank's replica: whoever wants each token as it comes steps it. Arguments as above."""
    longest = max((len(request.prompt) for request in requests), default=1)
    opened = open_model([decoder], longest, len(requests), sampling, settings, vocabulary, mesh)
    dealt = [Text(index, request) for index, request in enumerate(requests)]
    return opened.batch(dealt[mesh.dp.rank :: mesh.dp.size] if mesh else dealt, is_over)


@dataclass(frozen=True)
class OpenModel:
    """A model that makes texts, with the memory for their keys and values."""

    model: NextTokens
    limits: Limits
    pool: BlockPool

    def batch(self, texts: Sequence[Text], is_over: IsOver = lambda _: False) -> Batch:
        """Make a batch; one before it has come to its end, for all share the memory."""
        return Batch(self.model, texts, self.limits, self.pool, is_over)


def open_model(
    decoders: Sequence[Decoder],
    longest: int,
    texts: int,
    sampling: Sampling,
    settings: BatchSettings,
    vocabulary: int,
    mesh: Mesh | None = None,
    placement: Placement | None = None,
    waits: Waits | None = None,
) -> OpenModel:
    """Take memory for texts whose longest prompt has so many tokens. Collective over the mesh.

    decoders: this rank's chunks of the model, placed as `placement` says; None: one a rank. waits: of a run. Raises
    ConfigError where there is not enough memory for one text.
    """
    window = decoders[0].model.max_sequence
    most = min(longest + settings.tokens, window)
    blocks = _blocks(decoders, most, min(settings.texts, max(texts, 1)), settings, mesh)
    limits = Limits(settings.tokens, settings.texts, window, settings.stops)
    models = [CachedModel(decoder, blocks, sampling, vocabulary) for decoder in decoders]
    if mesh is None:
        return OpenModel(models[0], limits, BlockPool(blocks))
    from hpcllm.inference.several_ranks import SharedModel  # starts MPI

    return OpenModel(SharedModel(mesh, models, placement, waits), limits, BlockPool(blocks))


def _blocks(decoders: Sequence[Decoder], longest: int, texts: int, settings: BatchSettings, mesh: Mesh | None) -> int:
    """Return the number of blocks: for all texts at their longest, or what fits, on the rank with the least room."""
    ranks = mesh.node.size if mesh else 1
    room = settings.cache_bytes or int(_free_bytes(decoders[0].device) * FREE_SHARE / ranks)
    size_bytes, least = sum(map(block_bytes, decoders)), blocks_for(longest)
    blocks = min(texts * least, room // size_bytes)
    if mesh:
        blocks = min(mesh.world.allgather(blocks))
    if blocks < least:
        raise ConfigError(
            f"the cache has room for {blocks * BLOCK_TOKENS} tokens ({room >> 20} MiB a rank), but the longest text "
            f"can have {longest}; valid: {-(-least * size_bytes >> 20)} MiB or more, or fewer tokens"
        )
    return blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(find_free_memory().available_bytes or UNKNOWN_BYTES, memory_limit())  # 0: the system does not tell


def _finished(batch: Batch) -> Iterator[Text]:
    while not batch.is_done:
        yield from (text for text in batch.step() if text.reason)


def _exchanged(batch: Batch, requests: Sequence[Request], mesh: Mesh) -> Iterator[Text]:
    """Yield the finished texts of all replicas on all ranks. Collective over the mesh."""
    from hpcllm.mpi.wait import WORK, meet

    others_go_on = True
    while others_go_on:
        mine: list[tuple[int, list[int], str]] = []
        for _ in range(ROUND_PASSES):
            if not batch.is_done:
                mine += [(text.index, text.tokens, text.reason) for text in batch.step() if text.reason]
        meet(mesh.dp, "to exchange finished texts", WORK)
        rounds = mesh.dp.allgather((batch.is_done, mine))
        for index, tokens, reason in (each for _, found in rounds for each in found):
            yield Text(index, requests[index], tokens, reason)
        others_go_on = not all(done for done, _ in rounds)
