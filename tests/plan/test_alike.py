"""Stages and ranks that are grouped as alike are alike in all that decides their times."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.plan.alike import alike
from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import read_machine
from hpcllm.plan.models import homes_of, kind_of, kinds_of, placement_of, read_model, stage_spans
from hpcllm.plan.time.topology import way

MODEL = read_model("layers=24,hidden=64,heads=4,vocab=5000,sequence=32")
MACHINES = {name: read_machine(name) for name in ("lumi-g", "dgx-a100", "summit")}


@st.composite
def layouts(draw):
    schedule, chunks = draw(st.sampled_from([("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-v", 2)]))
    return Layout(
        dp=draw(st.sampled_from([1, 2, 3])),
        pp=draw(st.integers(1, 6)),
        tp=draw(st.sampled_from([1, 2, 4])),
        order=draw(st.sampled_from(["tp,dp,pp", "tp,pp,dp", "pp,tp,dp"])),
        schedule=schedule,
        chunks=chunks,
        trainer=draw(st.sampled_from(["hpcllm", "megatron"])),
    )


@settings(max_examples=200, deadline=None)
@given(layouts(), st.sampled_from(sorted(MACHINES)))
def test_each_stage_and_rank_is_what_its_group_says(layout, name):
    device = MACHINES[name].device
    found = alike(MODEL, layout, device)
    spans, placement = stage_spans(MODEL, layout), placement_of(layout)
    homes = homes_of(placement)

    def path(source: int, target: int):
        return way(layout, source, target, device.per_node, device.per_package) if source != target else None

    for stage, (span, here) in enumerate(zip(spans, homes, strict=True)):
        one = found.stages[found.of_stages[stage]]
        assert one.kind == kind_of(span)
        assert one.after == (path(here, homes[stage + 1]) if stage + 1 < len(homes) else None)
        assert one.before == (path(here, homes[stage - 1]) if stage else None)
    for rank in range(layout.pp):
        assert found.ranks[found.of_ranks[rank]] == kinds_of(spans, placement, rank)
    assert all(path(*ends) == way for way, ends in found.messages.items())
    assert len(set(found.stages)) == len(found.stages)


def test_of_hundreds_of_stages_few_differ():
    model = dataclasses.replace(MODEL, shape=dataclasses.replace(MODEL.shape, layers=256))
    layout = Layout(pp=64, tp=8, dp=4, schedule="interleaved", chunks=4, trainer="hpcllm")
    found = alike(model, layout, MACHINES["dgx-a100"].device)
    assert len(found.of_stages) == 256
    assert len(found.stages) < 10
    assert len(found.ranks) < 10
