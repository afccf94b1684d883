"""Arrays on a device: the bits of the same collective on the CPU, whether MPI can read the device's memory or not."""

from __future__ import annotations

import emulated
import laws
import pretend
import pytest
import torch
from device_laws import DEVICE, DOORS, NAMES, cases, on_device
from pretend.counts import counting

from hpcllm.codecs.catalogue import find_codec
from hpcllm.collectives import (
    allgather,
    allreduce,
    group_of,
    iallgather,
    iallreduce,
    reduce_scatter,
)
from hpcllm.collectives.auto import plan
from hpcllm.collectives.feedback import ErrorFeedback
from hpcllm.collectives.group import Group, make_group
from hpcllm.collectives.worker import Worker
from hpcllm.mpi.message_memory import mpi_reads_devices

pytestmark = [pytest.mark.pretend, pytest.mark.usefixtures("device_messages")]


def both(
    operation: str, x: torch.Tensor, comm, codec: str, algorithm: str, **more
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result on the CPU and that on the device."""
    door = DOORS[operation]
    there = x.to(DEVICE)
    result = door(there, comm, codec=codec, algorithm=algorithm, **more)
    assert result.device.type == DEVICE
    assert (result is there) == (operation in ("allreduce", "broadcast"))
    return door(x.clone(), comm, codec=codec, algorithm=algorithm, **more), result.cpu()


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("operation", DOORS)
def test_bits_are_those_of_the_cpu(comm, operation):
    laws.limited(comm)
    for algorithm, codec, dtype in cases(operation):
        for n in (0, comm.size + 1, 9001):
            n = n * comm.size if operation == "alltoall" else n
            x = laws.values(comm.rank, n, dtype)
            want, found = both(operation, x, comm, codec, algorithm)
            assert laws.bits(found) == laws.bits(want), (algorithm, codec, dtype, n)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("codec", ["raw", "bf16", "fp8", "int8:256", "int4:sr", "exp", "zfp:8", "mpc"])
@pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not())
def test_kernels_of_devices_in_messages(comm, codec):
    """Emulated ones; two_step adds up and encodes by one kernel where there is one."""
    laws.limited(comm)
    for operation, algorithm, dtype in (
        ("allreduce", "two_step", torch.float32),
        ("allreduce", "two_step", torch.bfloat16),
        ("allreduce", "ring", torch.float32),
        ("reduce_scatter", "two_step", torch.float32),
        ("allgather", "ring", torch.bfloat16),
        ("allgather", "bruck", torch.float32),
        ("alltoall", "bruck", torch.float32),
    ):
        x = laws.values(comm.rank, 700 * comm.size, dtype)
        want = DOORS[operation](x.clone(), comm, codec=codec, algorithm=algorithm)
        found = DOORS[operation](x.to(DEVICE), comm, codec=emulated.emulated(codec, dtype), algorithm=algorithm)
        assert laws.bits(found.cpu()) == laws.bits(want), (operation, algorithm, dtype)


@pytest.mark.parallel([3])
def test_several_segments_and_lanes(comm, monkeypatch):
    from hpcllm.collectives import broadcasts, bruck, doubling, pairwise, ring, strips

    laws.limited(comm)
    for name in ("SEGMENT_VALUES", "DEVICE_SEGMENT_VALUES"):  # whose strip a value is in says who owns it
        monkeypatch.setattr(strips, name, 500)
    monkeypatch.setattr(strips, "LEAST_VALUES", 100)
    for name in ("LANE_BYTES", "DEVICE_LANE_BYTES"):
        monkeypatch.setattr(ring, name, 1 << 14)
    monkeypatch.setattr(doubling, "DOUBLING_VALUES", 1 << 13)
    monkeypatch.setattr(doubling, "HALVING_VALUES", 1 << 13)
    monkeypatch.setattr(bruck, "ROUND_VALUES", 1 << 12)
    monkeypatch.setattr(pairwise, "SEGMENT_VALUES", 1 << 11)
    monkeypatch.setattr(broadcasts, "TREE_VALUES", 1 << 11)
    monkeypatch.setattr(broadcasts, "CHAIN_VALUES", 1 << 10)
    for operation in DOORS:
        for algorithm, codec, dtype in cases(operation):
            x = laws.values(comm.rank, 30012, dtype)
            want, found = both(operation, x, comm, codec, algorithm)
            assert laws.bits(found) == laws.bits(want), (operation, algorithm, codec, dtype)


@pytest.mark.parallel([2, 3])
def test_auto_finds_a_way_on_a_device(comm):
    group = group_of(laws.limited(comm))
    for operation, door in DOORS.items():
        for n in (6, 60_000):
            x = laws.values(comm.rank, n, torch.float32)
            name = plan(
                operation, n * (comm.size if operation == "allgather" else 1), find_codec("raw"), group, "pretend"
            )
            want = door(x.clone(), comm, algorithm=name.algorithm)
            assert laws.bits(door(x.to(DEVICE), comm).cpu()) == laws.bits(want), (operation, n)
            assert (name.algorithm == "native") == (n == 6 and operation in ("allreduce", "reduce_scatter"))


def test_what_needs_the_memory_of_the_cpu_is_refused():
    from mpi4py import MPI

    x = torch.zeros(8, device=DEVICE)
    with pytest.raises(ValueError, match=r"node_window works in memory of the CPU.*pretend.*valid: .*two_step"):
        allreduce(x, MPI.COMM_SELF, algorithm="node_window")
    with pytest.raises(ValueError, match=r"out is on cpu, the values are on pretend"):
        reduce_scatter(x, MPI.COMM_SELF, out=torch.zeros(8))


@pytest.mark.parallel([2, 3, 4])
def test_integers_are_moved(comm):
    x = torch.arange(24 * comm.size) + 1000 * comm.rank
    for operation in ("allgather", "alltoall", "broadcast"):
        for algorithm in NAMES[operation]:
            want, found = both(operation, x, comm, "raw", algorithm)
            assert torch.equal(want, found), (operation, algorithm)


def two_nodes(comm) -> Group:
    """comm's ranks as two nodes, of different sizes where they are odd."""
    node = comm.Split(int(comm.rank >= (comm.size + 1) // 2), comm.rank)
    group = make_group(comm, node)
    group.wire.waits.limit_s = laws.LIMIT_S
    node.Free()
    return group


@pytest.mark.parallel([3, 4])
def test_two_level_by_messages_is_two_level_by_shared_memory(comm):
    group = two_nodes(comm)
    for dtype in laws.DTYPES:
        for codec in on_device(dtype):
            for n in (1, 5000, 20011):
                want, found = both("allreduce", laws.values(comm.rank, n, dtype), group, codec, "two_level")
                assert laws.bits(found) == laws.bits(want), (codec, dtype, n)
    group.free()


@pytest.mark.parallel([2, 3])
def test_error_feedback(comm):
    n = 9000
    codec = find_codec("bf16", torch.float32, DEVICE)
    here, there = ErrorFeedback(n, group_of(comm), find_codec("bf16")), None
    there = ErrorFeedback(n, group_of(comm), codec, device=DEVICE)
    for step in range(3):
        x = laws.values(comm.rank + 10 * step, n, torch.float32)
        y = x.to(DEVICE)
        here.allreduce(x)
        there.allreduce(y)
        assert torch.equal(y.cpu(), x)
    assert torch.equal(there.residual.cpu(), here.residual)


def add_one(x: torch.Tensor) -> None:
    x += 1


@pytest.mark.parametrize("threaded", [True, False])
def test_a_worker_computes_on_a_stream_of_its_lane(threaded):
    worker, x = Worker(threaded, torch.device(DEVICE, 0)), torch.zeros(4, device=DEVICE)
    jobs = [worker.submit(lambda: add_one(x)) for _ in range(3)]
    worker.wait(jobs[0])
    worker.finish()
    assert x.cpu().tolist() == [3.0] * 4
    assert not worker._crossings


@pytest.mark.parallel([2, 3])
def test_in_the_background(comm):
    xs = [laws.values(comm.rank, 3000 + i, torch.float32) for i in range(5)]
    handles = [iallreduce(x.to(DEVICE), comm, algorithm="two_step") for x in xs]
    gathered = iallgather(xs[0].to(DEVICE), comm)
    for x, handle in zip(xs, handles, strict=True):
        assert torch.equal(handle.wait().cpu(), allreduce(x.clone(), comm, algorithm="two_step"))
    assert torch.equal(gathered.wait().cpu(), allgather(xs[0], comm))


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_each_byte_is_copied_once_each_way(comm, codec):
    """Staged, of one segment: my addends down, theirs up, my sum down, theirs up. Direct: nothing."""
    x = torch.ones(3000 * comm.size, device=DEVICE)
    allreduce(x, comm, codec, "two_step")
    with counting() as counts:
        allreduce(x, comm, codec, "two_step")
    peers = comm.size - 1
    expected = [0, 0] if mpi_reads_devices() else [2 * peers, peers + 1]
    assert [counts.to_device[0], counts.to_host[0]] == expected


@pytest.mark.parallel([2])
def test_memory_of_messages_is_taken_once(comm):
    x = torch.ones(50_000, device=DEVICE)
    allreduce(x, comm, "bf16", "two_step")
    before = pretend.native().now_bytes()
    pretend.native().reset_peak()
    for _ in range(3):
        allreduce(x, comm, "bf16", "two_step")
    assert pretend.native().peak_bytes() == before == pretend.native().now_bytes()
