"""The engine keeps the clock's promise: stages that sleep take the time and the memory that the schedule predicts.

perf/pipeline_sleep.py measures this with up to 8 ranks on a quiet machine, to a few percent; here the machine may be
busy, so only gross faults show: a send that blocks, a receive that comes late, a rank that does things in turn.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from hpcllm.config.schema import MeshConfig
from hpcllm.mpi.mesh import open_mesh
from hpcllm.pipeline.schedules import SCHEDULES, make_schedule
from hpcllm.pipeline.timing import Times, simulate

SCRIPT = Path(__file__).parents[2] / "perf" / "pipeline_sleep.py"
UNIT_S = 0.02


@pytest.fixture(scope="module")
def pipeline_sleep():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = sys.modules[SCRIPT.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full(reason="stages that sleep, a tenth of a minute", in_ci=True)
@pytest.mark.parallel([2, 4])
def test_schedules_take_the_time_and_memory_that_the_clock_predicts(comm, pipeline_sleep):
    records = pipeline_sleep.measure(comm, 4, Times(forward=UNIT_S, backward=2 * UNIT_S, weight=UNIT_S), repeats=2)
    assert [record["schedule"] for record in records] == list(SCHEDULES)
    for record in records:
        assert record["peak_live"] == record["predicted_peak_live"]
        assert 0.99 * record["predicted_s"] <= min(record["all_s"]) <= 1.5 * record["predicted_s"]


@pytest.mark.parallel([2, 4])
def test_a_slow_stage_is_slow_in_the_prediction_too(comm, pipeline_sleep):
    schedule = make_schedule("1f1b", comm.size, 3)
    slow = Times(forward=UNIT_S, backward=4 * UNIT_S, weight=UNIT_S)
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        seconds = [
            pipeline_sleep.run_s(pipeline_sleep.sleeping_engine(mesh, schedule, slow), schedule, comm) for _ in range(2)
        ]
    predicted_s = simulate(schedule, slow).makespan
    assert 0.99 * predicted_s <= min(seconds) <= 1.5 * predicted_s
