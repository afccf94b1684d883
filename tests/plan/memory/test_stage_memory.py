"""Memory of layouts: published formulas and logs, and what must hold for any shape."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from hpcllm.errors import ConfigError
from hpcllm.pipeline.schedules import make_schedule
from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import read_machine
from hpcllm.plan.memory.megatron import layer_at_work, layer_kept, state_bytes
from hpcllm.plan.memory.predict import layout_memory, predict
from hpcllm.plan.memory.sizes import Sizes
from hpcllm.plan.memory.stage_memory import stage_memory
from hpcllm.plan.models import held_parameters, kinds_of, placement_of, read_model, stage_spans
from hpcllm.plan.run_config import config_of

MACHINE = read_machine("lumi-g")
GPT = read_model("layers=24,hidden=1024,heads=16,vocab=51200,sequence=1024")
LLAMA = read_model("layers=24,hidden=1024,heads=16,kv_heads=4,ffn=2816,vocab=32000,sequence=1024,gated=true")
UNEVEN = read_model("layers=24,hidden=1024,heads=16,vocab=50257,sequence=1024")  # tp does not divide its vocabulary
MIB = 1 << 20


def peak(model, layout: Layout, global_batch: int = 64) -> float:
    return max(stage.peak_bytes for stage in stage_memory(model, layout, global_batch, MACHINE))


@pytest.mark.parametrize(
    ("hidden", "heads", "sequence", "samples", "tp"), [(6144, 64, 2048, 4, 8), (12288, 96, 2048, 1, 4)]
)
def test_a_gpt_layer_keeps_what_the_table_says(hidden: int, heads: int, sequence: int, samples: int, tp: int) -> None:
    """arXiv:2205.05198, Table 2, line by line."""
    shape = read_model(f"layers=4,hidden={hidden},heads={heads},vocab=51200,sequence={sequence}").shape
    sbh, scores = sequence * samples * hidden, 5 * heads * sequence / hidden
    layout = Layout(tp=tp, trainer="megatron", attention="materialized")
    selective, full = (dataclasses.replace(layout, recompute=word) for word in ("selective", "full"))

    def kept(layout: Layout, tp: int = tp, parallel: bool = False) -> float:
        s = Sizes(
            model=shape, samples=samples, sequence=sequence, vocabulary=51200 // tp, tp=tp, sequence_parallel=parallel,
            item_bytes=2,
        )  # fmt: skip
        return layer_kept(s, layout) / sbh

    assert kept(layout, tp=1) == pytest.approx(34 + scores)
    assert kept(layout) == pytest.approx(10 + 24 / tp + scores / tp)
    assert kept(layout, parallel=True) == pytest.approx((34 + scores) / tp)
    assert kept(selective) == pytest.approx(10 + 24 / tp)
    assert kept(selective, parallel=True) == pytest.approx(34 / tp)
    assert kept(full) == pytest.approx(2)
    assert kept(full, parallel=True) == pytest.approx(2 / tp)


def test_a_layer_at_work() -> None:
    """With "full" all of it but its input is made again; with "selective" its scores are; gradients come on top."""
    s = Sizes(model=LLAMA.shape, samples=2, sequence=4096, vocabulary=32000, item_bytes=2)
    flash = Layout(trainer="megatron", attention="flash")
    full = dataclasses.replace(flash, recompute="full")
    output_and_gradients = 3 * s.residual
    assert layer_at_work(s, full) == layer_kept(s, flash) - s.residual + output_and_gradients
    scores = Layout(trainer="megatron", attention="materialized")
    selective = dataclasses.replace(scores, recompute="selective")
    made_again = layer_kept(s, scores) - layer_kept(s, selective)
    assert layer_at_work(s, selective) == layer_at_work(s, scores) + made_again
    assert made_again == 5 * 2 * 16 * 4096**2


@pytest.mark.parametrize(
    ("dp", "allocated", "most"), [(2, 37099, (44157, 42112, 40068)), (8, 25192, (32249, 30205, 28161))]
)
def test_stages_of_175b_on_lumi(dp: int, allocated: int, most: tuple[int, ...]) -> None:
    """Stages 2, 4 and 6, in MiB, as the logs have them: (8 + 12 / dp) bytes a parameter, 1022 MiB a microbatch."""
    model = read_model("layers=70,hidden=14336,heads=112,ffn=57344,vocab=51200,sequence=2048")
    layout = Layout(
        tp=8, pp=8, dp=dp, micro_batch=2, recompute="full", shard="states", attention="materialized", trainer="megatron"
    )
    stages = stage_memory(model, layout, 1024, MACHINE)
    for stage, measured in zip((2, 4, 6), most, strict=True):
        assert stages[stage].allocated_bytes / MIB == pytest.approx(allocated, rel=0.005)
        assert stages[stage].peak_bytes / MIB == pytest.approx(measured, rel=0.025)
    falls = {round((a.peak_bytes - b.peak_bytes) / MIB) for a, b in itertools.pairwise(stages[1:7])}
    assert falls == {1022}


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("trainer", ["megatron", "hpcllm"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_takes_less(model, trainer: str, recompute: str) -> None:
    """Memory falls with each way to split or share, and grows with the microbatch."""
    base = Layout(dp=4, pp=2, tp=2, micro_batch=2, recompute=recompute, trainer=trainer)

    def less(**changed) -> None:
        assert peak(model, dataclasses.replace(base, **changed)) < peak(model, base), changed

    less(tp=4)
    less(pp=4)
    less(sequence_parallel=True)
    less(micro_batch=1)
    shards = [dataclasses.replace(base, shard=word) for word in ("none", "states")]
    assert peak(model, shards[1]) < peak(model, shards[0])
    more = dataclasses.replace(base, shard="states", dp=8)
    assert peak(model, more) < peak(model, shards[1])
    alone = [dataclasses.replace(base, pp=1, dp=16, shard=word) for word in ("none", "states", "all")]
    assert peak(model, alone[2]) < peak(model, alone[1]) < peak(model, alone[0])


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("attention", ["flash", "materialized", "unfused"])
def test_making_more_again_keeps_less(model, attention: str) -> None:
    layouts = [
        Layout(pp=4, micro_batch=4, recompute=word, attention=attention, trainer="megatron")
        for word in ("none", "selective", "full")
    ]
    none, selective, full = (peak(model, layout) for layout in layouts)
    assert full < selective
    assert selective < none


def test_scores_that_leave_the_chip_take_more() -> None:
    layouts = [Layout(attention=word, trainer="megatron") for word in ("flash", "materialized", "unfused")]
    flash, materialized, unfused = (peak(GPT, layout) for layout in layouts)
    assert flash < materialized < unfused
    assert peak(GPT, Layout(norm="unfused", trainer="megatron")) > flash


@pytest.mark.parametrize("trainer", ["megatron", "hpcllm"])
def test_every_parameter_is_somewhere(trainer: str) -> None:
    """Once, but for the copy of a tied table that the last stage has."""
    for model in (GPT, LLAMA):
        for pp, chunks in ((1, 1), (3, 1), (4, 2), (7, 1), (2, 4)):
            layout = Layout(pp=pp, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b", trainer=trainer)
            spans, placement = stage_spans(model, layout), placement_of(layout)
            held = sum(held_parameters(model.shape, kinds_of(spans, placement, rank), 1) for rank in range(pp))
            copy = model.shape.vocabulary * model.shape.hidden if model.shape.tied and pp > 1 else 0
            assert held == model.parameters + copy


def random_layout(draw: random.Random) -> tuple[Layout, int]:
    schedule, chunks = draw.choice([("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)])
    pp, microbatches = draw.choice([1, 2, 4]), draw.choice([1, 3, 8, 20])
    layout = Layout(
        dp=draw.choice([1, 4]),
        pp=pp,
        tp=draw.choice([1, 2]),
        micro_batch=draw.choice([1, 2]),
        chunks=chunks,
        schedule=schedule,
        recompute=draw.choice(["none", "selective", "full"]),
        shard=draw.choice(["none", "states", "states+gradients", "all"][: 4 if pp == 1 else 3]),
        sequence_parallel=draw.random() < 0.5,
        precision=draw.choice(["fp32", "bf16", "fp16"]),
        policy=draw.choice(["none", "hpcllm"]),
    )
    return layout, layout.dp * layout.micro_batch * microbatches


@pytest.mark.parametrize("model", [GPT, LLAMA, UNEVEN])
def test_ours_is_what_memory_predicts(model) -> None:
    """To the byte, found another way."""
    draw = random.Random(model.name)
    for _ in range(60):
        layout, global_batch = random_layout(draw)
        config = config_of(model, layout, global_batch)
        schedule = make_schedule(layout.schedule, layout.pp, config.pipeline.microbatches, layout.chunks)
        told = tuple(predict(config, schedule, rank) for rank in range(layout.pp))
        assert layout_memory(model, layout, global_batch) == told, layout.text()
        stages = stage_memory(model, layout, global_batch, MACHINE)
        assert [stage.peak_bytes for stage in stages] == [rank.total - rank.checkpoint for rank in told]


def test_states_a_parameter() -> None:
    def all_bytes(model, **keys) -> int:
        return sum(state_bytes(model.shape, Layout(trainer="megatron", **keys)))

    assert all_bytes(GPT, precision="bf16", shard="states") == 20
    assert all_bytes(GPT, precision="bf16") == 18
    assert all_bytes(GPT, precision="fp16", shard="states") == 16
    assert all_bytes(LLAMA, precision="bf16", shard="states") == 16
    assert all_bytes(GPT, precision="bf16", shard="all") == 16
    assert all_bytes(GPT, precision="fp32") == 16
    assert all_bytes(GPT, precision="bf16", shard="states", gradient_bytes=4) == 18


def test_a_device_needs_more_than_tensors() -> None:
    layout = Layout(dp=2, pp=4, micro_batch=2, trainer="megatron", recompute="full")
    for stage in stage_memory(GPT, layout, 64, MACHINE):
        assert stage.allocated_bytes < stage.peak_bytes < stage.device_bytes
        assert stage.device_bytes < stage.shown_bytes(1e15)
        assert stage.shown_bytes(0.0) == stage.device_bytes


def test_a_batch_that_does_not_divide() -> None:
    for trainer in ("megatron", "hpcllm"):
        with pytest.raises(ConfigError, match="global_batch = 65"):
            stage_memory(GPT, Layout(dp=2, trainer=trainer), 65, MACHINE)
