"""16-bit runs learn, and an overflow is what all ranks agree on: the step is skipped and the scale halved."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from small_runs import losses, run_steps, tiny

from hpcllm.checkpoint.folder import newest_first
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.config.schema import Config
from hpcllm.errors import NonFiniteError
from hpcllm.system.device import torch_dtype
from hpcllm.system.job import StopSignals
from hpcllm.training import loop as train_module
from hpcllm.training.step import LARGEST_SCALE, LossScale, make_loss_scale

LEVELS = ["none", "states", "states+gradients", "all"]
FP16 = {"compute": "fp16", "loss_scale": 1024.0}


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.sampled_from([1.0, 3.0, 65536.0]))
def test_a_scale_is_halved_at_each_overflow_and_doubled_after_good_steps(overflows, double_after, first):
    scale, value, good = LossScale(first, double_after), first, 0
    for does_overflow in overflows:
        if does_overflow:
            assert scale.overflow() == (value > 1)
            value, good = max(value / 2, 1.0), 0
        else:
            scale.good_step()
            good += 1
            if good == double_after:
                value, good = min(2 * value, LARGEST_SCALE), 0
        assert (scale.value, scale.good_steps) == (value, good)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_only_fp16_scales_the_loss(compute):
    config = Config()
    object.__setattr__(config.precision, "compute", compute)
    scale = make_loss_scale(config)
    for _ in range(config.precision.loss_scale_steps):
        scale.good_step()
    scale.restore(512.0, 7)
    assert (scale.value, scale.is_dynamic) == ((512.0, True) if compute == "fp16" else (1.0, False))
    assert (
        str(torch_dtype(config.precision.compute))
        == f"torch.{({'fp32': 'float32', 'bf16': 'bfloat16', 'fp16': 'float16'})[compute]}"
    )


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("shard", LEVELS)
def test_sixteen_bits_follow_fp32(comm, compute, shard):
    # an epsilon that counts: without it AdamW would not notice gradients that are too large by a constant
    rates = {"learning_rate": 2e-2, "warmup_steps": 5, "epsilon": 0.02}
    want = losses(tiny(optimizer=rates), MPI.COMM_SELF)[:, 0]
    config = tiny(
        precision={**FP16, "compute": compute},
        optimizer={**rates, "shard": shard},
        pipeline={"microbatches": 2, "schedule": "zb-h1"},
    )
    got = losses(config, comm)[:, 0]
    np.testing.assert_allclose(got, want, rtol=2e-3)
    assert got[-1] < 0.8 * got[0]


def poison(gradients, victim, value) -> None:
    """Give a weight a gradient of this value, until `gradients.added` is deleted."""
    added = gradients.added

    def spoil(parameter) -> None:
        if parameter is victim:
            gradients.total(parameter)[0].fill_(value)
        added(parameter)

    gradients.added = spoil


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize("gradients", ["raw", "int8:256", "zfp:16"])
def test_an_overflow_on_one_rank_is_skipped_by_all(comm, shard, gradients):
    """The weights stay to the bit, no update is counted, and the next step is as if nothing had happened."""
    config = tiny(
        precision=FP16,
        optimizer={"learning_rate": 3e-3, "warmup_steps": 0, "shard": shard},
        communication={"gradients": gradients, "bucket_mib": 0.02, "exact_steps": 0, "exact": "norm"},
    )

    def poisoned_step(parts) -> None:
        run_steps(parts, 2)
        before = weights(parts)
        if comm.rank == comm.size - 1:
            poison(parts.gradients, parts.parameters["blocks.1.ffn.down.weight"], math.inf)
        seen = run_steps(parts, 1, first=2)
        assert not np.isfinite(seen[0, 1])
        assert np.isfinite(seen[0, 0])
        if comm.rank == comm.size - 1:
            del parts.gradients.added
        assert weights(parts) == before
        assert (parts.optimizer.updates, parts.loss_scale.value) == (2, 512.0)
        assert {share.updates for share in parts.optimizer.shares} == {2}
        assert np.all(np.isfinite(run_steps(parts, 1, first=3)))
        assert weights(parts) != before
        assert parts.optimizer.updates == 3

    losses(config, comm, 0, poisoned_step)


def weights(parts) -> list[bytes]:
    return [p.values.view(torch.uint8).numpy().tobytes() for p in parts.optimizer.pieces_to_write()]


def fp16_run(name: str, steps: int, **tables) -> Config:
    # the rate's cosine ends at run.steps, so a part needs a rate that does not depend on it
    flat = {"learning_rate": 3e-3, "warmup_steps": 2, "final_fraction": 1.0}
    base = tiny(precision={"compute": "fp16", "loss_scale": 2.0**24, "loss_scale_steps": 3}, optimizer=flat)
    run = {"name": name, "folder": base.run.folder, "steps": steps}
    precision = {"compute": "fp16", "loss_scale": 2.0**24, "loss_scale_steps": 3}
    return tiny(**{"run": run, "precision": precision, "optimizer": flat, **tables})


def log_of(config: Config) -> list[dict]:
    text = (Path(config.run.folder) / config.run.name / "log.jsonl").read_text()
    records = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]  # no NaN, no Infinity
    return [record for record in records if "loss" in record]


@pytest.mark.parallel([1, 2])
def test_a_run_finds_its_scale_and_a_resumed_one_goes_on_with_it_to_the_bit(comm):
    def run(config: Config):
        with StopSignals() as signals:
            summary = train_module.train(config, comm, signals, restart=False)
        comm.Barrier()
        return summary

    straight = run(fp16_run(f"fp16 straight {comm.size}", 16))
    for steps in (5, 16):
        cut = run(fp16_run(f"fp16 cut {comm.size}", steps))
    records = log_of(fp16_run(f"fp16 straight {comm.size}", 16))
    skipped = [record["skipped_steps"] for record in records]
    assert skipped[0] == 1  # 2^24 is too much
    assert records[0]["grad_norm"] is None
    assert records[0]["loss_scale"] == 2.0**23
    assert sum(record["grad_norm"] is None for record in records) == skipped[-1] < 16
    assert any(after["loss_scale"] > before["loss_scale"] for before, after in pairwise(records))
    assert [r["loss"] for r in log_of(fp16_run(f"fp16 cut {comm.size}", 16))] == [r["loss"] for r in records]
    paths = [straight.checkpoint, cut.checkpoint]
    contents = []
    for path in paths:
        with Checkpoint.open(path) as checkpoint:
            contents.append({name: checkpoint.read_whole(name).tobytes() for name in checkpoint.datasets})
            assert checkpoint.attributes["run/updates"] == 16 - skipped[-1]
    assert contents[0] == contents[1]
    assert records[-1]["loss"] < records[0]["loss"]


@pytest.mark.parallel([1, 2])
def test_a_gradient_that_overflows_at_scale_one_ends_the_run(comm, monkeypatch):
    """No scale would help: from the third step on, one rank's gradient is infinite."""
    step = train_module.forward_backward

    def poisoned(parts, number, position):
        if number == 2 and comm.rank == 0:
            poison(parts.gradients, parts.parameters["blocks.0.attention.key.weight"], math.inf)
        return step(parts, number, position)

    monkeypatch.setattr(train_module, "forward_backward", poisoned)
    run = {"name": f"ends {comm.size}", "folder": tiny().run.folder, "steps": 40}
    config = tiny(run=run, precision={"compute": "fp16", "loss_scale": 1.0})
    match = r"step 3: loss [\d.]+, gradient norm (nan|inf), .*bf16.*loss scale is 1"
    with pytest.raises(NonFiniteError, match=match), StopSignals() as signals:
        train_module.train(config, comm, signals, restart=False)
    comm.Barrier()
    assert newest_first(Path(config.run.folder) / config.run.name / "checkpoints") == []
