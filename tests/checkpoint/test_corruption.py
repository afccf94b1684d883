"""A sample of perf/checkpoint_corruption.py: every damage is found by verify, and none is loaded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hpcllm.config.schema import ModelConfig

SCRIPT = Path(__file__).resolve().parents[2] / "perf" / "checkpoint_corruption.py"


def test_every_damage_is_found_and_none_is_loaded():
    spec = importlib.util.spec_from_file_location("checkpoint_corruption", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    model = ModelConfig(layers=1, hidden=32, heads=2, ffn=48, vocabulary=500)
    found = script.run(30, 5, model)
    assert found.keys() == {"checkpoint", "archive"}
    for outcomes in found.values():
        assert len({one.kind for one in outcomes}) == 5
        assert len({one.region for one in outcomes}) >= 5
        assert [one for one in outcomes if one.called_sound or one.loaded] == []
        assert all(one.reason for one in outcomes)
