"""The picture of checkpoints has a panel for each kind of figure that there is."""

from __future__ import annotations

import pytest

from hpcllm.evaluation.picture import PANELS, draw

FIGURE = {"value": 0.5, "stderr": 0.1, "low": 0.3, "high": 0.7}


@pytest.mark.parametrize("key", [*PANELS, "pass@1", "pass@10"])
def test_every_figure_that_a_task_can_have_alone_is_drawn(tmp_path, key):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    reports = [{"step": step, "tasks": [{"task": "a task", "figures": {key: FIGURE}}]} for step in (3, 20)]
    draw(reports, tmp_path / "a picture.svg")
    text = (tmp_path / "a picture.svg").read_text()
    assert PANELS.get(key, f"problems that pass, {key}") in text
    assert "a task" in text
