"""--explain: what it lists adds up to what is predicted."""

from __future__ import annotations

import pytest

from hpcllm.plan.explain import arithmetic, as_json, lines
from hpcllm.plan.prediction import predict

GPT = "layers=8,hidden=1024,heads=16,vocab=8192,sequence=512"
LLAMA = "layers=8,hidden=1024,heads=16,kv_heads=4,ffn=2816,gated=true,vocab=8192,sequence=512"
LAYOUTS = [
    "tp=1",
    "tp=4,dp=2,shard=states",
    "tp=4,dp=2,sequence_parallel=true,recompute=selective",
    "pp=4,dp=2,recompute=full,micro_batch=2",
    "pp=2,chunks=2,tp=2,dp=2,recompute=selective,attention=materialized",
    "pp=2,schedule=zb-v,tp=2",
    "dp=8,shard=all",
    "pp=8,precision=fp16,norm=unfused",
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trainer", ["megatron", "hpcllm"])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_kernels_add_up_to_compute(model, trainer, layout):
    if trainer == "hpcllm" and ("attention" in layout or "norm" in layout):
        pytest.skip("ours has one kind of each")
    found = predict("perlmutter", model, f"{layout},trainer={trainer}", 32)
    worked = arithmetic(found)
    assert sum(row.total_s for row in worked.kernels) == pytest.approx(found.compute_s, rel=1e-9)
    products = sum(row.flops * row.times for row in worked.kernels if row.name.startswith("product"))
    assert products > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_axis_with_several_ranks_has_its_messages(layout):
    found = predict("perlmutter", GPT, layout, 32)
    axes = {one.axis for one in arithmetic(found).exchanged}
    assert axes == {axis for axis in ("tp", "pp", "dp") if getattr(found.layout, axis) > 1}
    assert all(one.seconds > 0 and one.size_bytes > 0 for one in arithmetic(found).exchanged)


def test_the_text_has_every_sum():
    found = predict("perlmutter", GPT, "tp=2,pp=2,dp=2,shard=states", 32)
    told = "\n".join(lines(found, 1e9))
    for seconds in (found.compute_s, found.tp_s, found.bubble_s, found.iteration_time_s):
        assert f"{seconds:.4g} s" in told
    facts = as_json(found, 1e9)
    assert sum(row["total_s"] for row in facts["kernels"]) == pytest.approx(facts["compute_s"])
    assert len(facts["passes"]) == 2
