"""What `auto` runs: rules without tuning, the least predicted time with it, and the same on every rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_up_rates import made_up, made_up_tuning
from mpi4py import MPI

from hpcllm.codecs import find_codec
from hpcllm.collectives import allreduce, free_shared, shared_zeros
from hpcllm.collectives.auto import plan
from hpcllm.collectives.cost import COSTS, cost_s
from hpcllm.collectives.group import group_of, make_group
from hpcllm.collectives.selection import (
    LEAST_GAIN,
    LIBRARY_BYTES,
    LIBRARY_BYTES_SHARED,
    ROUNDS_EACH_HOP,
    SMALL_BYTES,
    Values,
    by_rule,
    candidates,
    choose,
    link_codec,
    unmeasured,
)
from hpcllm.collectives.tuning import VALUE_BITS, Shape, Tuning
from hpcllm.mpi.wait import Waits

CODECS = ["raw", "bf16", "int8:256", "exp"]
SIZES = [1, 7, 1000, 1 << 16, 1 << 20]
TWO_NODES = Shape(8, 2, 4)


def nodes_of_two(comm):
    return make_group(comm, comm.Split(comm.rank // 2))


def int8(size=64 << 20, shape=TWO_NODES, codec="int8:256", operation="allreduce", **machine):
    return choose(operation, size, codec, "float32", shape, made_up(**machine))


@pytest.mark.parametrize("operation", COSTS)
def test_a_slow_link_makes_a_codec_win_and_a_fast_one_refuses_it(operation):
    slow = int8(operation=operation, shape=Shape(4, 4), far_gb_s=0.12)
    assert slow.codec == "int8:256"
    assert slow.why.startswith("int8:256: 3.")
    fast = int8(operation=operation, shape=Shape(4, 4), far_gb_s=500.0)
    assert fast.codec == "raw"
    assert fast.why.startswith("int8:256 rejected: ")


def test_between_a_slow_and_a_fast_link_there_is_one_border():
    used = [int8(far_gb_s=0.01 * 1.2**k, near_gb_s=100.0).codec == "int8:256" for k in range(60)]
    assert used[0]
    assert not used[-1]
    assert used == sorted(used, reverse=True)


def test_a_gain_below_5_percent_is_refused_and_said():
    choices = [int8(far_gb_s=1.0 * 1.005**k, near_gb_s=100.0) for k in range(800)]
    narrow = [choice.why for choice in choices if choice.why.endswith("x only")]
    assert narrow
    assert all(1 <= float(why.split()[-2].removesuffix("x")) <= LEAST_GAIN for why in narrow)
    assert all(choice.codec == "raw" for choice in choices if choice.why in narrow)


def test_short_messages_stay_with_the_library():
    for shape in (Shape(2), Shape(4, 4), TWO_NODES):
        assert int8(size=64, shape=shape).algorithm == "native"
        assert int8(size=64, shape=shape, codec="raw").algorithm == "native"


@pytest.mark.parametrize("operation", COSTS)
@pytest.mark.parametrize("shape", [Shape(1), Shape(2), Shape(3), Shape(4, 4), Shape(5, 2, 2), TWO_NODES], ids=str)
def test_the_choice_is_the_least_cost_of_what_is_allowed(operation, shape):
    rates = made_up()
    for size in (4, 4096, 1 << 20, 1 << 28):
        choice = choose(operation, size, "raw", "float32", shape, rates)
        raw = rates.codings["raw", "float32"]
        allowed = candidates(operation, "raw", "float32", shape)
        costs = {name: cost_s(operation, name, size, raw, shape, rates) for name in allowed}
        assert choice.predicted_s == costs[choice.algorithm]
        if choice.algorithm == "native":
            assert costs["native"] <= LEAST_GAIN * min(costs.values())
        else:
            assert costs[choice.algorithm] == min(costs.values()) <= costs["native"] / LEAST_GAIN


@pytest.mark.parametrize("shape", [Shape(2), Shape(4, 4), TWO_NODES], ids=str)
def test_no_sum_is_rounded_at_every_hop(shape):
    """House rule: a lossy codec takes two steps, not a ring; neither do 16-bit sums."""
    for operation in ("allreduce", "reduce_scatter"):
        for codec, dtype in (("int8:256", "float32"), ("raw", "bfloat16"), ("exp", "bfloat16")):
            names = candidates(operation, codec, dtype, shape)
            assert names
            assert not {"ring", "rabenseifner", "native"} & set(names)
        assert "ring" in candidates(operation, "exp", "float32", shape)


@pytest.mark.parametrize("shape", [Shape(1), Shape(3), Shape(4, 4), Shape(5, 2, 2), TWO_NODES], ids=str)
@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter"])
@pytest.mark.parametrize(
    ("dtype", "codec"), [("bfloat16", "raw"), ("float16", "raw"), ("bfloat16", "exp"), ("float32", "int8:256")]
)
def test_by_rule_too_no_sum_is_rounded_at_every_hop(operation, dtype, codec, shape):
    """Without measured rates the same house rule holds, for every length and wherever the values are."""
    item_bytes = VALUE_BITS[dtype] // 8
    for n in (1, 1000, SMALL_BYTES // item_bytes, SMALL_BYTES // item_bytes + 1, 1 << 20, 1 << 28):
        for on_cpu, may_block in itertools.product((True, False), repeat=2):
            x = Values(n, item_bytes, dtype, codec, on_cpu)
            algorithm = by_rule(operation, x, shape, may_block)
            assert algorithm in COSTS[operation]
            assert algorithm not in (*ROUNDS_EACH_HOP, "native")
            if n > SMALL_BYTES:  # recursive doubling, which rounds log2(ranks) times, is for short ones
                assert algorithm in ("two_step", "grid", "two_level", "node_window")


def test_what_the_library_cannot_count_is_not_asked_of_it():
    n = 1 << 31
    assert "native" not in candidates("alltoall", "raw", "float32", TWO_NODES, n)
    assert "native" in candidates("alltoall", "raw", "float32", TWO_NODES, n - 1)
    assert "native" in candidates("broadcast", "raw", "float32", TWO_NODES, n)
    group = group_of(MPI.COMM_SELF)
    for operation in ("allgather", "alltoall", "reduce_scatter"):
        assert plan(operation, n, find_codec("raw"), group).algorithm != "native"


@pytest.mark.parametrize("operation", COSTS)
@pytest.mark.parametrize("shape", [Shape(1), Shape(2), Shape(4, 4), TWO_NODES], ids=str)
def test_a_codec_that_was_not_measured_is_never_used(operation, shape):
    for size in (4, 1 << 16, 1 << 28):
        choice = choose(operation, size, "mpc", "float32", shape, made_up(far_gb_s=0.001))
        plain = choose(operation, size, "raw", "float32", shape, made_up(far_gb_s=0.001))
        assert (choice.algorithm, choice.codec, choice.predicted_s) == (plain.algorithm, "raw", plain.predicted_s)
        assert choice.why == "mpc was not measured"


def test_codecs_without_rates_are_listed():
    asked = ["raw", "int8:256+ef", "zfp:8", "mpc", "zfp:8", "int8:256:sr", "exp"]
    assert unmeasured(asked, made_up()) == ["zfp:8", "mpc"]
    assert choose("allreduce", 1 << 20, "raw", "float32", TWO_NODES, replace(made_up(), codings={})) is None


def test_stochastic_rounding_has_the_rates_of_rounding_to_nearest():
    assert choose("allreduce", 1 << 20, "int8:256:sr", "float32", TWO_NODES, made_up()).codec == "int8:256:sr"


def test_a_link_of_the_pipeline_is_compressed_only_where_it_pays():
    tuning = made_up_tuning(far_gb_s=0.12, near_gb_s=100.0)
    n = 1 << 22
    assert link_codec("int8:256", n, False, tuning) == "int8:256"
    assert link_codec("int8:256", n, True, tuning) == "raw"
    assert link_codec("int8:256", 8, False, tuning) == "raw"  # latency, not bytes
    assert link_codec("raw", n, False, tuning) == "raw"
    assert link_codec("int8:256", n, True, None) == "int8:256"
    assert link_codec("mpc", n, False, tuning) == "raw"
    assert link_codec("mpc", n, False, None) == "mpc"


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("tuned", [False, True])
def test_every_rank_plans_the_same_and_the_front_doors_can_run_it(comm, tuned):
    from hpcllm.collectives.operations import ALGORITHMS

    for group in (group_of(comm), nodes_of_two(comm)):
        # another machine's rates on each rank: rank 0's count
        group.use_tuning(made_up_tuning(far_gb_s=10.0 ** (comm.rank - 1)) if tuned else None)
        for operation in COSTS:
            for name in CODECS:
                for dtype in (torch.float32, torch.bfloat16):
                    for n in [0, *SIZES]:
                        made = plan(operation, n, find_codec(name, dtype), group)
                        words = (made.algorithm, made.codec.name, made.predicted_s, made.why)
                        assert comm.allgather(words) == [words] * comm.size
                        assert made.algorithm in ALGORITHMS[operation]
                        assert made.codec.dtype == dtype
                        assert made.codec.name in ("raw", name)
        if group is not group_of(comm):
            group.free()


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("far_gb_s", [None, 0.01])
def test_auto_sums(comm, far_gb_s):
    """Whatever is chosen: near the float64 sum, the same bits on all ranks and the same again."""
    for group in (group_of(comm), nodes_of_two(comm)):
        if far_gb_s:
            group_of(group).use_tuning(made_up_tuning(far_gb_s=far_gb_s, near_gb_s=far_gb_s))
        for codec in ("raw", "bf16"):
            for n in (1, 1000, 1 << 18):
                addends = [
                    np.random.default_rng([rank, n]).standard_normal(n).astype("f4") for rank in range(comm.size)
                ]
                first, again = (allreduce(torch.from_numpy(addends[comm.rank].copy()), group, codec) for _ in range(2))
                exact = np.sum(addends, axis=0, dtype="f8")
                worst = 0.01 * (comm.size + 1) * np.abs(addends).max()  # bf16: 1/256 of a value, each time
                assert np.abs(first.numpy() - exact).max() <= worst
                assert torch.equal(first, again)
                assert len(set(comm.allgather(first.numpy().tobytes()))) == 1
        if group is not group_of(comm):
            group.free()


@pytest.mark.parallel([2, 3])
def test_new_tuning_is_heeded_in_the_background_too(comm):
    group = group_of(comm)
    n, codec = 1 << 22, find_codec("int8:256")
    slow, fast = (made_up_tuning(far_gb_s=speed, near_gb_s=speed, copy_gb_s=0.02) for speed in (0.01, 1000.0))
    group.background("gradients")
    for tuning, chosen in ((slow, "int8:256"), (fast, "raw")):
        group_of(comm).use_tuning(tuning)
        for each in (group, group.background("gradients")):
            assert plan("alltoall", n, codec, each).codec.name == chosen
            assert not each.plans


@pytest.mark.parallel([1, 2, 3, 4])
def test_the_shape_of_a_group(comm):
    group = nodes_of_two(comm)
    full, odd = divmod(comm.size, 2)
    assert group.shape == Shape(comm.size, full + odd, 1 if odd else 2)
    assert isinstance(made_up_tuning(), Tuning)
    group.free()


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter", "allgather"])
def test_the_library_is_asked_only_where_it_may_block(comm, operation):
    """A sum of the library that is polled moves on only when its waits wake up."""
    group = group_of(comm)
    most = LIBRARY_BYTES[operation] // 4
    for limit_s, small in ((None, "native"), (60.0, "node_window")):
        group.wire.waits = Waits(limit_s)
        chosen = {n: plan(operation, n, find_codec("raw"), group).algorithm for n in (100, most, most + 1)}
        assert chosen == {100: small, most: small, most + 1: "node_window"}
        assert plan(operation, 100, find_codec("int8"), group).algorithm in ("two_step", "bruck")


@pytest.mark.parallel([1, 2, 3])
def test_ranks_with_shared_arrays_leave_the_library_earlier_until_the_last_is_freed(comm):
    group, n = make_group(comm), LIBRARY_BYTES_SHARED["allreduce"] // 4

    def chosen():
        for k in (n, n + 1):
            allreduce(torch.zeros(k), group)
        return [group.plans["allreduce", k, "raw", torch.float32, "cpu"].algorithm for k in (n, n + 1)]

    assert chosen() == ["native", "native"]
    first, second = shared_zeros((2, n), group), shared_zeros(3, group)
    assert chosen() == ["native", "node_window"]
    free_shared(first, group)
    assert chosen() == ["native", "node_window"]
    free_shared(second, group)
    assert chosen() == ["native", "native"]
    group.free()


@pytest.mark.parallel([1, 2, 3])
def test_an_array_that_is_shared_on_some_ranks_only_has_the_same_sum(comm):
    group, n = make_group(comm), LIBRARY_BYTES_SHARED["allreduce"] // 4 + 5
    shared = shared_zeros(n, group)
    for _ in range(2):
        x = shared if comm.rank % 2 else torch.empty(n)
        x.fill_(comm.rank + 1)
        allreduce(x, group)
        assert x.eq(comm.size * (comm.size + 1) / 2).all()
    group.free()
