"""The bytes that are predicted are those that a run counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import small_runs

from hpcllm.collectives import auto
from hpcllm.model.shapes import parameter_count
from hpcllm.plan.rank_order.traffic import staged_s, step_traffic
from hpcllm.plan.resolve import check_layout, run_schedule
from hpcllm.training.log import TRAFFIC
from hpcllm.training.setup import RunContext

STEPS = 2
MICROBATCHES = {"pipeline": {"microbatches": 3}}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2, "microbatches": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "dp, sharded states": {"optimizer": {"shard": "states"}},
    "dp, sharded gradients": MICROBATCHES | {"optimizer": {"shard": "states+gradients"}},
    "dp, all sharded": MICROBATCHES | {"optimizer": {"shard": "all"}},
    "pp, two chunks": {"mesh": {"pp": 2}, "pipeline": INTERLEAVED, "model": {"layers": 4, "tied": False}},
    "pp, bf16": {"mesh": {"pp": 2}, "precision": {"compute": "bf16"}},
    "tp": {"mesh": {"tp": 2}},
    "tp, made again": {"mesh": {"tp": 2}, "pipeline": {"recompute": "full"}},
    "tp, sequence parallel": {"mesh": {"tp": 2, "sequence_parallel": True}},
}


@pytest.mark.parallel(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_counts_what_was_predicted(comm, layout: str, monkeypatch) -> None:
    # what ranks of a node do in memory that they share is not counted, nor what the library does; messages are
    monkeypatch.setattr(auto, "by_rule", lambda *_, **__: "ring")
    config = small_runs.tiny(**LAYOUTS[layout])

    def counted(run: RunContext) -> dict[str, float]:
        steps = np.zeros(len(TRAFFIC))
        run.optimizer.settle()  # no gather is still on its way
        before = run.traffic()
        small_runs.run_steps(run, STEPS, first=1)
        run.optimizer.settle()
        comm.Allreduce(run.traffic() - before, steps)
        return dict(zip(TRAFFIC, steps / STEPS, strict=True))

    def of_run(run: RunContext) -> Any:
        return run.config, counted(run)

    complete, measured = small_runs.losses(config, comm, steps=1, then=of_run)
    complete = check_layout(complete, comm.size)
    traffic = step_traffic(complete, run_schedule(complete, "").placement)
    apart = np.arange(comm.size).reshape(complete.mesh.dp, complete.mesh.pp, complete.mesh.tp)
    predicted = traffic.crossing(apart)
    for kind, size in predicted.items():  # besides: the loss over tp, sums of norms
        assert measured[f"{kind}_plain_bytes"] == pytest.approx(size, rel=0.02, abs=1000), kind


@pytest.mark.parametrize("dp", [2, 3, 8])
def test_staged_sums_take_their_bytes_to_the_host_and_back(dp):
    """By 25 GB/s each way over the link to the host, and 5 GB/s from process to process there."""
    base = small_runs.tiny(mesh={"dp": dp}, data={"global_batch": 2 * dp})
    config = check_layout(dataclasses.replace(base, model=dataclasses.replace(base.model, vocabulary=300)), dp)
    sent = 2 * (dp - 1) / dp * 4 * parameter_count(config.model)
    assert staged_s(config, run_schedule(config, "").placement) == pytest.approx(sent * (2 / 25 + 1 / 5) / 1e9)
