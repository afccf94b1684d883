"""The order of each rank's work in each schedule, without messages. Pure. One tick a cell, a B has two.

gpipe, 3 ranks, 4 microbatches: no F after a B
rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
rank 1   .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -- .  .
rank 2   .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .  .  .

1f1b: as long, but rank 0 holds 3 activations, not 4
rank 0   F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
rank 1   .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
rank 2   .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .

zb-h1: the next rank waits for I only, and W fills the end
rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Two chunks a rank, with half the layers each, so a tick is half as long. 2 ranks, 2 and 3 microbatches:

interleaved: the bubble is as many ticks as with one chunk
rank 0   F0   F1   F0.1 F1.1 .    .    B0.1 --   .    B1.1 --   B0   --   B1   --
rank 1   .    F0   F1   F0.1 B0.1 --   F1.1 B1.1 --   B0   --   B1   --   .    .

zb-v: idle only before the first microbatch comes and after the last one went
rank 0   F0   F1   F2   F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0   W0   F2.1 I2.1 W2.1 I1   W1   I2   W2   .
rank 1   .    F0   F0.1 F1   F1.1 I0.1 W0.1 F2   I0   W0   F2.1 I1.1 W1.1 I1   I2.1 I2   W1   W2.1 W2

With p ranks, m microbatches and v chunks, in times of a rank's whole part of the model and activations of a chunk:

               each rank idles      if                           the rank that holds most holds
gpipe          (p-1) (F+B)                                       m
1f1b           (p-1) (F+B)                                       min(m, p)
interleaved    (p-1) (F+B) / v      m >= p, and p divides m      min(v m, 2 (p-1) + (v-1) p + 1) for v > 1
zb-h1          (p-1) (F+I-W)        m >= p, W <= F, W <= I       min(m, p)
zb-v           (p-1) F / 2          m >= 2p-1, F = I = W         2 min(m, p), which are halves

Sources: gpipe arXiv:1811.06965 section 2.3; 1f1b arXiv:1806.03377 section 3.2; interleaved arXiv:2104.04473 section
2.2; zb-h1 and zb-v arXiv:2401.10241 sections 2.1 and 6, the v also arXiv:2405.15362 section 3.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache

from hpcllm.pipeline.actions import Action, B, F, I, Op, Placement, W


def gpipe(placement: Placement, microbatches: int, rank: int) -> Iterator[Action]:  # noqa: ARG001 -- all ranks alike
    """All forward passes, then all backward passes in the same order."""
    yield from _alternate(microbatches, _one_chunk(F, microbatches), _one_chunk(B, microbatches))


def one_f_one_b(placement: Placement, microbatches: int, rank: int) -> Iterator[Action]:
    """Fill the pipe, alternate, drain it."""
    warmup = placement.ranks - 1 - rank
    yield from _alternate(warmup, _one_chunk(F, microbatches), _one_chunk(B, microbatches))


def interleaved(placement: Placement, microbatches: int, rank: int) -> Iterator[Action]:
    """1F1B over groups of microbatches that go through all chunks before the next group comes.

    A group has as many microbatches as there are ranks, or some more each if they do not divide: with fewer, the last
    rank's next forward pass would come behind a backward pass that waits for it.
    """
    ranks, chunks = placement.ranks, placement.chunks
    stride = 2 if chunks > 1 else 1  # alternating, a rank starts a chunk every second tick
    warmup = stride * (ranks - 1 - rank) + (chunks - 1) * len(_groups(microbatches, ranks)[0])
    yield from _alternate(warmup, *_rounds(ranks, chunks, microbatches))


@lru_cache(maxsize=2)
def _rounds(ranks: int, chunks: int, microbatches: int) -> tuple[list[Action], list[Action]]:
    """List the forward and the backward passes, the same of all ranks: a group through all chunks, then the next."""
    groups = _groups(microbatches, ranks)
    forwards = [Action(F, m, chunk) for group in groups for chunk in range(chunks) for m in group]
    backwards = [Action(B, m, chunk) for group in groups for chunk in reversed(range(chunks)) for m in group]
    return forwards, backwards


def zb_h1(placement: Placement, microbatches: int, rank: int) -> Iterator[Action]:
    """1F1B with the backward pass in two: weight gradients are late by `rank` microbatches, to fill the end."""
    warmup = min(placement.ranks - 1 - rank, microbatches)
    forwards, inputs, weights = (iter(_one_chunk(op, microbatches)) for op in (F, I, W))
    yield from itertools.islice(forwards, warmup)
    for place, action in enumerate(forwards):
        yield action
        yield next(inputs)
        if place >= rank:
            yield next(weights)
    for action in inputs:
        yield action
        yield next(weights)
    yield from weights


def zb_v(placement: Placement, microbatches: int, rank: int) -> Iterator[Action]:
    """Two chunks a rank, there and back: the rank that starts a microbatch ends it, and nobody waits in between.

    With fewer microbatches than fill the pipe, those that there are go at the same times.
    """
    ranks, count = placement.ranks, Counter[tuple[Op, int]]()
    for op, chunk in _v_pattern(ranks, max(microbatches, 2 * ranks - 1), rank):
        m = count[op, chunk]
        count[op, chunk] += 1
        if m < microbatches:
            yield Action(op, m, chunk)


def forward(placement: Placement, microbatches: int) -> list[list[Action]]:
    """The forward passes alone, of all ranks, each busy as soon as it can be: by groups as in `interleaved`.

    Of a group a loop takes what has come least far, as there all of it goes round together; a v what has come furthest,
    as that still has to go back through all ranks.
    """
    sign = -1 if placement.kind == "v" else 1
    work: list[list[Action]] = [[] for _ in range(placement.ranks)]
    ready: list[list[tuple[int, int, int]]] = [[] for _ in work]  # heaps of (group, sign x stage, microbatch)
    ready[0] = [(i, 0, m) for i, group in enumerate(_groups(microbatches, placement.ranks)) for m in group]
    while any(ready):
        for rank, (group, signed, m) in [(rank, heapq.heappop(heap)) for rank, heap in enumerate(ready) if heap]:
            stage = sign * signed
            work[rank].append(Action(F, m, placement.home(stage)[1]))
            if stage + 1 < placement.stages:
                heapq.heappush(ready[placement.home(stage + 1)[0]], (group, sign * (stage + 1), m))
    return work


def _v_pattern(ranks: int, microbatches: int, rank: int) -> Iterator[tuple[Op, int]]:
    """Yield op and chunk of each action; the microbatches of each go in order."""
    back, after = ranks - rank, rank  # ranks from this one to the turn of the V, and before this one
    yield from [(F, 0)] * (2 * back - 1)
    yield from [(F, 1), (F, 0)] * after
    yield from [(F, 1), (I, 1), (W, 1)] * back
    started = 2 * back - 1 + after
    for _ in range(microbatches - ranks):
        if started < microbatches:
            yield F, 0
            started += 1
        yield from [(I, 0), (W, 0), (F, 1), (I, 1), (W, 1)]
    yield from [(I, 0), (I, 1)] * after
    yield from [(I, 0), (W, 0)] * back
    yield from [(W, 1)] * after
    yield from [(W, 0)] * after


@lru_cache(maxsize=4)
def _one_chunk(op: Op, microbatches: int) -> tuple[Action, ...]:
    return tuple(Action(op, m) for m in range(microbatches))


def _groups(microbatches: int, ranks: int) -> list[range]:
    """Ranges of `ranks` microbatches or some more, the largest first; one range if there are fewer."""
    count = max(1, microbatches // ranks)
    ends = [-(-microbatches * i // count) for i in range(count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _alternate(warmup: int, forwards: Iterable[Action], backwards: Iterable[Action]) -> Iterator[Action]:
    """Yield `warmup` forwards, then one forward and one backward by turns, then the backwards that are left."""
    gradients = iter(backwards)
    for place, action in enumerate(forwards):
        yield action
        if place >= warmup:
            yield next(gradients)
    yield from gradients
