"""What cannot be is refused before it is timed: by key, value and what would be valid."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hpcllm.plan
from hpcllm.errors import UserError
from hpcllm.plan import predict
from hpcllm.plan.layouts import Layout, parse_layout
from hpcllm.plan.models import read_model, stage_spans
from hpcllm.plan.run_config import check_fit

MODEL = "layers=6,hidden=96,heads=6,kv_heads=3,ffn=192,gated=true,vocab=1000,sequence=60"

WRONG = [
    ("tp=4", 8, r"tp = 4 does not divide model\.heads = 6; valid tp .*: 1, 3"),
    ("tp=2", 8, r"tp = 2 does not divide model\.kv_heads = 3"),
    ("pp=7", 7, r"pp = 7 .* model\.layers = 6.*valid: mesh\.pp from 1 to 6"),
    ("pp=2,chunks=4,schedule=interleaved", 8, r"8 stages, but model\.layers = 6"),
    ("dp=3", 8, r"global_batch = 8 is not dp x micro_batch .* valid: multiples of 3"),
    ("dp=2,micro_batch=8", 8, r"global_batch = 8 .*micro_batch = 8; valid: multiples of 16"),
    ("pp=2,schedule=zb-v,chunks=3", 8, r"zb-v divides .* into 2 chunks, not 3; chunks = 2 works"),
    ("pp=2,schedule=gpipe,chunks=2", 8, r"gpipe divides .* into 1 chunk, not 2"),
]


@pytest.mark.parametrize("trainer", ["hpcllm", "megatron"])
@pytest.mark.parametrize(("layout", "global_batch", "told"), WRONG)
def test_what_cannot_be_is_refused_for_every_trainer(layout, global_batch, told, trainer):
    with pytest.raises(UserError, match=told):
        predict("lumi-g", MODEL, f"{layout},trainer={trainer}", global_batch)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ("attention=materialized", r"layout\.attention = 'materialized' with trainer=hpcllm.*valid: attention=flash"),
        ("norm=unfused", r"layout\.norm = 'unfused'"),
        ("gradient_bytes=2", r"layout\.gradient_bytes = 2"),
        ("dp=2,pp=2,shard=all", r"shard = 'all' with mesh\.pp = 2"),
    ],
)
def test_our_trainer_refuses_what_it_has_not(layout, told):
    model = read_model(MODEL)
    with pytest.raises(UserError, match=told):
        check_fit(model, parse_layout(layout, trainer="hpcllm"), 8)
    check_fit(model, parse_layout(layout, trainer="megatron"), 8)


@pytest.mark.parametrize("trainer", ["hpcllm", "megatron"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 6])
def test_every_stage_has_a_block_and_every_block_a_stage(trainer, stages):
    spans = stage_spans(read_model(MODEL), Layout(pp=stages, trainer=trainer))
    assert [span.first_block for span in spans] == [0, *(span.last_block for span in spans[:-1])]
    assert spans[-1].last_block == 6
    assert all(span.first_block < span.last_block for span in spans)


def test_the_package_names_what_it_exports():
    for name in hpcllm.plan.__all__:
        assert getattr(hpcllm.plan, name).__name__ == name
    assert set(hpcllm.plan.MODULES) == set(hpcllm.plan.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trainer'"):
        hpcllm.plan.trainer  # noqa: B018


def test_planning_needs_neither_torch_nor_mpi():
    code = (
        "import sys, hpcllm.plan as plan\n"
        "plan.search('lumi-g', 'gpt2-124m', 8, 16, top=1)\n"
        "print([name for name in ('torch', 'mpi4py', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
