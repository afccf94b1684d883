"""The bytes that are predicted are those that a run counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import small_runs

from hpcllm.assemble import Parts
from hpcllm.collectives import select
from hpcllm.layout import check_layout, schedule_of
from hpcllm.metrics import TRAFFIC
from hpcllm.reorder.traffic import step_traffic

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
    monkeypatch.setattr(select, "_rule", lambda *_: "ring")
    config = small_runs.tiny(**LAYOUTS[layout])

    def counted(parts: Parts) -> dict[str, float]:
        steps = np.zeros(len(TRAFFIC))
        parts.optimizer.settle()  # no gather is still on its way
        before = parts.traffic()
        small_runs.run_steps(parts, STEPS, first=1)
        parts.optimizer.settle()
        comm.Allreduce(parts.traffic() - before, steps)
        return dict(zip(TRAFFIC, steps / STEPS, strict=True))

    def of_run(parts: Parts) -> Any:
        return parts.config, counted(parts)

    complete, measured = small_runs.losses(config, comm, steps=1, then=of_run)
    complete = check_layout(complete, comm.size)
    traffic = step_traffic(complete, schedule_of(complete, "").placement)
    apart = np.arange(comm.size).reshape(complete.mesh.dp, complete.mesh.pp, complete.mesh.tp)
    predicted = traffic.crossing(apart)
    for kind, size in predicted.items():  # besides: the loss over tp, sums of norms
        assert measured[f"{kind}_plain_bytes"] == pytest.approx(size, rel=0.02, abs=1000), kind
