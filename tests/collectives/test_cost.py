"""Laws of the cost formulas: for any machine, more bytes take longer, more speed less, and physics is not beaten."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_rates import codings, made_up, rates, shapes, sizes

from hpcllm.codecs.names import examples
from hpcllm.collectives.cost import COSTS, bound_s, cost_s, message_cost_s
from hpcllm.collectives.tuning import LIBRARY_SIZES, VALUE_BITS, LibraryCall, Link, Shape, nominal_ratio

EVERY = [(operation, algorithm) for operation in COSTS for algorithm in COSTS[operation]]
every = pytest.mark.parametrize(("operation", "algorithm"), EVERY)
PURE = (
    "hpcllm.collectives.cost",
    "hpcllm.collectives.tuning",
    "hpcllm.collectives.tuning",
    "hpcllm.collectives.selection",
    "hpcllm.perf.arguments",
)


def test_every_algorithm_has_a_formula_and_every_formula_an_algorithm():
    from hpcllm.collectives.operations import ALGORITHMS

    assert {operation: set(names) for operation, names in ALGORITHMS.items()} == {
        operation: set(names) for operation, names in COSTS.items()
    }


@pytest.mark.parametrize("module", PURE)
def test_it_needs_neither_torch_nor_mpi(module):
    code = f"import sys, {module}; print(*{{'torch', 'mpi4py', 'numpy'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@every
@settings(max_examples=40)
@given(size=sizes, more=st.integers(1, 1 << 30), coding=codings(), shape=shapes, machine=rates)
def test_more_bytes_are_never_faster(operation, algorithm, size, more, coding, shape, machine):
    before = cost_s(operation, algorithm, size, coding, shape, machine)
    assert 0 < before <= cost_s(operation, algorithm, size + more, coding, shape, machine) * (1 + 1e-9)


@every
@settings(max_examples=40)
@given(size=sizes, factor=st.floats(1, 100), coding=codings(), shape=shapes, machine=rates, data=st.data())
def test_a_faster_machine_is_never_slower(operation, algorithm, size, factor, coding, shape, machine, data):
    part = data.draw(st.sampled_from(["near", "far", "window", "copy_gb_s", "memory_gb_s"]))
    old = getattr(machine, part)
    is_link = isinstance(old, Link)
    faster = Link(old.latency_s / factor, old.bandwidth_gb_s * factor) if is_link else old * factor
    after = cost_s(operation, algorithm, size, coding, shape, dataclasses.replace(machine, **{part: faster}))
    assert after <= cost_s(operation, algorithm, size, coding, shape, machine) * (1 + 1e-9)


@every
@settings(max_examples=40)
@given(size=sizes, factor=st.floats(1, 100), coding=codings(), shape=shapes, machine=rates, data=st.data())
def test_a_better_codec_is_never_slower(operation, algorithm, size, factor, coding, shape, machine, data):
    part = data.draw(st.sampled_from(["ratio", "encode_gb_s", "decode_gb_s", "add_gb_s"]))
    better = dataclasses.replace(coding, **{part: getattr(coding, part) * factor})
    before = cost_s(operation, algorithm, size, coding, shape, machine)
    assert cost_s(operation, algorithm, size, better, shape, machine) <= before * (1 + 1e-9)


@every
@settings(max_examples=40)
@given(size=sizes, coding=codings(), shape=shapes, machine=rates)
def test_messages_never_beat_the_physical_bound(operation, algorithm, size, coding, shape, machine):
    if algorithm == "node_window" or (algorithm == "two_level" and shape.nodes == 1):
        return  # sends no messages
    link = machine.far if shape.nodes > 1 else machine.near
    bound = bound_s(operation, size, coding.ratio, shape, link.bandwidth_gb_s)
    plain = algorithm == "native" or coding.raw
    bound *= coding.ratio if plain else 1
    assert cost_s(operation, algorithm, size, coding, shape, machine) >= bound * (1 - 1e-9)


@every
@settings(max_examples=40)
@given(size=sizes, coding=codings(), machine=rates)
def test_one_rank_costs_the_call(operation, algorithm, size, coding, machine):
    assert cost_s(operation, algorithm, size, coding, Shape(1), machine) == machine.call_s


@every
def test_no_bytes_cost_the_call(operation, algorithm):
    machine = made_up()
    raw = machine.codings["raw", "float32"]
    assert cost_s(operation, algorithm, 0, raw, Shape(8, 2, 4), machine) == machine.call_s


@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3).map(sorted), shapes.filter(lambda shape: shape.ranks > 1))
def test_the_library_takes_as_long_as_it_was_measured_to_and_in_between_between(times_s, shape):
    short, medium, long = (size / time_s / 1e9 for size, time_s in zip(LIBRARY_SIZES, times_s, strict=True))
    call = LibraryCall(1e-5, long, short, medium)
    assert [call.carry_s(size, size) for size in LIBRARY_SIZES] == pytest.approx(times_s)
    assert call.carry_s(2 * LIBRARY_SIZES[2], 2 * LIBRARY_SIZES[2]) == pytest.approx(2 * times_s[2])
    assert call.carry_s(LIBRARY_SIZES[0] / 2, LIBRARY_SIZES[0] / 2) == pytest.approx(times_s[0] / 2)
    between = (LIBRARY_SIZES[0] + LIBRARY_SIZES[1]) / 2
    assert call.carry_s(between, between) == pytest.approx((times_s[0] + times_s[1]) / 2)
    machine = made_up(library={"broadcast": call})
    raw = machine.codings["raw", "float32"]
    costs = [cost_s("broadcast", "native", 1 << k, raw, shape, machine) for k in range(28)]
    assert all(shorter <= longer * (1 + 1e-9) for shorter, longer in itertools.pairwise(costs))
    even = LibraryCall(1e-5, long)
    assert even.carry_s(1 << 19, 1 << 20) == pytest.approx(Link(1e-5, long).carry_s(1 << 19))


@given(ranks=st.integers(2, 200), ratio=st.floats(1, 8))
def test_bounds_are_those_of_the_books(ranks, ratio):
    """algorithm bandwidth <= ratio x link x n / (2 (n - 1)), half of that work for each half, see compression.md 4."""
    flat = Shape(ranks, ranks)
    assert 8 / bound_s("allreduce", 8e9, ratio, flat, 3.0) == pytest.approx(ratio * 3 * ranks / (2 * (ranks - 1)))
    assert 8 / bound_s("allgather", 8e9, ratio, flat, 3.0) == pytest.approx(ratio * 3 * ranks / (ranks - 1))
    assert 8 / bound_s("broadcast", 8e9, ratio, flat, 3.0) == pytest.approx(ratio * 3)
    assert bound_s("alltoall", 8e9, ratio, flat, 3.0) == pytest.approx(bound_s("allgather", 8e9, ratio, flat, 3.0))


def test_the_emptiest_node_bounds_an_all_to_all():
    """3 ranks on 2 nodes, a third of x for each: two thirds leave the node of one rank, as much the other."""
    assert bound_s("alltoall", 3e9, 1, Shape(3, 2, 1), 1.0) == pytest.approx(2.0)


@given(nodes=st.integers(2, 20), lanes=st.integers(1, 8))
def test_ranks_of_a_node_share_its_link(nodes, lanes):
    """A sum crosses once for the whole node; the blocks of an all-to-all are every rank's own."""
    alone, shared = Shape(nodes, nodes), Shape(nodes * lanes, nodes, lanes)
    assert bound_s("allreduce", 1e9, 1, shared, 1) == pytest.approx(bound_s("allreduce", 1e9, 1, alone, 1))
    assert bound_s("alltoall", 1e9, 1, shared, 1) == pytest.approx(lanes * bound_s("alltoall", 1e9, 1, alone, 1))


