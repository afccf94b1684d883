"""The preflight for real, on the ranks of this test: what it finds, says, leaves behind, and ends with."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

import pytest
from made_up_allocations import frontier
from mpi4py import MPI

from hpcllm.cli import preflight as command
from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.mpi.wait import Waits
from hpcllm.preflight import collect, examination, facts
from hpcllm.preflight.collect import open_communicators
from hpcllm.preflight.findings import Finding
from hpcllm.system.output import STANDARD_OUTPUT

SIZES = [1, 2, 3, 4]


def preflight(comm, capsys, run: Path | None = None, quick: bool = True, sets: tuple[str, ...] = ()):
    """(exit code, the page as JSON on rank 0)."""
    capsys.readouterr()
    arguments = argparse.Namespace(run=run, overrides=list(sets), quick=quick, json=STANDARD_OUTPUT, wide=False)
    code = command.examine_and_print(arguments, comm)
    text = capsys.readouterr().out
    assert bool(text) == (comm.rank == 0)
    return code, json.loads(text) if text else None


@pytest.fixture
def one_core():
    """All ranks on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


def bad(page) -> list[str]:
    return [finding["what"] for finding in page["findings"] if finding["severity"] in ("breaks", "slow")]


@pytest.mark.parallel(SIZES)
def test_the_exit_code_is_that_of_the_findings_on_all_ranks(comm, capsys):
    code, page = preflight(comm, capsys)
    assert comm.allreduce(code, MPI.MAX) == comm.allreduce(code, MPI.MIN)
    if page:
        assert code == (1 if bad(page) else 0)
        assert page["fit"] == (not bad(page))
        assert page["ranks"] == comm.size
        assert sorted(rank for node in page["nodes"] for rank in node["ranks"]) == list(range(comm.size))
        cores = len(os.sched_getaffinity(0))
        assert any("share" in what for what in bad(page)) == (comm.size > cores)


@pytest.mark.parallel(SIZES)
def test_ranks_on_one_core_are_named(comm, capsys, one_core):
    code, page = preflight(comm, capsys)
    if comm.size > 1:
        assert code == 1
    if page and comm.size > 1:
        assert f"{comm.size} ranks share 1 core ({one_core})" in bad(page)


@pytest.mark.parallel([1, 3])
def test_measurements_are_made_by_all_and_leave_nothing_behind(comm, capsys, shared_path, monkeypatch):
    monkeypatch.chdir(shared_path)
    monkeypatch.setattr(examination.matrix, "BUDGET_S", 0.1)
    monkeypatch.setattr(examination.bandwidth, "BUDGET_S", 0.05)
    monkeypatch.setattr(examination.codec_test, "BUDGET_S", 0.1)
    _, page = preflight(comm, capsys, quick=False)
    comm.Barrier()
    assert os.listdir(shared_path) == []
    if page:
        assert len(page["measured"]["matrix products"]["gflop_s"]) == comm.size
        assert all(speed > 0 for speed in page["measured"]["matrix products"]["gflop_s"])
        assert page["measured"]["file system"]["write_gb_s"] > 0
        assert page["measured"]["codecs"]["wrong"] == []
        assert ("inside nodes" in page["measured"]) == (comm.size > 1)
        if comm.size > 1:
            assert page["measured"]["inside nodes"]["gb_s"] > 0


RUN = "[run]\nfolder = {folder!r}\n[model]\nvocabulary = 300\n[data]\nglobal_batch = 12\n"


@pytest.mark.parallel([1, 2])
def test_a_run_file_that_fits_and_one_that_does_not(comm, capsys, shared_path):
    path = shared_path / "run.toml"
    if comm.rank == 0:
        path.write_text(RUN.format(folder=str(shared_path / "runs")))
    comm.Barrier()
    _, page = preflight(comm, capsys, path)
    if page:
        assert not any("run file" in what for what in bad(page))
    code, page = preflight(comm, capsys, path, sets=("mesh.dp=5",))
    assert code == 1
    if page:
        assert any("mesh.dp * mesh.pp * mesh.tp = 5 * 1 * 1" in what for what in bad(page))
    code, page = preflight(comm, capsys, path, sets=("model.hidden=65536", "model.layers=80", "model.ffn=262144"))
    assert code == 1
    if page:
        assert any("the run needs" in what and "(predicted)" in what for what in bad(page))
    code, page = preflight(comm, capsys, path, sets=("data.store=/no such/store.h5",))
    assert code == 1
    if page:
        assert any("cannot read data.store = '/no such/store.h5': No such file" in what for what in bad(page))


@pytest.mark.parallel([1, 2])
def test_a_wrong_run_file_is_the_user_s_error(comm, capsys, shared_path):
    path = shared_path / "run.toml"
    if comm.rank == 0:
        path.write_text("[rum]\n")
    comm.Barrier()
    with pytest.raises(ConfigError):
        preflight(comm, capsys, path)
    with pytest.raises(ConfigError):
        preflight(comm, capsys, shared_path / "no such file.toml")
    with pytest.raises(ConfigError, match="--set without a run file"):
        preflight(comm, capsys, sets=("mesh.dp=2",))
    with pytest.raises(ConfigError, match="is 'gpu', but"):
        examination.start(comm, "gpu", 30.0)


@pytest.mark.parallel(SIZES)
def test_facts_of_ranks_that_differ_come_apart_on_rank_0_alone(comm):
    comms = open_communicators(comm, Waits(30.0))
    mine = collect.facts_of_all(comms, "cpu")
    allocation = collect.find_allocation(comms, mine)
    assert (allocation is None) == (comm.rank > 0)
    if allocation:
        assert allocation.size == comm.size
        assert sum(len(kind.facts.ranks) * len(kind.nodes) for kind in allocation.kinds) == comm.size
        assert all(isinstance(rank, facts.RankFacts) for _, _, rank in allocation.everyone())
    comms.free()


@pytest.mark.parallel(SIZES)
def test_the_start_of_a_run_says_slow_in_a_line_and_refuses_what_breaks(comm, capsys, monkeypatch):
    findings = [Finding("slow", "one thing", "rank 0", "fix it"), Finding("note", "a note", "rank 0", "")]
    monkeypatch.setattr(examination, "check", lambda _: findings)
    before = os.sched_getaffinity(0)
    examination.start(comm, "cpu", 30.0)
    os.sched_setaffinity(0, before)
    said = capsys.readouterr().err
    assert said == ("hpcllm: preflight: one thing (rank 0); fix it\n" if comm.rank == 0 else "")
    findings.append(Finding("breaks", "the worst", "rank 0", "stop"))
    with pytest.raises(HpcllmError, match="not fit to run: the worst") as caught:
        examination.start(comm, "cpu", 30.0)
    assert caught.value.exit_code == 1
    assert caught.value.everywhere


def test_devices_that_have_numbers_of_their_own_do_not_make_nodes_differ():
    def node(stem: str) -> list[facts.RankFacts]:
        """Of two ranks on one device, and one on another."""
        first = dataclasses.replace(frontier().first, environment=(("ROCR_VISIBLE_DEVICES", stem),))
        names = (f"{stem}{number}" for number in (0, 0, 1))
        devices = [dataclasses.replace(first.device, address=name, identity=name) for name in names]
        return [dataclasses.replace(first, device=device) for device in devices]

    assert collect._numbered(node("GPU-4b")) == collect._numbered(node("GPU-9f"))
    identities = [rank.device.identity for rank in collect._numbered(node("GPU-4b"))]
    assert identities[0] == identities[1] != identities[2]
    known = list(frontier().nodes[0].facts.ranks)
    assert collect._numbered(known) == tuple(known)
