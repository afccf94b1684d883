"""Kill -9 of a rank, a few times: perf/checkpoint_crash.py does it two hundred times."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from small_runs import store

SCRIPT = Path(__file__).parents[2] / "perf" / "checkpoint_crash.py"


@pytest.fixture
def crash(monkeypatch):
    """The script as a module, with shorter runs."""
    specification = importlib.util.spec_from_file_location("checkpoint_crash", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, specification.name, module)
    specification.loader.exec_module(module)
    module.RUN.update({"run.steps": 12, "model.hidden": 128, "model.ffn": 256})
    return module


@pytest.mark.full(reason="runs on two ranks are killed and continued several times, a minute of work")
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds the ranks in /proc")
def test_a_killed_run_goes_on_and_ends_with_the_same_bits(crash):
    want, whole_s = crash.reference(str(store()), ranks=2)
    assert sorted(want.losses) == list(range(1, 13))
    records = crash.episode(str(store()), 2, want, whole_s, kills=3, rng=random.Random(1))  # the first one in a write
    assert records
