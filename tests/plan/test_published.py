"""perf/plan: the rows of published runs are sound, the comparison counts right, and the planner is near what can be
compared in seconds; all of it is in perf/plan/published.md."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.plan.interval import INSIDE, MANY, WIDTH, WIDTH_OF_MANY, interval_s, width
from hpcllm.plan.layouts import parse_layout
from hpcllm.plan.models import read_model

DEVICES = st.integers(1, 1 << 20)
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


def test_zero_3_is_slower_than_tensor_and_pipeline_as_was_published(compare: ModuleType) -> None:
    outcomes = compare.compare(row for row in compare.read_rows() if row.table == "megatron-2021-zero3")
    for model in ("175B", "530B"):
        rates = {
            kind: [each.prediction.tflops_per_device_model for each in outcomes if each.row.group == f"{model}, {kind}"]
            for kind in ("ZeRO-3", "tensor and pipeline")
        }
        assert len(rates["ZeRO-3"]) == 3
        for shared, split in zip(*rates.values(), strict=True):
            assert shared < split
        assert rates["ZeRO-3"] == sorted(rates["ZeRO-3"], reverse=True), "more devices at the same batch: less of each"


@given(st.floats(1e-6, 1e6), DEVICES)
def test_a_step_lies_in_its_interval_which_many_replicas_widen(step_s: float, replicas: int) -> None:
    low_s, high_s = interval_s(step_s, replicas)
    assert low_s < step_s < high_s
    wider = interval_s(step_s, replicas + MANY)
    assert wider[0] <= low_s < high_s <= wider[1]
    assert interval_s(step_s, MANY)[1] < interval_s(step_s, MANY + 1)[1]


def test_the_widths_are_those_of_rows_that_chose_constants_and_hold_for_rows_that_did_not() -> None:
    facts = json.loads((FOLDER / "published.json").read_text(encoding="utf-8"))["rows"]
    for is_many, used in ((False, WIDTH), (True, WIDTH_OF_MANY)):
        rows = [row for row in facts if (parse_layout(row["layout"]).dp > MANY) is is_many]
        distances: dict[bool, list[float]] = {True: [], False: []}
        for row in rows:
            distance = abs(math.log(row["measured_time_s"] / row["predicted_time_s"]))
            distances[row["table"].endswith("held-out")].append(distance)
        assert used == pytest.approx(width(distances[False]), abs=2e-3)
        assert sum(distance <= used for distance in distances[True]) >= (INSIDE - 0.05) * len(distances[True]) > 5


@pytest.mark.parametrize("table", ["megatron-2021", "lumi-175b", "mpt-a100-40-held-out", "mpt-h100-held-out"])
def test_predictions_are_near_what_was_published(compare: ModuleType, table: str) -> None:
    summary = compare.time_summary(compare.compare(row for row in compare.read_rows() if row.table == table))
    assert summary["median_error"] < 0.1
    assert abs(summary["worst_error"]) < 0.3
