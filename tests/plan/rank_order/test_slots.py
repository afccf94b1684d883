"""Orders of ranks: counted as they are applied, never worse than the given one, the best of all where all are tried."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from hpcllm.collectives.cost import VOLUMES
from hpcllm.collectives.tuning import Shape
from hpcllm.config.schema import MeshConfig
from hpcllm.mpi.mesh_axes import coordinates
from hpcllm.plan.rank_order.slots import (
    ORDERS,
    Cost,
    Slots,
    best_order,
    cost,
    given_order,
    homes,
    rank_list,
    rank_lists,
    tiled,
)
from hpcllm.plan.rank_order.traffic import Traffic

SHAPES = [(1, 1, 1), (4, 1, 1), (2, 2, 2), (2, 4, 1), (1, 4, 2), (2, 1, 4), (1, 3, 2), (3, 3, 1)]


def made_up(shape: tuple[int, int, int], seed: int, even: bool) -> Traffic:
    """Of random sizes; even: all stages alike, as in a model whose layers are."""
    generator = np.random.default_rng(seed)
    _, pp, tp = shape
    sizes = generator.integers(1, 300, 3).astype(float)
    over_dp = np.full((pp, tp), sizes[0]) if even else generator.integers(1, 300, (pp, tp)).astype(float)
    forward = np.diag(np.full(pp - 1, sizes[2]), 1)
    return Traffic(
        {"gradients": over_dp}, {"tensor": np.full(pp, sizes[1])}, {"forward": forward, "backward": forward.T}
    )


def by_hand(traffic: Traffic, ranks: list[int], slots: Slots, shape: tuple[int, int, int], order: str) -> Cost:
    """Another way to count: rank by rank, group by group."""
    sizes = dict(zip(("dp", "pp", "tp"), shape, strict=True))
    found = []
    for home_of_slot in (slots.nodes, slots.packages):
        places = [coordinates(rank, sizes, order) for rank in ranks]
        at = {(p["dp"], p["pp"], p["tp"]): home for p, home in zip(places, home_of_slot, strict=True)}
        total = 0.0
        for p, t in itertools.product(range(shape[1]), range(shape[2])):
            group = {at[d, p, t] for d in range(shape[0])}
            total += traffic.over_dp["gradients"][p, t] * (len(group) - 1)
        for d, p in itertools.product(range(shape[0]), range(shape[1])):
            total += traffic.over_tp["tensor"][p] * (len({at[d, p, t] for t in range(shape[2])}) - 1)
        for d, t, (a, b) in itertools.product(
            range(shape[0]), range(shape[2]), itertools.permutations(range(shape[1]), 2)
        ):
            if at[d, a, t] != at[d, b, t]:
                total += traffic.between_stages["forward"][a, b] + traffic.between_stages["backward"][a, b]
        found.append(total)
    return Cost(*found)


def fillings(slots: Slots) -> Iterator[list[int]]:
    """One of each way to divide places over the nodes, each full."""

    def divided(left: list[int]) -> Iterator[list[int]]:
        if not left:
            yield []
        for others in itertools.combinations(left[1:], slots.per_node - 1) if left else ():
            node = [left[0], *others]
            yield from (node + rest for rest in divided([i for i in left if i not in node]))

    yield from divided(list(range(slots.ranks)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ORDERS)
def test_the_list_has_each_rank_once_and_costs_what_is_claimed(shape: tuple[int, int, int], order: str) -> None:
    ranks = int(np.prod(shape))
    for seed, (per_node, per_package) in enumerate([(2, 1), (4, 2), (3, 1), (5, 5)]):
        slots, traffic = Slots(ranks, per_node, per_package), made_up(shape, seed, even=False)
        given, found = given_order(traffic, slots, shape, order), best_order(traffic, slots, shape, order)
        order_list = rank_list(found.places, shape, order)
        assert sorted(order_list) == list(range(ranks))
        assert found.cost == by_hand(traffic, order_list, slots, shape, order)
        assert given.cost == by_hand(traffic, list(range(ranks)), slots, shape, order)
        assert found.cost <= given.cost
        if found.order:  # what that mesh order gives without a file
            assert found.cost == by_hand(traffic, list(range(ranks)), slots, shape, found.order)


@pytest.mark.parametrize(
    ("shape", "per_node"), [(s, k) for s in SHAPES for k in (2, 3, 4) if np.prod(s) > k and np.prod(s) % k == 0]
)
def test_no_way_to_fill_nodes_is_better_if_stages_are_alike(shape: tuple[int, int, int], per_node: int) -> None:
    ranks = int(np.prod(shape))
    for seed in range(3):
        slots, traffic = Slots(ranks, per_node), made_up(shape, seed, even=True)
        least = min(cost(traffic, np.array(places), slots, shape).nodes for places in fillings(slots))
        assert best_order(traffic, slots, shape, ORDERS[0]).cost.nodes == least


def test_tensor_groups_stay_in_a_package_and_a_tie_leaves_the_order_alone() -> None:
    shape, slots = (2, 3, 2), Slots(12, 6, 2)
    traffic = made_up(shape, 0, even=True)
    traffic.over_tp["tensor"][:] = 1e6
    for order in ORDERS:
        found = best_order(traffic, slots, shape, order)
        packages = homes(found.places, slots.packages, shape)
        assert (packages[..., 0] == packages[..., 1]).all()
    free = Traffic({}, {}, {})
    assert all(best_order(free, slots, shape, order).order == order for order in ORDERS)


def test_blocks_where_no_order_of_axes_is_good() -> None:
    """2 x 2 of dp x pp a node: of each axis half crosses, where an order of axes lets all of one cross."""
    shape, slots = (4, 4, 1), Slots(16, 4)
    forward = np.diag(np.full(3, 10.0), 1)
    traffic = Traffic({"gradients": np.full((4, 1), 14.0)}, {}, {"forward": forward})
    found = best_order(traffic, slots, shape, ORDERS[0])
    assert not found.order
    assert found.cost.nodes == 4 * 14 + 4 * 10
    assert found.cost < min(given_order(traffic, slots, shape, order).cost for order in ORDERS)


@pytest.mark.parametrize("order", ORDERS)
def test_places_of_a_mesh_order_are_those_of_axes(order: str) -> None:
    shape = (2, 3, 4)
    sizes = dict(zip(("dp", "pp", "tp"), shape, strict=True))
    mesh = MeshConfig(**sizes, order=order)
    places = [coordinates(rank, sizes, mesh.order) for rank in range(24)]
    assert tiled(shape, order).tolist() == [(p["dp"] * 3 + p["pp"]) * 4 + p["tp"] for p in places]
    assert rank_list(tiled(shape, order), shape, order) == list(range(24))


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_volumes_of_collectives_are_those_of_the_cost_model(nodes: int) -> None:
    between = Shape(nodes, nodes)
    for operation, factor in (("allreduce", 2), ("reduce_scatter", 1), ("allgather", 1)):
        assert nodes * VOLUMES[operation](100.0, between) == pytest.approx(factor * 100 * (nodes - 1))


@pytest.mark.parametrize("slots", [Slots(8, 4), Slots(12, 3), Slots(16, 8), Slots(6, 6)])
def test_every_option_of_srun_fills_every_node(slots: Slots) -> None:
    for ranks in rank_lists(slots).values():
        assert sorted(ranks) == list(range(slots.ranks))
        for start in range(0, slots.ranks, slots.per_node):
            node = ranks[start : start + slots.per_node]
            assert node == sorted(node)
    assert rank_lists(slots)["block"] == list(range(slots.ranks))
