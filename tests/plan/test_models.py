"""Every block lies on one stage, in order; Megatron's cut is that of the published runs, ours is no slower."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.model.shapes import head_in_blocks, parameter_count
from hpcllm.plan.layouts import Layout
from hpcllm.plan.models import held_parameters, kinds_of, placement_of, read_model, spans_like, stage_spans


def model_of(layers: int, hidden: int = 64, vocabulary: int = 512):
    return read_model({"layers": layers, "hidden": hidden, "heads": 4, "vocab": vocabulary, "sequence": 64})


def blocks_of(layers: int, stages: int, hidden: int, vocabulary: int) -> list[int]:
    spans = stage_spans(model_of(layers, hidden, vocabulary), Layout(pp=stages, trainer="megatron"))
    return [span.last_block - span.first_block for span in spans]


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 3), st.sampled_from(["hpcllm", "megatron"]), st.data())
def test_every_block_is_on_one_stage_in_order(layers, pp, chunks, trainer, data):
    if pp * chunks > layers:
        layers = pp * chunks
    vocabulary = data.draw(st.sampled_from([64, 4096, 100_000]))
    schedule = "interleaved" if chunks > 1 else "1f1b"
    model = model_of(layers, vocabulary=vocabulary)
    layout = Layout(pp=pp, chunks=chunks, schedule=schedule, trainer=trainer)
    spans, placement = stage_spans(model, layout), placement_of(layout)
    assert [span.first_block for span in spans] == [0, *(span.last_block for span in spans[:-1])]
    assert spans[-1].last_block == layers
    assert min(span.last_block - span.first_block for span in spans) >= 1
    assert [span.has_embedding for span in spans] == [True] + [False] * (len(spans) - 1)
    assert [span.has_head for span in spans] == [False] * (len(spans) - 1) + [True]
    held = [held_parameters(model.shape, kinds_of(spans, placement, rank), 1) for rank in range(pp)]
    twice = model.shape.vocabulary * model.shape.hidden if pp > 1 else 0  # a tied embedding is on both ends
    assert sum(held) == parameter_count(model.shape) + twice
    kinds = kinds_of(spans, placement, 0)
    assert sum(span.last_block - span.first_block for span in spans_like(kinds)) == sum(kind[0] for kind in kinds)


def test_megatrons_cuts_are_those_of_the_published_runs():
    assert blocks_of(70, 8, 14336, 51200) == [9] * 7 + [7]  # LUMI's 175B: transformer_layers of lumi-175b.toml
    assert blocks_of(70, 12, 14336, 250880) == [5, *[6] * 10, 5]  # BLOOM: embedding and head a place each
    assert blocks_of(80, 8, 12288, 51200) == [10] * 8


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
@pytest.mark.parametrize("vocabulary", [1000, 50_000, 250_000])
def test_our_slowest_stage_is_no_slower_than_megatrons(stages, vocabulary):
    model = model_of(24, 1024, vocabulary)
    head = head_in_blocks(model.shape)

    def slowest(trainer: str) -> float:
        spans = stage_spans(model, Layout(pp=stages, trainer=trainer))
        return max(span.last_block - span.first_block + head * span.has_head for span in spans)

    assert slowest("hpcllm") <= slowest("megatron") + 1e-9
