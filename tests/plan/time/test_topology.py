"""Where groups lie, beside a count of every rank of every group."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import read_machine
from hpcllm.plan.time.topology import DETOUR, neighbours_share, scattered_share, spread, stride, way

AXES = ("tp", "dp", "pp")
ORDERS = [",".join(order) for order in itertools.permutations(AXES)]
SHAPES = [(1, 1, 1), (2, 2, 2), (8, 2, 2), (4, 2, 3), (3, 2, 2), (2, 8, 4), (1, 6, 4), (16, 2, 1), (5, 1, 3), (1, 1, 7)]
NODES = [(8, 2), (4, 1), (12, 2), (6, 3), (1, 1)]


def groups(layout: Layout, axis: str) -> list[list[int]]:
    """All of them, counted out."""
    found: dict[int, list[int]] = {}
    step, n = stride(layout, axis), getattr(layout, axis)
    for rank in range(layout.devices):
        found.setdefault(rank - rank // step % n * step, []).append(rank)
    return list(found.values())


@pytest.mark.parametrize(("per_node", "per_package"), NODES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("tp", "dp", "pp"), SHAPES)
def test_groups_lie_as_counted(tp, dp, pp, order, per_node, per_package):
    layout = Layout(tp=tp, dp=dp, pp=pp, order=order)
    for axis in AXES:
        found = spread(layout, axis, per_node, per_package)
        on_nodes = [Counter(rank // per_node for rank in group) for group in groups(layout, axis)]
        assert found.ranks == getattr(layout, axis)
        if found.nodes == 1:
            assert all(len(counted) == 1 for counted in on_nodes)
        else:
            assert found.nodes >= max(len(counted) for counted in on_nodes)
            assert found.most >= max(max(counted.values()) for counted in on_nodes)
            assert found.least <= min(min(counted.values()) for counted in on_nodes)
        assert 1 <= found.least <= found.most <= found.ranks
        assert 1 <= found.together <= per_node
        if found.in_package:
            assert all(len({rank // per_package for rank in group}) == 1 for group in groups(layout, axis))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("tp", "dp", "pp"), SHAPES)
def test_messages_go_where_counted(tp, dp, pp, order):
    layout, per_node = Layout(tp=tp, dp=dp, pp=pp, order=order), 8
    step = stride(layout, "pp")
    for source in range(pp - 1):
        over = way(layout, source, source + 1, per_node, 2)
        start = source * step // per_node * per_node
        mine = [rank for rank in range(start, start + per_node) if rank // step % pp == source]
        crossing = sum(rank // per_node != (rank + step) // per_node for rank in mine)
        assert over.senders == crossing
        assert over.nodes == step / per_node


def test_a_rank_of_every_group_along_an_axis_is_a_stride_from_the_next():
    layout = Layout(tp=2, dp=3, pp=4, order="tp,dp,pp")
    assert [stride(layout, axis) for axis in ("tp", "dp", "pp")] == [1, 2, 6]


def test_switches_carry_neighbours_and_not_everybody():
    """A ring leaves a group of switches once; messages that all go to the next group share what leads out of it."""
    fabric = read_machine("frontier").fabric
    assert neighbours_share(fabric, nodes=1024, hop_nodes=1) == 1.0
    assert neighbours_share(fabric, nodes=1024, hop_nodes=256) == pytest.approx(fabric.group_taper / DETOUR)
    assert scattered_share(fabric, nodes=fabric.group_nodes) == 1.0
    for few, many in itertools.pairwise((128, 256, 512, 9856)):
        assert scattered_share(fabric, many) <= scattered_share(fabric, few)
    assert scattered_share(fabric, 9856) == pytest.approx(0.57, abs=0.02)
