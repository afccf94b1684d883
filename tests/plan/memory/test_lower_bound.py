"""The lower bound of memory against the prediction: never above it, in sum and part by part, for any layout."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.pipeline.schedules import SCHEDULES
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.predict import (
    end_ranks_bound,
    first_rank_bound,
    layout_memory,
    lower_bound,
    states_lower_bound,
)
from hpcllm.plan.models import read_model

MODELS = {
    "gpt": read_model("layers=12,hidden=64,heads=4,vocab=500,sequence=32"),
    "llama": read_model("layers=13,hidden=64,heads=4,kv_heads=4,ffn=160,gated=true,vocab=1000,sequence=64"),
    "parallel": read_model("layers=12,hidden=64,heads=4,vocab=300,sequence=32,parallel_residual=true,tied=false"),
}


@st.composite
def layouts(draw):
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    usual = SCHEDULES[schedule].placement.chunks
    pp = draw(st.integers(1, 5))
    layout = Layout(
        dp=draw(st.sampled_from([1, 2, 5])),
        pp=pp,
        tp=draw(st.sampled_from([1, 2, 4])),
        micro_batch=draw(st.integers(1, 3)),
        schedule=schedule,
        chunks=draw(st.integers(1, 12 // pp)) if SCHEDULES[schedule].any_chunks else usual,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        shard=draw(st.sampled_from(["none", "states", "states+gradients"] + ["all"] * (pp == 1))),
        sequence_parallel=draw(st.booleans()),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
    )
    return layout, layout.dp * layout.micro_batch * draw(st.integers(1, 12))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(MODELS)), layouts())
def test_no_layout_needs_less(name, drawn):
    layout, global_batch = drawn
    needed = max(rank.total - rank.checkpoint for rank in layout_memory(MODELS[name], layout, global_batch))
    least = lower_bound(MODELS[name], layout, global_batch)
    of_first = first_rank_bound(MODELS[name], layout, global_batch)
    assert 0 < least <= needed
    assert 0 < of_first <= needed
    of_ends = end_ranks_bound(MODELS[name], layout, global_batch)
    assert of_first <= of_ends <= needed
    if layout.pp * layout.chunks == 1:  # no messages
        assert of_ends == needed


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(MODELS)), layouts())
def test_no_layout_keeps_fewer_states(name, drawn):
    layout, global_batch = drawn
    kept = max(rank.states for rank in layout_memory(MODELS[name], layout, global_batch))
    assert 0 < states_lower_bound(MODELS[name], layout) <= kept


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(MODELS)), layouts())
def test_a_layout_that_recomputes_more_is_bounded_by_less(name, drawn):
    layout, global_batch = drawn
    levels = [dataclasses.replace(layout, recompute=level) for level in ("none", "selective", "full")]
    bounds = [lower_bound(MODELS[name], each, global_batch) for each in levels]
    assert bounds == sorted(bounds, reverse=True)
