"""Whom to compare and who stands out; what measurements make of their numbers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_allocations import frontier, laptop

from hpcllm.config.schema import Config, RunConfig
from hpcllm.mpi.gpu_aware_marker import Marker
from hpcllm.mpi.wait import Waits
from hpcllm.preflight import bandwidth, codec_test, examination, matrix, storage
from hpcllm.preflight.bandwidth import distances, partner
from hpcllm.preflight.collect import open_communicators
from hpcllm.preflight.findings import Finding, severity_of, slow_ones
from hpcllm.preflight.page import Measured


@given(st.integers(1, 300))
def test_partners_agree_and_everybody_meets_somebody(nodes):
    met = [set() for _ in range(nodes)]
    for distance in distances(nodes):
        for node in range(nodes):
            other = partner(node, distance, nodes)
            if other is not None:
                assert other != node
                assert partner(other, distance, nodes) == node
                assert other not in met[node]  # another one each round
                met[node].add(other)
    assert nodes == 1 or all(met)
    assert len(distances(nodes)) == math.ceil(math.log2(nodes))


@given(st.lists(st.floats(99, 101), min_size=3, max_size=40), st.data())
def test_a_slow_one_is_found_among_equals_and_nobody_else(speeds, data):
    assert slow_ones(speeds) == []
    which = data.draw(st.integers(0, len(speeds) - 1))
    speeds[which] = 69.0
    (found,) = slow_ones(speeds)
    assert found[0] == which
    assert found[1] == pytest.approx(0.31, abs=0.015)


def test_scatter_that_all_have_is_nobody_s_fault():
    speeds = np.random.default_rng(0).uniform(50, 150, 200).tolist()
    assert slow_ones(speeds) == []


def test_two_are_compared_with_each_other_and_what_was_not_measured_with_nobody():
    assert slow_ones([100.0, 69.0]) == [(1, pytest.approx(0.31))]
    assert slow_ones([100.0, math.nan]) == []
    assert slow_ones([math.nan, 100.0, 100.0, 50.0, 100.0]) == [(3, pytest.approx(0.5))]
    assert slow_ones([]) == slow_ones([1.0]) == []


@given(st.lists(st.floats(1, 100), max_size=9), st.integers(0, 3), st.floats(0, 1))
def test_nobody_is_guilty_of_being_slower_than_one_other(speeds, missing, share):
    found = severity_of(share, speeds + [math.nan] * missing)
    assert found == ("slow" if len(speeds) >= 3 and share >= 0.25 else "note")


@pytest.mark.parametrize("slow", [0, 1])
def test_two_nodes_that_differ_are_a_note(slow):
    """The default job has two nodes, and nobody can tell which of them is as it should be."""
    rows = [(64 << 20, 0.5, 0.25, "")] * 2
    rows[slow] = (8 << 20, 3.0, 0.1, "")
    two = frontier(2)
    rates = np.full((two.size, 1, 2), 10.0)
    rates[list(two.nodes[slow].ranks)] = 1.0
    for found in (bandwidth.judge_nodes(rates, two, "cpu memory"), storage.judge(rows, Path("here"), two)):
        of_node = [finding for finding in found.findings if f"node {two.nodes[slow].name}" in finding.what]
        assert [finding.severity for finding in of_node] == ["note"]


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("slow_times", [0, 1, 2])
def test_what_looks_slow_is_measured_again_before_anybody_is_blamed(comm, monkeypatch, slow_times):
    calls = []

    def measured(*_):
        calls.append(1)
        findings = [Finding("slow", "a node", "n1", "")] if len(calls) <= slow_times else []
        return Measured("matrix products", "", {}, findings) if comm.rank == 0 else None

    monkeypatch.setattr(matrix, "measure", measured)
    for module, nothing in ((bandwidth, []), (storage, None), (codec_test, None)):
        monkeypatch.setattr(module, "measure", lambda *_, nothing=nothing: nothing)
    comms = open_communicators(comm, Waits(10.0))
    found = examination._measure(comms, torch.device("cpu"), None, None, None)
    comms.free()
    assert len(calls) == (1 if slow_times == 0 else 2)
    assert [len(one.findings) for one in found] == ([int(slow_times == 2)] if comm.rank == 0 else [])


@pytest.mark.pretend
@pytest.mark.parallel([2])
@pytest.mark.parametrize("of_a_run", [True, False])
def test_a_preflight_that_died_of_device_memory_lets_its_run_start(comm, monkeypatch, shared_path, of_a_run):
    """What it has left in the run's folder, or where it was started, is read by the next one, and by the run."""
    for module, nothing in ((matrix, None), (bandwidth, []), (storage, None), (codec_test, None)):
        monkeypatch.setattr(module, "measure", lambda *_, nothing=nothing: nothing)
    monkeypatch.setattr(examination, "_judged", lambda reach, *_: reach)
    monkeypatch.chdir(shared_path)
    config = Config(run=RunConfig(folder=str(shared_path), name="r")) if of_a_run else None
    marker = Marker(shared_path / "r" if of_a_run else shared_path)
    if comm.rank == 0:
        marker.begin()
    comm.Barrier()
    comms = open_communicators(comm, Waits(10.0))
    (reach,) = examination._measure(comms, torch.device("pretend", 0), config, frontier(2), None)
    comms.free()
    assert not reach.direct
    assert f"delete {marker.path} to try again" in reach.why
    comm.Barrier()
    if comm.rank == 0:
        marker.end()
    comm.Barrier()


