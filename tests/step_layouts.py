"""Layouts of small runs whose steps are counted on the pretended device: test_step_counts.py, perf/step_counts.py.

A run has 2 layers, 192 tokens a step, 3 microbatches and weights in fp32 where it is not said otherwise. Pure.
"""

from __future__ import annotations

from typing import Any

MICROBATCHES, TOKENS = 3, 192  # of a step
FIRST = 2  # steps before the one that is counted: memory is taken, sums are late
Tables = dict[str, dict[str, Any]]
BF16 = {"compute": "bf16"}
LAYOUTS: dict[str, tuple[int, Tables]] = {  # ranks, and what the run has otherwise
    "dp=1": (1, {}),
    "dp=1, bf16": (1, {"precision": BF16}),
    "dp=1, documents": (1, {"precision": BF16, "data": {"packing": "best-fit"}}),
    "dp=1, offload": (1, {"precision": BF16, "optimizer": {"offload": True}, "pipeline": {"offload": True}}),
    "dp=2": (2, {}),
    "dp=2, int8": (2, {"precision": BF16, "communication": {"gradients": "int8:256", "exact_steps": 1}}),
    "shard=states": (2, {"precision": BF16, "optimizer": {"shard": "states"}}),
    "shard=states+gradients": (2, {"precision": BF16, "optimizer": {"shard": "states+gradients"}}),
    "shard=all": (2, {"optimizer": {"shard": "all"}}),
    "pp=2": (2, {"mesh": {"pp": 2}}),
    "pp=2, bf16": (2, {"mesh": {"pp": 2}, "precision": BF16}),
    "tp=2": (2, {"mesh": {"tp": 2}}),
}


def tables_of(layout: str, mpi_reads_devices: bool) -> Tables:
    """Tables of the run of a layout, for small_runs.tiny."""
    tables = LAYOUTS[layout][1]
    reach = {"bucket_mib": 0.02, "gpu_aware": "yes" if mpi_reads_devices else "no"}
    base: Tables = {"pipeline": {"microbatches": MICROBATCHES}, "communication": reach}
    return {name: base.get(name, {}) | tables.get(name, {}) for name in {**base, **tables}}
