"""Shapes in which the laws of schedules are tested: all small ones, and larger ones by chance."""

from __future__ import annotations

import functools
import itertools

from hypothesis import strategies as st

from hpcllm.pipeline.schedules import SCHEDULES, Schedule, make_schedule

Shape = tuple[str, int, int, int]  # name, ranks, microbatches, chunks


def chunks_of(name: str) -> tuple[int, ...]:
    kind = SCHEDULES[name]
    return (1, 2, 3) if kind.any_chunks else (kind.placement.chunks,)


def small(name: str) -> list[Shape]:
    return [(name, p, m, v) for v in chunks_of(name) for p, m in itertools.product(range(1, 6), range(1, 12))]


@st.composite
def shapes(draw, names=tuple(SCHEDULES)) -> Shape:
    name = draw(st.sampled_from(names))
    chunks = draw(st.integers(1, 4)) if SCHEDULES[name].any_chunks else SCHEDULES[name].placement.chunks
    return name, draw(st.integers(1, 9)), draw(st.integers(1, 24)), chunks


@functools.cache
def made(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    return make_schedule(name, ranks, microbatches, chunks)