def test_between_nodes_the_hierarchy_wins_and_inside_one_the_window():
    machine, size = made_up(), 64 << 20
    raw = machine.codings["raw", "float32"]
    costs = {
        name: cost_s("allreduce", name, size, raw, Shape(8, 2, 4), machine)
        for name in ("two_level", "two_step", "ring")
    }
    assert min(costs, key=costs.__getitem__) == "two_level"
    alone = {name: cost_s("allreduce", name, size, raw, Shape(2), made_up()) for name in COSTS["allreduce"]}
    del alone["two_level"]  # with one node it is the same
    assert min(alone, key=alone.__getitem__) == "node_window"


def test_a_message_is_cheaper_encoded_where_the_link_is_slow():
    machine = made_up(far_gb_s=0.12, near_gb_s=50.0)
    raw, int8 = (machine.codings[name, "float32"] for name in ("raw", "int8:256"))
    assert message_cost_s(1 << 24, int8, False, machine) < message_cost_s(1 << 24, raw, False, machine) / 3
    assert message_cost_s(1 << 24, int8, True, machine) > message_cost_s(1 << 24, raw, True, machine)


@pytest.mark.parametrize("dtype", VALUE_BITS)
@pytest.mark.parametrize("codec", examples())
def test_nominal_ratios_are_those_that_names_tell(codec, dtype):
    assert 0.4 < nominal_ratio(codec, dtype) < 8
