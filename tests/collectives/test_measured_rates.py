"""Measured rates: positive, the same on every rank, about what a stopwatch says, and nobody's traffic."""

from __future__ import annotations

import time

import pytest
import torch
from mpi4py import MPI

from hpcllm.collectives import measure as measuring
from hpcllm.collectives.cost import COSTS
from hpcllm.collectives.group import group_of, make_group
from hpcllm.collectives.measure import Clock, measure
from hpcllm.collectives.tuning import Tuning, from_tables, load_tuning, to_text

FACTS = {"ranks": 1}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Sizes and samples that a test has time for."""
    monkeypatch.setattr(measuring, "SAMPLE_S", 1e-4)
    monkeypatch.setattr(measuring, "BUDGET_S", 1e-3)
    monkeypatch.setattr(measuring, "LONG_BYTES", 1 << 16)
    monkeypatch.setattr(measuring, "BEYOND_CACHES_BYTES", 1 << 20)


def numbers(value) -> list[float]:
    if isinstance(value, float):
        return [value]
    items = value.values() if isinstance(value, dict) else vars(value).values() if hasattr(value, "__dict__") else []
    return [number for item in items for number in numbers(item)]


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("nodes_of", [0, 1, 2])
def test_rates_are_complete_and_equal_on_all_ranks(comm, nodes_of, tmp_path):
    """nodes_of: ranks that count as a node; 0: as it is."""
    group = make_group(comm, comm.Split(comm.rank // nodes_of)) if nodes_of else group_of(comm)
    before = group.wire.sent_bytes, group.wire.plain_bytes
    rates = measure(group, ["bf16", "fp16"], ["float32", "bfloat16"])
    assert (group.wire.sent_bytes, group.wire.plain_bytes) == before
    assert comm.allgather(rates) == [rates] * comm.size
    assert set(rates.library) == (set(COSTS) if comm.size > 1 else set())
    assert set(rates.codings) == {(name, to) for name in ("raw", "bf16", "fp16") for to in ("float32", "bfloat16")}
    assert rates.codings["bf16", "float32"].ratio == 2
    assert all(number > 0 for number in numbers(rates))
    (tmp_path / "t").write_text(to_text(Tuning(rates, FACTS)), encoding="utf-8")
    assert load_tuning(tmp_path / "t").rates == rates
    if nodes_of:
        group.free()


@pytest.mark.parallel([1, 2, 3])
def test_the_slowest_rank_counts(comm):
    """A rank that needs 3 ms more is in the number that every rank gets."""
    slow = comm.rank == comm.size - 1
    seconds = Clock(group_of(comm)).seconds(lambda: time.sleep(3e-3 if slow else 0))
    assert 3e-3 <= seconds < 0.5
    assert comm.allgather(seconds) == [seconds] * comm.size


@pytest.mark.parallel([2])
def test_a_link_is_as_fast_as_a_stopwatch_says(comm):
    group, size = group_of(comm), 1 << 20
    x, y, times = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8), []
    for _ in range(30):
        comm.Barrier()
        start = time.perf_counter()
        comm.Sendrecv([x.numpy(), MPI.BYTE], 1 - comm.rank, 0, [y.numpy(), MPI.BYTE])
        times.append(time.perf_counter() - start)
    watched = comm.allreduce(sorted(times)[15], MPI.MAX)
    rates = measure(group, [], ["float32"])
    assert 0.05 < size / watched / 1e9 / rates.near.bandwidth_gb_s < 20  # other tests' ranks share the cores


def test_an_unknown_codec_is_refused():
    with pytest.raises(ValueError, match="valid"):
        measure(group_of(MPI.COMM_SELF), ["int9"])


def test_what_is_measured_survives_the_checks_of_a_file():
    rates = measure(group_of(MPI.COMM_SELF), ["bf16"], ["float32"])
    assert rates.far == rates.near
    with pytest.raises(Exception, match="missing"):
        from_tables({})
