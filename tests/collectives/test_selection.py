"""What `auto` runs: rules without tuning, the least predicted time with it, and the same on every rank."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_rates import made_up, made_up_tuning, shapes
from mpi4py import MPI

import hpcllm.collectives.group
from hpcllm.codecs import find_codec
from hpcllm.codecs.names import examples
from hpcllm.collectives import allreduce, free_shared, operations, shared_zeros
from hpcllm.collectives.assumed_rates import WIRE_GB_S
from hpcllm.collectives.auto import plan
from hpcllm.collectives.cost import COSTS, cost_s
from hpcllm.collectives.group import are_crowded, group_of, make_group
from hpcllm.collectives.selection import (
    EXCHANGED_BYTES,
    IN_WINDOWS,
    LEAST_GAIN,
    LEAST_GAIN_OVER_LIBRARY,
    LIBRARY_BYTES,
    LIBRARY_BYTES_BETWEEN,
    LIBRARY_BYTES_CROWDED,
    LIBRARY_BYTES_OF_TWO,
    LIBRARY_BYTES_SHARED,
    ROUNDS_EACH_HOP,
    SMALL_BYTES,
    Values,
    by_rule,
    candidates,
    choose,
    codec_by_rule,
    codec_bytes,
    link_codec,
    unmeasured,
)
from hpcllm.collectives.tuning import VALUE_BITS, LibraryCall, Shape, Tuning
from hpcllm.mpi import wait
from hpcllm.mpi.wait import Waits
from hpcllm.system.hardware.pci_devices import Nic

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
def test_where_the_library_was_measured_to_be_quick_at_a_length_no_codec_takes_its_place_there(operation):
    shape, quick = Shape(2, 2), {operation: LibraryCall(1e-5, 0.12, short_gb_s=0.12, medium_gb_s=2.0)}
    chosen = {size: int8(size, shape, operation=operation, library=quick).algorithm for size in (1 << 20, 4 << 20)}
    assert chosen[1 << 20] == "native"
    assert chosen[4 << 20] != "native"


@given(st.sampled_from(sorted(COSTS)), shapes.filter(lambda shape: shape.nodes > 1))
def test_with_measured_rates_too_little_is_sent_between_nodes_as_it_is(operation, shape):
    x = codec_bytes(shape.ranks, 0.0) - 1
    choice = int8(x, shape, operation=operation, far_gb_s=1e-3)
    assert choice.codec == "raw"
    assert choice.why.startswith(("too short for int8:256", "int8:256 rejected"))
    assert int8(codec_bytes(2, 0.0), Shape(2, 2), operation=operation, far_gb_s=1e-3).codec == "int8:256"


def test_with_measured_rates_what_arrives_within_two_milliseconds_is_sent_as_it_is():
    """Of sums and of messages, although the rates say that the codec would win."""
    short = int8(1 << 20, Shape(2, 2), far_gb_s=0.6)
    assert (short.codec, short.why) == ("raw", "too short for int8:256")
    assert int8(16 << 20, Shape(2, 2), far_gb_s=0.6).codec == "int8:256"
    tuning = made_up_tuning(far_gb_s=0.6)
    assert [link_codec("int8:256", n, False, tuning) for n in (1 << 18, 1 << 21)] == ["raw", "int8:256"]


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
            assert costs["native"] <= LEAST_GAIN_OVER_LIBRARY * min(costs.values())
        else:
            assert costs[choice.algorithm] == min(costs.values()) <= costs["native"] / LEAST_GAIN_OVER_LIBRARY


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
    assert link_codec("mpc", n, False, tuning) == "raw"
    assert link_codec("mpc", n, True, None) == "mpc"


# GB/s of the wire, codec, whether it was worth it: 64 MiB between two hosts, measured (perf/library_ratios.md)
WORTH = [(0.125, "int8:256", True), (0.125, "exp", True), (0.125, "zfp:8", False), (1.25, "int8:256", True)]
WORTH += [(1.25, "exp", False), (1.25, "zfp:8", False), (None, "int8:256", True), (None, "exp", False)]
WORTH += [(None, "zfp:8", False), (25.0, "int8:256", False), (25.0, "mpc", False)]


@pytest.mark.parametrize(("wire_gb_s", "codec", "pays"), WORTH)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_measured_rates_a_codec_is_taken_where_coarse_ones_say_that_it_pays(wire_gb_s, codec, pays, dtype):
    item_bytes, shape = VALUE_BITS[dtype] // 8, Shape(2, 2)
    x = Values((64 << 20) // item_bytes, item_bytes, dtype, codec)
    expected = codec if pays else "raw"
    assert link_codec(codec, x.n, False, None, dtype, wire_gb_s) == expected
    if dtype == "float32":
        assert codec_by_rule("allreduce", x, shape, wire_gb_s) == expected
    assert codec_by_rule("allreduce", replace(x, on_cpu=False), shape, wire_gb_s) == codec
    assert codec_by_rule("allreduce", x, Shape(2), wire_gb_s) == link_codec(codec, x.n, True, None, dtype) == codec
    little = replace(x, n=codec_bytes(2, wire_gb_s) // item_bytes - 1)
    assert codec_by_rule("allreduce", little, shape, wire_gb_s) == "raw"
    assert link_codec(codec, little.n, False, None, dtype, wire_gb_s) == "raw"
    for full in (Shape(6, 2, 3), Shape(6, 6)):  # of each rank's part as little
        cut = replace(x, n=3 * (codec_bytes(2, 1e-3) // item_bytes - 1))
        assert codec_by_rule("allreduce", cut, full, 1e-3) == "raw"
        assert codec_by_rule("allreduce", replace(cut, n=cut.n + 3), full, 1e-3) == codec


@pytest.mark.parametrize(("wire_gb_s", "least_bytes"), [(0.0125, 256 << 10), (0.125, 256 << 10), (1.25, 4 << 20)])
def test_a_faster_wire_takes_a_codec_from_longer_arrays_on(wire_gb_s, least_bytes):
    """Of the sizes that perf/library_ratios.md measures, a quarter of each other, those where int8 was not slower."""
    shorter, x = (Values(size_bytes // 4, 4, "float32", "int8:256") for size_bytes in (least_bytes // 4, least_bytes))
    for operation in COSTS:
        assert codec_by_rule(operation, shorter, Shape(2, 2), wire_gb_s) == "raw"
        assert codec_by_rule(operation, x, Shape(2, 2), wire_gb_s) == "int8:256"
    assert codec_by_rule("allreduce", replace(x, on_cpu=False, n=1 << 16), Shape(2, 2), wire_gb_s) == "int8:256"


@given(shapes, st.sampled_from(["int8:256", "int4:128", "int8:32:sr"]), st.integers(0, 12))
def test_without_measured_rates_too_there_is_one_border_between_slow_and_fast_wires(shape, codec, k):
    x = Values((codec_bytes(shape.ranks, None) << k) // 4, 4, "float32", codec)
    taken = [codec_by_rule("allreduce", x, shape, 1e-3 * 1.5**step) == codec for step in range(40)]
    assert taken == sorted(taken, reverse=True)
    assert taken[0]
    assert taken[-1] == (shape.nodes == 1)


@given(shapes, st.sampled_from(sorted(COSTS)), st.sampled_from(examples()), st.integers(0, 30))
def test_a_wire_that_nobody_knows_is_an_assumed_one(shape, operation, codec, k):
    x = Values(1 << k, 4, "float32", codec)
    chosen = codec_by_rule(operation, x, shape, None)
    assert chosen == codec_by_rule(operation, x, shape, WIRE_GB_S)
    assert chosen in ("raw", codec)


@pytest.mark.parallel([2, 3, 4])
def test_rank_0_s_network_interfaces_count_on_every_rank(comm, monkeypatch):
    speeds = [[12.5, 12.5], [0.125], [], [1.0]]
    cards = [Nic(f"c{k}", "infiniband", "", None, speed, True) for k, speed in enumerate(speeds[comm.rank])]
    monkeypatch.setattr(hpcllm.collectives.group, "find_nics", lambda: cards)
    for first, expected in ((comm.rank, 25.0), (-comm.rank, wire_gb_s_of(speeds[comm.size - 1]))):
        turned = comm.Split(0, first)
        for node in (turned.Split(turned.rank), turned):
            group = make_group(turned, node)
            between = expected if group.nodes > 1 else None
            assert group.wire_gb_s == (pytest.approx(between) if between else None)
            n = (16 << 20) // 4
            both = group, group.background("gradients")
            chosen = [plan("allreduce", n, find_codec("int8"), each).codec.name for each in both]
            rule = codec_by_rule("allreduce", Values(n, 4, "float32", "int8:256"), group.shape, between)
            assert comm.allgather(chosen) == [[rule, rule]] * comm.size
            group.free()
        turned.Free()


def wire_gb_s_of(speeds):
    return sum(speeds) or None


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
    assert group.shape == Shape(comm.size, full + odd, 1 if odd else 2, group.crowded)
    assert isinstance(made_up_tuning(), Tuning)
    group.free()


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_group_is_crowded_where_ranks_of_a_node_have_to_share_a_core(comm):
    """By the masks at the time, on every rank alike, also on those of another node."""
    allowed = sorted(os.sched_getaffinity(0))
    shared = {allowed[0]}
    own = {allowed[comm.rank % len(allowed)]}
    try:
        for cores, most in ((shared, 1), (own, len(allowed)), (set(allowed), len(allowed))):
            os.sched_setaffinity(0, cores)
            for node, ranks in ((None, comm.size), (comm.Split(comm.rank // 2), min(comm.size, 2))):
                group = make_group(comm, node)
                assert group.shape.crowded == group.crowded == (ranks > most)
                assert len(set(comm.allgather(group.crowded))) == 1
                group.free()
    finally:
        os.sched_setaffinity(0, allowed)


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=5))
def test_ranks_are_crowded_if_no_choice_of_cores_gives_each_its_own(cores):
    has_choice = any(len(set(choice)) == len(cores) for choice in itertools.product(*cores))
    assert are_crowded(cores) == (not has_choice)


@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter", "allgather"])
def test_crowded_ranks_leave_the_library_later_and_only_for_arrays_that_are_not_shared(operation):
    for size_bytes in (1 << k for k in range(8, 28)):
        x = Values(size_bytes // 4, 4, "float32", "raw")
        for crowded, most in ((False, LIBRARY_BYTES), (True, LIBRARY_BYTES_CROWDED)):
            expected = "native" if size_bytes <= most[operation] else "node_window"
            assert by_rule(operation, x, Shape(3, crowded=crowded), may_block=True) == expected
        shared = {by_rule(operation, x, Shape(3, crowded=crowded), True, has_shared=True) for crowded in (True, False)}
        assert len(shared) == 1
    assert LIBRARY_BYTES_CROWDED[operation] >= LIBRARY_BYTES[operation]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("operation", COSTS)
def test_short_calls_of_the_foreground_block_under_a_limit_as_without_one(comm, operation, monkeypatch):
    """The same plan, the same call, the same bits; in the background, and unguarded, the call is polled."""
    made = {}
    cases = [(None, False, False), (60.0, True, True), (60.0, False, True), (60.0, True, False)]
    for limit_s, foreground, guarded in cases:
        group = make_group(comm)
        group.wire.waits = Waits(limit_s, foreground=foreground)
        monkeypatch.setattr(wait, "job_waits", wait.JobWaits(guarded=guarded))
        x = torch.arange(24.0) + comm.rank
        for _ in range(2):  # by a plan, then at once
            got = getattr(operations, operation)(x.clone(), group)
        [made_plan] = group.plans.values()
        made[limit_s, foreground, guarded] = made_plan.algorithm, got
        assert not wait.job_waits.calls
        group.free()
    free, *others = made.values()
    assert all(torch.equal(got, free[1]) for _, got in others)
    assert free[0] == others[0][0] == "native"
    assert (others[1][0] == others[2][0] == "native") == (operation not in IN_WINDOWS)


def test_two_ranks_exchange_what_a_ring_would_send_in_two_turns():
    for size_bytes in (SMALL_BYTES + 4, EXCHANGED_BYTES, EXCHANGED_BYTES + 4):
        x = Values(size_bytes // 4, 4, "float32", "raw")
        expected = "recursive_doubling" if size_bytes <= EXCHANGED_BYTES else "ring"
        assert by_rule("allreduce", x, Shape(2, 2), may_block=False) == expected
        assert by_rule("allreduce", x, Shape(3, 3), may_block=False) in ("ring", "rabenseifner")
        coded = replace(x, codec="exp")
        assert by_rule("allreduce", coded, Shape(2, 2), may_block=False) == "two_step"
        assert codec_by_rule("allreduce", coded, Shape(2, 2), WIRE_GB_S) == "raw"  # at the border as behind it


@pytest.mark.parametrize(
    ("operation", "shape", "own", "most"),
    [
        ("reduce_scatter", Shape(2, 2), "ring", LIBRARY_BYTES_BETWEEN),
        ("reduce_scatter", Shape(4, 2, 2), "ring", LIBRARY_BYTES_BETWEEN),
        ("allreduce", Shape(4, 2, 2), "two_level", LIBRARY_BYTES_BETWEEN),
        ("allreduce", Shape(2, 2), "ring", LIBRARY_BYTES_OF_TWO),
        ("allreduce", Shape(4, 4), "ring", 4 * SMALL_BYTES),
        ("allreduce", Shape(32, 32), "ring", LIBRARY_BYTES_BETWEEN),
    ],
)
def test_between_nodes_sums_that_may_block_are_the_library_s_for_longer(operation, shape, own, most):
    def chosen(size_bytes, may_block, codec="raw"):
        return by_rule(operation, Values(size_bytes // 4, 4, "float32", codec), shape, may_block)

    assert [chosen(most, each) for each in (True, False)] == ["native", own]
    assert [chosen(most + 4, each) for each in (True, False)] == [own, own]
    assert chosen(most, True, "int8:256") in ("two_step", "two_level", "grid")


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter", "allgather"])
def test_the_library_is_asked_only_where_it_may_block(comm, operation):
    """A sum of the library that is polled moves on only when its waits wake up."""
    group = group_of(comm)
    most = (LIBRARY_BYTES_CROWDED if group.crowded else LIBRARY_BYTES)[operation] // 4
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
