"""What each rank holds is told by the run file, or refused with what would fit."""

from __future__ import annotations

import pytest

from hpcllm.config import schema as configs
from hpcllm.config.schema import Config
from hpcllm.errors import MeshError, ScheduleError
from hpcllm.pipeline.actions import Placement
from hpcllm.pipeline.schedules import SCHEDULES, make_schedule
from hpcllm.plan.resolve import check_layout, check_vocabulary, layer_spans, recompute_levels, run_schedule


def config_of(blocks: int = 8, pp: int = 2, batch: int = 12, **pipeline) -> Config:
    model, data = {"layers": blocks, "vocabulary": 300}, {"global_batch": batch}
    return configs.from_tables({"model": model, "data": data, "mesh": {"pp": pp}, "pipeline": pipeline})


def test_layers_are_divided_as_told():
    spans = layer_spans(config_of(8, layers=[3, 2, 1, 2]), Placement(2, 2))
    assert [(span.first_block, span.last_block) for span in spans] == [(0, 3), (3, 5), (5, 6), (6, 8)]
    assert [span.has_embedding for span in spans] == [True, False, False, False]
    assert [span.has_head for span in spans] == [False, False, False, True]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("blocks", range(1, 13))
def test_layers_are_divided_over_all_virtual_stages_of_any_schedule_if_there_are_enough(name, blocks):
    for pp in (1, 2, 3, 4):
        config = config_of(blocks, pp, schedule=name, microbatches=3)
        placement = run_schedule(config, "").placement
        if placement.stages > blocks:
            with pytest.raises(MeshError, match=rf"is {placement.stages} stages, but model.layers = {blocks}"):
                layer_spans(config, placement)
            continue
        spans = layer_spans(config, placement)
        held = [block for span in spans for block in range(span.first_block, span.last_block)]
        assert held == list(range(blocks))
        assert len(spans) == placement.stages
        assert all(span.first_block < span.last_block for span in spans)


@pytest.mark.parametrize(
    ("blocks", "placement", "layers", "said"),
    [
        (
            3,
            Placement(2, 2, "v"),
            [],
            ["mesh.pp = 2 with 2 chunks a rank is 4 stages", "pp from 1 to 1", "layers >= 4"],
        ),
        (2, Placement(1, 3), [], ["is 3 stages", "pipeline.chunks from 1 to 2"]),
        (
            8,
            Placement(2),
            [2, 2, 2, 2],
            ["[2, 2, 2, 2] names 4 stages", "with 1 chunk a rank is 2", "2 numbers that add"],
        ),
        (8, Placement(4), [8], ["[8] names 1 stage,", "is 4"]),
    ],
)
def test_a_division_that_does_not_fit_is_refused_with_what_does(blocks, placement, layers, said):
    with pytest.raises(MeshError) as refused:
        layer_spans(config_of(blocks, layers=layers), placement)
    assert [part for part in said if part not in str(refused.value)] == []


def test_the_schedule_of_a_file_is_run_as_it_stands():
    schedule = make_schedule("zb-v", 2, 5)
    config = config_of(pp=2, batch=10, schedule="custom", file="mine.txt", microbatches=5)
    assert run_schedule(config, schedule.text()) == schedule


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("pp", 3, r"mesh\.pp = 3, .*'mine.txt' is for 2; set mesh\.pp=2"),
        ("microbatches", 4, r"pipeline\.microbatches = 4, .* is for 5; set pipeline\.microbatches=5"),
        ("chunks", 3, r"pipeline\.chunks = 3, .* is for 2; set pipeline\.chunks=2"),
    ],
)
def test_a_file_of_another_shape_than_the_run_is_refused(key, value, said):
    tables = {"pp": 2, "microbatches": 5} | {key: value}
    config = config_of(schedule="custom", file="mine.txt", **tables)
    with pytest.raises(ScheduleError, match=said):
        run_schedule(config, make_schedule("zb-v", 2, 5).text())


def test_what_the_batch_cannot_be_cut_into_is_refused():
    assert check_layout(config_of(pp=2, batch=12, microbatches=3), 4).mesh.dp == 2
    with pytest.raises(MeshError, match=r"microbatches = 4 does not divide the 6 samples .* valid: 1, 2, 3, 6"):
        check_layout(config_of(pp=2, batch=12, microbatches=4), 4)


@pytest.mark.parametrize("tp", range(1, 9))
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", [(4, 0, 352, 256), (12, 4, 48, 18), (6, 3, 9, 9), (8, 8, 24, 7)], ids=str)
def test_layers_are_split_into_equal_parts_or_the_size_is_named_with_those_that_divide(sizes, sequence_parallel, tp):
    heads, kv_heads, ffn, length = sizes
    model = {"hidden": 96, "head_channels": 8, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    mesh = {"tp": tp, "sequence_parallel": sequence_parallel}
    tables = {"model": model, "data": {"sequence_length": length}, "mesh": mesh}
    config = configs.from_tables(tables)
    split = [heads, kv_heads or heads, ffn, *([length] if sequence_parallel else [])]
    fits = [size for size in range(1, 513) if not any(part % size for part in split)]
    if tp in fits:
        assert check_layout(config, tp).mesh.tp == tp
        return
    with pytest.raises(MeshError, match=rf"mesh\.tp = {tp} does not divide (model|data)\.\w+ = \d+; valid") as refused:
        check_layout(config, tp)
    assert f": {', '.join(map(str, fits))}; or make" in str(refused.value)


def test_a_vocabulary_with_less_tokens_than_ranks_that_split_it_is_refused():
    few = configs.from_tables({"model": {"vocabulary": 3}, "mesh": {"tp": 4}})
    with pytest.raises(MeshError, match=r"mesh\.tp = 4 is more than the 3 tokens .* valid: 1 to 3"):
        check_vocabulary(few)
    check_vocabulary(configs.from_tables({"model": {"vocabulary": 4}, "mesh": {"tp": 4}}))


@pytest.mark.parametrize(
    ("words", "placement", "found"),
    [
        ("full", Placement(2, 2), ["full"] * 4),
        ("full,none,selective,none", Placement(2, 2), ["full", "none", "selective", "none"]),
        ("full,none", Placement(2), ["full", "none"]),
        ("selective", Placement(1), ["selective"]),
    ],
)
def test_one_word_of_recomputation_is_for_all_stages_and_more_are_one_each(words, placement, found):
    assert recompute_levels(config_of(recompute=words), placement) == found


@pytest.mark.parametrize("words", ["full,none,none", "full,none"])
def test_words_of_recomputation_that_are_not_as_many_as_stages_are_refused(words):
    said = r"pipeline\.recompute = .* has \d words, .* with 2 chunks a rank is 4 stages; valid: one word for all, or 4"
    with pytest.raises(MeshError, match=said):
        recompute_levels(config_of(recompute=words), Placement(2, 2))
