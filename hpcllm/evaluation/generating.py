"""Texts that a model makes for tasks: the same ones on any number of replicas.

    prompts    0 ... 31 | 32 ... 63 | 64 ... 95 | 96 ...      groups of 32, each a batch of its own
    round 1    replica 0    replica 1     replica 2
    round 2                                          replica 0

Which texts are made beside which follows from the list alone, so a text has the same bits on any number of replicas, if
each computes with as many threads and has memory for a group. Within a group texts end when they end
(inference/batch.py). Replicas that share the weights (ZeRO-3) work together: one that has come to the end of its group
reads a token that nobody counts while others go on.

    pass         1     2     3     4
    replica 0    a b   a b   b     b         group of two texts
    replica 1    c     c     .     .         . : reads a token beside
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpcllm.data.tokenizer import Encoder
from hpcllm.evaluation.batches import Tokens
from hpcllm.evaluation.scoring import Advance, Scorer
from hpcllm.inference.batch import Batch, Request, Text
from hpcllm.inference.cached_model import plain_arithmetic
from hpcllm.inference.complete import BatchSettings, OpenModel, open_model
from hpcllm.inference.endings import StopStrings
from hpcllm.model.sampling import Sampling

GROUP_TEXTS = 32  # that are made at once
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Prompts:
    """Prompts as tokens; which stop strings end the text of each; most tokens that a text has."""

    tokens: Sequence[Tokens]  # one at least, each
    stops: Sequence[tuple[str, ...]]  # sets of stop strings
    chosen: Sequence[int]  # of each prompt, its set
    most: int
    seeds: Sequence[int] = ()  # of each prompt, where tokens are drawn

    @property
    def groups(self) -> int:
        return -(-len(self.tokens) // GROUP_TEXTS)


def make_texts(
    scorer: Scorer,
    prompts: Prompts,
    encoder: Encoder,
    sampling: Sampling = GREEDY,
    advance: Advance = lambda _: None,
) -> list[str]:
    """Make a text for each prompt, up to a stop string, the end of text or the most tokens; the same on all ranks.

    A prompt that leaves no room for the text loses its beginning. Collective over the scorer's mesh. Raises ConfigError
    where there is too little memory, NonFiniteError, StallError.
    """
    ends = [StopStrings(stops, encoder) for stops in prompts.stops]
    window = scorer.model.max_sequence - prompts.most
    cut = [tokens[-window:] for tokens in prompts.tokens]
    requests = [Request(tokens, seed) for tokens, seed in zip(cut, prompts.seeds or [0] * len(cut), strict=True)]
    found: list[str] = [""] * len(requests)
    with plain_arithmetic(scorer.decoders):
        opened = _open(scorer, requests, encoder, sampling, prompts.most)

        def is_over(text: Text) -> bool:
            return ends[prompts.chosen[text.index]].is_over(text)

        for first in range(0, prompts.groups, scorer.replicas):
            group = _group(requests, first + scorer.replica)
            made = _made(scorer, opened, opened.batch(group, is_over))
            for index, tokens in _of_all(scorer, made):
                found[index] = ends[prompts.chosen[index]].text_of(tokens)
            advance(1)
    return found


def _open(scorer: Scorer, requests: Sequence[Request], encoder: Encoder, sampling: Sampling, most: int) -> OpenModel:
    """Take memory for groups. Collective."""
    longest = max((len(request.prompt) for request in requests), default=1)
    settings = BatchSettings(most, GROUP_TEXTS, stops=frozenset({encoder.end_of_text}))
    vocabulary = min(encoder.vocabulary, scorer.model.vocabulary)
    return open_model(
        scorer.decoders, longest, min(GROUP_TEXTS, len(requests)), sampling, settings, vocabulary, scorer.mesh,
        scorer.placement, scorer.waits,
    )  # fmt: skip


def _group(requests: Sequence[Request], number: int) -> list[Text]:
    """Return the texts of a group, none of one behind the last."""
    first = number * GROUP_TEXTS
    return [Text(first + at, request) for at, request in enumerate(requests[first : first + GROUP_TEXTS])]


def _made(scorer: Scorer, opened: OpenModel, batch: Batch) -> Iterator[Text]:
    """Yield the texts of a batch as they end. Collective over the mesh."""
    if not scorer.shares_weights:
        while not batch.is_done:
            yield from (text for text in batch.step() if text.reason)
        return
    while scorer.any_replica(not batch.is_done):
        if batch.is_done:
            beside = [Text(0, Request([0], 0))]
            Batch(opened.model, beside, replace(opened.limits, tokens=1), opened.pool).step()
        else:
            yield from (text for text in batch.step() if text.reason)


def _of_all(scorer: Scorer, made: Iterator[Text]) -> Iterator[tuple[int, list[int]]]:
    """Yield (number, tokens) of the texts of all replicas, on all ranks. Collective over dp."""
    mine = [(text.index, text.tokens) for text in made]
    if scorer.replicas == 1:
        yield from mine
        return
    from hpcllm.mpi.wait import WORK, meet

    assert scorer.mesh
    meet(scorer.mesh.dp, "to exchange finished texts", WORK)
    for of_one in scorer.mesh.dp.allgather(mine):
        yield from of_one
