"""perf/plan: the rows of published runs are sound, the comparison counts right, and the planner is near what can be
compared in seconds; all of it is in perf/plan/published.md."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hpcllm.plan.layouts import parse_layout
from hpcllm.plan.models import read_model

FOLDER = Path(__file__).parents[2] / "perf" / "plan"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("compare")
    finally:
        sys.path.remove(str(FOLDER))


def test_rows_can_be_planned(compare: ModuleType) -> None:
    rows = compare.read_rows()
    assert len({(row.table, row.id) for row in rows}) == len(rows) > 500
    for row in rows:
        layout, model = parse_layout(row.layout), read_model(row.model)
        assert layout.microbatches(row.global_batch) >= 1
        assert layout.pp * layout.chunks <= model.shape.layers
        assert row.oom != (row.time_s is not None), "a row ran or it did not"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 1000], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [2, 1, 4, 3], 0.6),
        ([1, 1, 2, 2], [5, 5, 9, 9], 1.0),
        ([1, 2, 3], [7, 7, 7], 0.0),
    ],
)
def test_rank_correlation(compare: ModuleType, first: list[float], second: list[float], expected: float) -> None:
    assert compare.rank_correlation(first, second) == pytest.approx(expected)
    assert compare.rank_correlation(second, first) == pytest.approx(expected)


@pytest.mark.parametrize("table", ["megatron-2021", "lumi-175b", "mpt-a100-40-held-out", "mpt-h100-held-out"])
def test_predictions_are_near_what_was_published(compare: ModuleType, table: str) -> None:
    summary = compare.time_summary(compare.compare(row for row in compare.read_rows() if row.table == table))
    assert summary["median_error"] < 0.1
    assert abs(summary["worst_error"]) < 0.3
