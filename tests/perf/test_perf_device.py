"""`--device gpu`: the same measurements of arrays on a device, every value checked."""

from __future__ import annotations

import os

import pytest
from mpi4py import MPI

from hpcllm.collectives.group import group_of
from hpcllm.errors import ConfigError
from hpcllm.mpi.gpu_aware_marker import Marker
from hpcllm.mpi.message_memory import let_mpi_read_devices
from hpcllm.perf import codec, collective, p2p
from hpcllm.perf.arguments import Options
from hpcllm.perf.records import read_json
from hpcllm.perf.session import open_device

pytestmark = pytest.mark.pretend


@pytest.fixture(autouse=True)
def put_back():
    yield
    let_mpi_read_devices(False)


def options(path, **changes) -> Options:
    direct = os.environ["HPCLLM_PRETEND"] == "open"
    given = {"sizes": (4096,), "codecs": ("raw", "bf16"), "iterations": 1, "warmup": 0, "check": True}
    return Options(**given | {"device": "gpu", "gpu_aware": "yes" if direct else "no", "json": path} | changes)


@pytest.mark.parallel([2])
def test_a_measurement_that_died_of_device_memory_is_the_last_one(comm, shared_path, monkeypatch):
    """As a run's start: what it has left where it was started sends the next one through the host, with the reason."""
    monkeypatch.chdir(shared_path)
    if comm.rank == 0:
        Marker(shared_path).begin()
    comm.Barrier()
    found, text = open_device(options(None, gpu_aware="auto"), group_of(comm))
    assert found.type == "pretend"
    assert text.startswith("messages in pinned host memory: the start of ")
    comm.Barrier()
    if comm.rank == 0:
        Marker(shared_path).end()
    comm.Barrier()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast"])
def test_collectives(comm, shared_path, operation):
    asked_for = options(shared_path / "records.json", algorithms=("all",))
    assert collective.run(operation, asked_for, comm, lambda: False) == 0
    if comm.rank == 0:
        records = read_json(asked_for.json)
        ways = {(record.algorithm, record.codec) for record in records}
        assert {record.device for record in records} == {"gpu"}
        assert ("auto", "bf16") in ways
        assert ("node_window", "raw") not in ways
        assert (("mpi", "raw") in ways) == (os.environ["HPCLLM_PRETEND"] == "open")


@pytest.mark.parallel([2])
def test_p2p(comm, shared_path):
    asked_for = options(shared_path / "records.json", check=False)
    assert p2p.run("p2p", asked_for, comm, lambda: False) == 0
    if comm.rank == 0:
        assert {record.device for record in read_json(asked_for.json)} == {"gpu"}


@pytest.mark.parallel([2])
def test_codec(comm, shared_path):
    asked_for = options(shared_path / "records.json", codecs=("bf16", "int8:256"), check=False)
    assert codec.run("codec", asked_for, comm, lambda: False) == 0
    if comm.rank == 0:
        records = read_json(asked_for.json)
        assert {(record.device, record.threads) for record in records} == {("gpu", 1)}
        assert all(record.rel_error < 0.02 for record in records)
    with pytest.raises(ConfigError, match="--codecs: codec 'exp' has no kernels"):
        codec.run("codec", options(None, codecs=("exp",)), MPI.COMM_SELF, lambda: False)
