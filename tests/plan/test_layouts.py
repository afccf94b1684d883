"""A layout and a model are read from a line or a mapping, and what cannot be is refused by key and value."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.config import schema as run_file
from hpcllm.errors import ConfigError
from hpcllm.plan.layouts import Layout, parse_layout, parse_step
from hpcllm.plan.models import read_model

LUMI = "layers=70,hidden=14336,heads=112,ffn=57344,vocab=51200,sequence=2048"

layouts = st.builds(
    Layout,
    dp=st.integers(1, 4096),
    pp=st.integers(1, 128),
    tp=st.integers(1, 16),
    micro_batch=st.integers(1, 64),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    shard=st.sampled_from(["none", "states", "states+gradients", "all"]),
    sequence_parallel=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    attention=st.sampled_from(["flash", "flash1", "materialized", "unfused"]),
    policy=st.sampled_from(["none", "hpcllm"]),
    trainer=st.sampled_from(["hpcllm", "megatron"]),
)


@given(layouts)
def test_a_layout_is_read_as_it_was_written(layout):
    assert parse_layout(layout.text() or {}, trainer="hpcllm") == layout
    assert parse_layout(dataclasses.asdict(layout)) == layout
    assert layout.devices == layout.dp * layout.pp * layout.tp


@given(layouts, st.integers(1, 50))
def test_a_batch_is_replicas_times_microbatches_times_their_size(layout, count):
    batch = layout.dp * layout.micro_batch * count
    assert layout.microbatches(batch) == count
    assert parse_step({**dataclasses.asdict(layout), "global_batch": batch}, None) == (layout, batch)
    for wrong in (batch + layout.dp * layout.micro_batch - 1, layout.dp * layout.micro_batch - 1):
        if wrong % (layout.dp * layout.micro_batch):
            with pytest.raises(ConfigError, match=f"valid: multiples of {layout.dp * layout.micro_batch}"):
                layout.microbatches(wrong)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "should read key=value"),
        ("tp", "should read key=value"),
        ("tp=", "should read key=value"),
        ("tp=2,tp=4", "says tp twice"),
        ("tensor=2", "no key 'tensor'.*valid: .*tp"),
        ("tp=0", r"layout\.tp = 0 is out of range"),
        ("tp=two", r"layout\.tp = 'two' should be a whole number"),
        ("tp=2.0", r"layout\.tp = 2\.0 should be a whole number"),
        ("schedule=zigzag", r"layout\.schedule = 'zigzag' should be one of"),
        ("shard=zero1", r"layout\.shard = 'zero1' should be one of 'none', 'states'"),
        ("policy=best", r"layout\.policy = 'best' is unknown"),
        ("sequence_parallel=yes", r"sequence_parallel = 'yes' should be true or false"),
    ],
)
def test_what_no_layout_can_be_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        parse_layout(text)


@pytest.mark.parametrize("batch", [None, 0, -4, 1.5, "1024"])
def test_a_step_without_samples_is_refused(batch):
    with pytest.raises(ConfigError, match="global_batch"):
        parse_step("tp=2", batch)


def test_two_batches_that_differ_are_refused():
    with pytest.raises(ConfigError, match="leave one of the two out"):
        parse_step("tp=2,global_batch=8", 16)
    assert parse_step("tp=2,global_batch=8", 8)[1] == 8


def test_1f1b_with_chunks_is_the_interleaved_schedule():
    assert parse_layout("pp=4,chunks=2,schedule=1f1b").schedule == "interleaved"
    assert parse_layout("pp=4,schedule=zb-v").chunks == 2


@pytest.mark.parametrize("name", [name for name in run_file.preset_names() if name != "tiny"])
def test_a_preset_keeps_its_shape_whatever_the_sequence(name):
    model, longer = read_model(name), read_model(name, 2 * read_model(name).sequence)
    own = run_file.from_tables({"model": {"preset": name}}).model
    assert model.shape == dataclasses.replace(own, vocabulary=model.shape.vocabulary), "its vocabulary may be padded"
    assert 0 <= model.shape.vocabulary - own.vocabulary < 128
    assert model.shape.vocabulary % 128 == 0
    assert model.unpadded in (0, own.vocabulary)
    assert model.sequence == model.shape.max_sequence
    assert dataclasses.replace(longer.shape, max_sequence=model.shape.max_sequence) == model.shape
    assert longer.flops_per_token > model.flops_per_token


def test_shapes_are_those_of_the_papers():
    """arXiv:2104.04473, formula 2; Llama 2 70B with grouped-query attention and a gate."""
    gpt = read_model(LUMI)
    layers, hidden, vocabulary = 70, 14336, 51200
    told = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + 2048) / (12 * layers * hidden))
    assert gpt.parameters == pytest.approx(told, rel=1e-4)
    llama = read_model("layers=80,hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256,sequence=4096")
    assert llama.parameters == read_model("llama-70b").parameters
    assert llama.flops_per_token == read_model("llama-70b", 4096).flops_per_token
    assert read_model({"layers": 2, "hidden": 8, "heads": 2, "vocab": 9}).shape.ffn == 32


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpt5", "model.preset = 'gpt5' is unknown"),
        ("tiny", "takes its vocabulary from a token store"),
        ("layers=2,hidden=8", "lacks heads, vocabulary"),
        ("layers=2,hidden=8,heads=2,vocab=9,gated=true", "lacks ffn"),
        ("layers=2,hidden=8,heads=2,vocab=9,gated=1", "should be true or false"),
        ("layers=2,hidden=9,heads=2,vocab=9", "does not split into model.heads"),
        ("layers=2,hidden=8,heads=2,vocab=9,width=3", "unknown key model.width"),
        ("layers=2,hidden=8,heads=2,vocab=9,sequence=0", "= 0 is out of range"),
        ("layers=two,hidden=8,heads=2,vocab=9", "model.layers = 'two' should be a whole number"),
        ("layers=2,hidden=h,heads=2,vocab=9", "lacks ffn"),
        ("layers=2,hidden=h,heads=2,vocab=9,ffn=8", "model.hidden = 'h' should be a whole number"),
    ],
)
def test_what_no_model_can_be_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        read_model(text)
