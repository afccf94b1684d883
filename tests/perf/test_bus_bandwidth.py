"""Bus bandwidth and bounds, against bytes counted one by one."""

from __future__ import annotations

import pytest

from hpcllm.perf.records import bound_s, bus_factor, link_bytes

OPERATIONS = ["allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast"]


def counted(operation: str, ranks: int) -> float:
    """Bytes that rank 0 must send or receive, whichever is more, for size = ranks bytes as OSU counts it."""
    size, others = ranks, range(1, ranks)
    part = size / ranks  # of an array that is shared out
    return {
        "reduce_scatter": sum(part for _ in others),  # its own part comes in from each, or leaves for each
        "allreduce": sum(part for _ in others) + sum(part for _ in others),  # and every finished part comes back
        "allgather": sum(size for _ in others),
        "alltoall": sum(size for _ in others),
        "broadcast": size if ranks > 1 else 0,
    }[operation]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
def test_the_bus_carries_what_the_busiest_rank_must_send_or_receive(operation, ranks):
    assert bus_factor(operation, ranks) * ranks == pytest.approx(counted(operation, ranks))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_factors_are_those_of_nccl_tests(ranks):
    """There the size of allgather, reduce_scatter and alltoall is that of all parts together."""
    n = ranks
    nccl = {
        "allreduce": 2 * (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "allgather": (n - 1) / n,
        "alltoall": (n - 1) / n,
    }
    for operation, factor in nccl.items():
        parts = n if operation in ("allgather", "alltoall") else 1
        assert bus_factor(operation, n) == pytest.approx(factor * parts)
    assert bus_factor("broadcast", n) == 1


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_one_rank_on_each_node_is_one_link_each(operation, nodes):
    assert link_bytes(operation, 960, nodes, nodes) == pytest.approx(link_bytes(operation, 960, nodes, 1))


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_node_of_two_ranks_adds_up_inside_but_must_still_move_its_data(nodes):
    ranks, size = 2 * nodes, 960
    assert link_bytes("allreduce", size, ranks, nodes) == pytest.approx(2 * (nodes - 1) / nodes * size)
    assert link_bytes("allgather", size, ranks, nodes) == pytest.approx((ranks - 2) * size)  # what the node lacks
    assert link_bytes("alltoall", size, ranks, nodes) == pytest.approx(2 * (ranks - 2) * size)  # two ranks send it


def test_a_codec_divides_the_time_and_a_link_of_one_gigabyte_takes_a_second_for_one():
    assert bound_s("broadcast", 10**9, 2, 2, 1.0, 1.0) == pytest.approx(1.0)
    assert bound_s("allreduce", 10**9, 2, 1, 4.0, 0.125) == pytest.approx(2.0)  # 1 Gbit/s
