"""What a run has taken: sums over nodes and starts, whatever was lost with an earlier job."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.config.schema import EnergyConfig
from hpcllm.system.energy.account import Account, rows, taken_before

FREE = EnergyConfig()
PRICED = EnergyConfig(price_per_kwh=0.25, price_per_node_hour=2.0)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e9), st.integers(0, 10**9)), min_size=1, max_size=5))
def test_starts_add_up(starts):
    before: dict = {}
    for seconds, joules, tokens in starts:
        account = Account(2, 16, "gpu", True, PRICED, before, joules, joules / 2, tokens)
        before = account.record(seconds)
    seconds, joules, tokens = (sum(column) for column in zip(*starts, strict=True))
    assert before["node_hours"] == pytest.approx(2 * seconds / 3600)
    assert before["gpu_hours"] == pytest.approx(16 * seconds / 3600)
    assert before["energy_kwh"] == pytest.approx(joules / 3.6e6)
    assert before["energy_tokens"] == tokens
    assert before["cost"] == pytest.approx(0.25 * joules / 3.6e6 + 2 * 2 * seconds / 3600)
    if joules > 1:
        assert before["tokens_per_kwh"] == pytest.approx(3.6e6 * tokens / joules)


def test_what_nobody_measured_is_not_said_to_be_nothing():
    record = Account(1, 4, "core", False, FREE).record(3600)
    assert record == {"node_hours": 1, "core_hours": 4}


def test_a_run_that_moves_from_cpus_to_gpus_has_hours_of_both():
    first = Account(1, 64, "core", False, FREE).record(3600)
    second = Account(1, 8, "gpu", True, FREE, first, 3.6e6, 0.0, 10).record(3600)
    assert (second["node_hours"], second["core_hours"], second["gpu_hours"]) == (2, 64, 8)
    assert second["tokens_per_kwh"] == 10


@pytest.mark.parametrize("torn", ["", '{"step": 9, "node_h', '{"step": 9}\n', "[1]\n", "7\n"])
def test_the_newest_sums_of_a_log_are_found_behind_whatever_a_job_left(tmp_path, torn):
    log = tmp_path / "log.jsonl"
    lines = [{"step": step, "node_hours": step / 2} for step in range(1, 9)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    assert taken_before(log)["node_hours"] == 4


def test_a_log_without_sums_or_no_log_begins_at_nothing(tmp_path):
    assert taken_before(tmp_path / "log.jsonl") == {}
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert taken_before(tmp_path / "log.jsonl") == {}


def test_people_are_told_what_was_measured():
    total = Account(2, 16, "gpu", True, PRICED, {}, 7.2e6, 0.0, 10**6).record(7200) | {
        "energy_scope": "GPUs only (nvml)"
    }
    told = dict(rows(total))
    assert told["taken"] == "4 node-hours, 32 GPU-hours"
    assert told["energy"] == "2 kWh (GPUs only (nvml)), 500,000 tokens/kWh"
    assert told["cost"].startswith("8.50")