def test_a_slow_node_is_named_with_the_option_that_leaves_it_out():
    speeds = [100.0] * 32
    speeds[17] = 69.0
    found = matrix.judge(speeds, "cuda", frontier(4))
    (finding,) = found.findings
    assert finding.what == "node frontier0002: 31 % slow in matrix products"
    assert finding.where == "rank 17 on frontier0002"
    assert finding.fix == "exclude it: sbatch --exclude=frontier0002"
    assert finding.severity == "slow"
    speeds[17] = 85.0
    assert [finding.severity for finding in matrix.judge(speeds, "cuda", frontier(4)).findings] == ["note"]
    speeds[3] = math.nan
    assert matrix.judge(speeds, "cuda", frontier(4)).findings[-1].severity == "breaks"


def table(nodes: int, ranks: int, slow: int | None) -> np.ndarray:
    """Of bandwidth between nodes: 10 GB/s a rank, 4 with a slow node."""
    found = np.full((nodes * ranks, len(distances(nodes)), 2), math.nan)
    for node in range(nodes):
        for turn, distance in enumerate(distances(nodes)):
            other = partner(node, distance, nodes)
            if other is not None:
                found[node * ranks : (node + 1) * ranks, turn] = (4.0 if slow in (node, other) else 10.0, 2e-6)
    return found


@pytest.mark.parametrize("nodes", [4, 5, 8, 13, 64])
def test_a_slow_node_is_told_from_its_partners(nodes):
    sound = bandwidth.judge_nodes(table(nodes, 8, None), frontier(nodes), "cpu memory")
    assert sound.findings == []
    assert sound.facts["gb_s"] == [80.0] * nodes
    for slow in (1, nodes - 1):
        found = bandwidth.judge_nodes(table(nodes, 8, slow), frontier(nodes), "cpu memory")
        assert [finding.what.split()[1] for finding in found.findings] == [f"frontier0{slow:03}:"], nodes


def test_messages_that_do_not_go_through_the_cards():
    found = bandwidth.judge_nodes(table(4, 8, None) / 10, frontier(4), "cpu memory")
    (finding,) = found.findings
    assert finding.what == "nodes exchange 8 GB/s each way, but their network cards make 100 GB/s"


def test_files_of_nodes_are_told_together():
    rows = [(64 << 20, 0.5, 0.25, "")] * 3 + [(8 << 20, 3.0, 0.1, "")]
    found = storage.judge(rows, Path("here"), frontier(4))
    assert found.facts["bytes"] == 200 << 20
    assert found.facts["write_gb_s"] == pytest.approx((200 << 20) / 3.0 / 1e9)
    assert found.facts["cut"]
    assert "frontier0003 writes 0.0028 GB/s, 98 % less than most" in found.findings[0].what
    broken = storage.judge([*rows[:3], (0, 0.0, 0.0, "No space left on device")], Path("here"), frontier(4))
    assert [finding.severity for finding in broken.findings] == ["breaks"]
    assert "No space left" in broken.findings[0].what


def test_what_is_written_is_read_back_and_measured(tmp_path):
    size, write_s = storage.write(tmp_path / "a file")
    assert (tmp_path / "a file").stat().st_size == size > 0
    assert write_s > 0
    assert storage.read(tmp_path / "a file") > 0


@pytest.mark.parallel([1, 2])
def test_a_folder_that_takes_no_files_is_a_finding_on_all_nodes(comm, tmp_path):
    comms = open_communicators(comm, Waits(10.0))
    folder = tmp_path / "not there"
    found = storage.measure(comms, folder, frontier(2) if comm.rank == 0 else None)
    comms.free()
    assert (found is None) == (comm.rank > 0)
    if found:
        assert [finding.severity for finding in found.findings] == ["breaks"] * 2
        assert "No such file or directory" in found.findings[0].what


def test_every_codec_passes_on_this_machine():
    done, faults = codec_test.self_test(torch.device("cpu"))  # as many as its time allows
    assert faults == []
    assert 1 <= done <= 27


def test_a_codec_that_is_wrong_is_found_on_its_node(monkeypatch):
    right = codec_test.find_codec("int8", torch.float32)

    class Wrong:
        name, dtype, lossless, block = right.name, right.dtype, right.lossless, right.block
        encoded_bytes, encode, bound = right.encoded_bytes, right.encode, right.bound

        @staticmethod
        def decode(data, out):
            right.decode(data, out)
            out[:1] += 1

    monkeypatch.setattr(codec_test, "find_codec", lambda *_: Wrong())
    monkeypatch.setattr(codec_test, "_cases", lambda: [("int8", torch.float32)])
    done, faults = codec_test.self_test(torch.device("cpu"))
    assert done == 1
    assert len(faults) == 1
    assert "over the bound" in faults[0]
    found = codec_test.judge([(1, [], ""), (1, faults, "CuPy is not installed")], frontier(2))
    assert [finding.severity for finding in found.findings] == ["breaks", "note"]
    assert [finding.where for finding in found.findings] == ["frontier0001", "frontier0001"]
    assert "no kernels for codecs and model" in found.findings[1].what
    assert "CuPy is not installed" in found.findings[1].what


def test_a_rank_s_speed_is_measured():
    assert matrix.gflop_s(torch.device("cpu"), budget_s=0.05) > 0.1
    assert "1 rank at once" in matrix.judge([5.0], "cpu", laptop(1)).text
