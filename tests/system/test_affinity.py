"""Cores of ranks: laws of the plan over many nodes, and what really happens here."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_nodes import MI250X, mi250x_node

from hpcllm.system.affinity import Allowed, near_cores, plan_affinity, set_affinity
from hpcllm.system.hardware.sysfs import numbers
from hpcllm.system.hardware.topology import Core, Topology, find_topology


def node(domains: int, cores: int, threads: int = 1) -> Topology:
    """domains x cores x threads, numbered as Linux does: first threads of all cores, then second ones."""
    count = domains * cores
    every = [Core(n, n % count, n % count // cores, 0, n % count // cores * cores) for n in range(count * threads)]
    return Topology(tuple(every), tuple(range(domains)), tuple((10,) * domains for _ in range(domains)))


@given(st.integers(1, 4), st.integers(1, 16), st.integers(1, 2), st.integers(1, 40))
def test_ranks_that_may_run_anywhere_share_out_the_cores(domains, cores, threads, ranks):
    topology = node(domains, cores, threads)
    count = domains * cores
    bindings = plan_affinity([Allowed(topology.numbers)] * ranks, topology)
    used = [core for binding in bindings for core in topology.physical(binding.cores)]
    assert all(binding.threads >= 1 for binding in bindings)
    if ranks > count or ranks == 1:
        assert not any(binding.changed for binding in bindings)
    elif count // ranks >= 2:
        assert sorted(used) == list(range(count))  # each core once
        assert all(len(binding.cores) == binding.threads for binding in bindings)
        assert max(binding.threads for binding in bindings) - min(binding.threads for binding in bindings) <= 1
    for binding in bindings:
        assert set(binding.cores) <= set(topology.numbers)


def test_a_rank_that_is_bound_by_itself_stays():
    topology = node(2, 8)
    places = [Allowed((0, 1, 2)), Allowed((3, 4)), Allowed((9,))]
    bindings = plan_affinity(places, topology)
    assert [binding.cores for binding in bindings] == [place.cores for place in places]
    assert [binding.threads for binding in bindings] == [3, 2, 1]
    assert not any(binding.changed for binding in bindings)


def test_ranks_share_what_a_container_leaves_them():
    bindings = plan_affinity([Allowed((4, 5, 6, 7))] * 2 + [Allowed((0, 1))], node(1, 8))
    assert [binding.cores for binding in bindings] == [(4, 5), (6, 7), (0, 1)]


def test_a_share_of_one_core_is_widened_to_its_domain():
    bindings = plan_affinity([Allowed(tuple(range(8)))] * 8, node(2, 4))
    assert [set(binding.cores) for binding in bindings] == [{0, 1, 2, 3}] * 4 + [{4, 5, 6, 7}] * 4
    assert {binding.threads for binding in bindings} == {1}


def test_ranks_of_mi250x_get_the_cores_that_the_sites_document(tmp_path):
    """OLCF and LUMI: rank i on GCD i, cores 49-55, 57-63, 17-23, 25-31, 1-7, 9-15, 33-39, 41-47."""
    topology = find_topology(mi250x_node(tmp_path))
    gcds = sorted(pci for both in MI250X.values() for pci in both)  # GCD i is the i-th by address
    numa = {pci: domain for domain, both in MI250X.items() for pci in both}
    allowed = tuple(core for core in range(64) if core % 8)  # the first core of each cache is the system's
    shares = near_cores([Allowed(allowed, numa[pci]) for pci in gcds], topology, allowed)
    want = ["49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47"]
    assert shares == [numbers(text) for text in want]


def test_a_device_nowhere_gives_everybody_an_equal_share():
    topology = node(2, 4)
    shares = near_cores([Allowed(topology.numbers, 0), Allowed(topology.numbers, None)], topology, topology.numbers)
    assert shares == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parallel([1, 2, 3, 4])
def test_ranks_here_keep_to_cores_that_they_were_allowed(comm, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    import torch

    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        binding = set_affinity(comm)
        assert os.sched_getaffinity(0) == set(binding.cores)
        assert set(binding.cores) <= before
        assert torch.get_num_threads() == binding.threads
        ranks = comm.allgather(binding.threads)
        assert sum(ranks) <= max(len(before), comm.size)
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)
