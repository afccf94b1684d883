"""Who writes and reads which block, on ranks that are only simulated: no MPI, no file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.checkpoint import layout
from hpcllm.checkpoint import plan as planning
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.plan import Part, Plan, Request, assign
from hpcllm.checkpoint.slabs import Slab, intersection, part_of, stretch, uncovered, whole
from hpcllm.checkpoint.state import Shards
from hpcllm.config.schema import ModelConfig
from hpcllm.errors import CheckpointError
from hpcllm.model.shapes import parameter_shapes, shard_of
from hpcllm.mpi.partition import chunk_range

SHAPES = st.lists(st.integers(1, 12), max_size=3).map(tuple)
SEEDS = st.integers(0, 2**32 - 1)
quick = settings(max_examples=100, deadline=None)
Specs = dict[str, DatasetSpec]
Memory = dict[Slab, np.ndarray]


@contextmanager
def small_blocks(most_bytes: int = 96):
    with mock.patch.object(layout, "BLOCK_BYTES", most_bytes):
        yield


def scattered(partition, rng: np.random.Generator, specs: Specs, ranks: int) -> list[list[Slab]]:
    """Each dataset cut into random boxes, each box on a random rank."""
    held: list[list[Slab]] = [[] for _ in range(ranks)]
    for name, spec in specs.items():
        for slab in partition(rng, name, spec.shape, int(rng.integers(10))):
            held[rng.integers(ranks)].append(slab)
    return held


def plan_all(holdings: Sequence[tuple[Specs, Sequence[Slab]]], *, exactly_once: bool) -> list[Plan]:
    """The plans of all ranks from the specs and slabs of each: agreement.make_plan without its messages."""
    ranks = len(holdings)

    def deliver(told: list) -> list[list]:
        found: list[list] = [[] for _ in range(ranks)]
        for to, thing in (pair for each in told for pair in each):
            found[to].append(thing)
        return found

    requests = deliver([planning.requests(specs, slabs, rank, ranks) for rank, (specs, slabs) in enumerate(holdings)])
    assigned = deliver([planning.assign_all(of_one, exactly_once=exactly_once) for of_one in requests])
    tasks = [planning.in_file_order(of_one) for of_one in assigned]
    sent = deliver([planning.remote_parts(tasks[rank], rank) for rank in range(ranks)])
    specs = {name: spec for each, _ in holdings for name, spec in sorted(each.items())}
    return [Plan(r, specs, tuple(holdings[r][1]), tasks[r], planning.by_turn(sent[r])) for r in range(ranks)]


def plans_to_write(specs: Specs, held: Sequence[Sequence[Slab]]) -> list[Plan]:
    asked = [({slab.dataset: specs[slab.dataset] for slab in slabs}, slabs) for slabs in held]
    return plan_all(asked, exactly_once=True)


def messages(plans: Sequence[Plan]) -> dict[tuple[int, int], tuple[list, list]]:
    """(holder, owner) -> what the holder sends or receives in its order, what the owner receives or sends in its."""
    found: dict[tuple[int, int], tuple[list, list]] = {}
    for rank, plan in enumerate(plans):
        for turn, parts in enumerate(plan.remote):
            for part in parts:
                assert part.turn == turn
                found.setdefault((rank, part.owner), ([], []))[0].append((turn, part.number, part.box))
        for turn, task in enumerate(plan.tasks):
            for part in task.parts:
                if part.rank != rank:
                    found.setdefault((part.rank, rank), ([], []))[1].append((turn, part.number, part.box))
    return found


def written(plans: Sequence[Plan], memory: Sequence[Memory]) -> dict[tuple[str, int], np.ndarray]:
    """What owners put together of every block, from the memory of all ranks."""
    file = {}
    for plan in plans:
        for task in plan.tasks:
            block = np.zeros(task.box.shape, plan.dtype(task.box))
            for part in task.parts:
                slab = plans[part.rank].slabs[part.number]
                block[part_of(part.box, task.box)] = memory[part.rank][slab][part_of(part.box, slab)]
            assert (task.box.dataset, task.index) not in file
            file[task.box.dataset, task.index] = block
    return file


def read(plans: Sequence[Plan], file: Mapping[tuple[str, int], np.ndarray]) -> list[Memory]:
    memory = [{slab: np.full(slab.shape, -1, plan.dtype(slab)) for slab in plan.slabs} for plan in plans]
    for plan in plans:
        for task in plan.tasks:
            for part in task.parts:
                slab = plans[part.rank].slabs[part.number]
                block = file[task.box.dataset, task.index]
                memory[part.rank][slab][part_of(part.box, slab)] = block[part_of(part.box, task.box)]
    return memory


@quick
@given(shapes=st.lists(SHAPES, min_size=1, max_size=4), seed=SEEDS, ranks=st.integers(1, 8))
def test_every_block_has_one_owner_and_every_element_reaches_it_once(partition, shapes, seed, ranks):
    specs = {f"d{n}": DatasetSpec(shape, "float32") for n, shape in enumerate(shapes)}
    with small_blocks():
        plans = plans_to_write(specs, scattered(partition, np.random.default_rng(seed), specs, ranks))
        owned = Counter((task.box.dataset, task.index) for plan in plans for task in plan.tasks)
        assert owned == {(name, index): 1 for name, spec in specs.items() for index in range(spec.blocks)}
        for plan in plans:
            assert [task.box for task in plan.tasks] == sorted(
                (specs[task.box.dataset].block(task.box.dataset, task.index) for task in plan.tasks),
                key=lambda box: (box.dataset, specs[box.dataset].block_offset(box)),
            )
            for task in plan.tasks:
                local = (Slab("", tuple(np.subtract(p.box.start, task.box.start)), p.box.shape) for p in task.parts)
                assert uncovered(task.box.shape, local) is None
                assert all(part_of(p.box, plans[p.rank].slabs[p.number]) is not None for p in task.parts)
        assert all(sent == received for sent, received in messages(plans).values())


@quick
@given(shape=SHAPES, seed=SEEDS, ranks=st.integers(1, 8))
def test_an_owner_has_much_of_its_block(partition, shape, seed, ranks):
    specs = {"d": DatasetSpec(shape, "float32")}
    with small_blocks():
        for plan in plans_to_write(specs, scattered(partition, np.random.default_rng(seed), specs, ranks)):
            for task in plan.tasks:
                has = Counter()
                for part in task.parts:
                    has[part.rank] += part.box.elements
                assert 2 * has[plan.rank] >= max(has.values())


@quick
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=3), seed=SEEDS, writers=st.integers(1, 8), readers=st.integers(1, 8)
)
def test_written_by_some_and_read_by_others(partition, index_of, shapes, seed, writers, readers):
    """Readers want random boxes, which overlap, repeat, and leave some of the file unread."""
    rng = np.random.default_rng(seed)
    specs = {f"d{n}": DatasetSpec(shape, "int32") for n, shape in enumerate(shapes)}
    values = {name: rng.integers(0, 1 << 20, spec.shape, dtype=np.int32) for name, spec in specs.items()}
    with small_blocks():
        held = scattered(partition, rng, specs, writers)
        memory = [{slab: values[slab.dataset][index_of(slab)] for slab in slabs} for slabs in held]
        file = written(plans_to_write(specs, held), memory)
        wanted = [slabs[: int(rng.integers(9))] for slabs in scattered(partition, rng, specs, readers)]
        wanted[0] = [whole(name, spec.shape) for name, spec in specs.items()] + wanted[0]
        plans = plan_all([(specs, slabs) for slabs in wanted], exactly_once=False)
        assert all(sent == received for sent, received in messages(plans).values())
        for found in read(plans, file):
            for slab, array in found.items():
                assert np.array_equal(array, values[slab.dataset][index_of(slab)])
        some = plan_all([(specs, slabs) for slabs in wanted[1:] or [[]]], exactly_once=False)
        needed = {part.box for plan in some for task in plan.tasks for part in task.parts}
        assert all(
            any(
                intersection(box, slab).elements
                for slabs in wanted[1:]
                for slab in slabs
                if slab.dataset == box.dataset
            )
            for box in needed
        )  # nobody reads what nobody wants


MODEL = ModelConfig(layers=2, hidden=24, heads=4, ffn=37, vocabulary=101)
KINDS = ("model", "optimizer/exp_avg")


def held_by(
    model: ModelConfig, dp: int, pp: int, tp: int, *, sharded: bool, once: bool
) -> tuple[Specs, list[list[Slab]]]:
    """What each rank of a mesh brings to a checkpoint (once), or wants of it.

    dp replicas share the state: each has a flat range of all that its stage and tp rank have; not sharded, they want
    all of it. Stages have parameters in turn.
    """
    shapes = parameter_shapes(model)
    specs = {f"{kind}/{name}": DatasetSpec(shape, "float32") for kind in KINDS for name, shape in shapes.items()}
    held = []
    for replica in range(dp):
        for stage in range(pp):
            names = [name for n, name in enumerate(shapes) if n % pp == stage]
            for shard in (Shards(shapes, rank, tp) for rank in range(tp)):
                held.append([s for kind in KINDS for s in flat_share(shard, kind, names, replica, dp, sharded, once)])
    return specs, held


def flat_share(shard, kind, names, replica, dp, sharded, once):
    sizes = [math.prod(shard_of(name, shard.shapes[name], shard.rank, shard.size)[1]) for name in names]
    first, end = chunk_range(sum(sizes), dp, replica) if sharded or once else (0, sum(sizes))
    place = 0
    for name, size in zip(names, sizes, strict=True):
        if max(first, place) < min(end, place + size) and (shard.writes(name) or not once):
            yield from shard.slabs_between(kind, name, max(first - place, 0), min(end - place, size))
        place += size


MESHES = st.sampled_from(
    [(dp, pp, tp) for dp in range(1, 9) for pp in (1, 2, 3) for tp in (1, 2, 3, 4) if dp * pp * tp <= 8]
)


@settings(max_examples=20, deadline=None)
@given(before=MESHES, after=MESHES, sharded=st.booleans(), most=st.sampled_from([500, 4096, 1 << 22]))
def test_written_by_one_mesh_and_read_by_another(index_of, before, after, sharded, most):
    rng = np.random.default_rng(7)
    with small_blocks(most):
        specs, held = held_by(MODEL, *before, sharded=True, once=True)
        values = {name: rng.standard_normal(spec.shape, dtype=np.float32) for name, spec in specs.items()}
        memory = [{slab: values[slab.dataset][index_of(slab)] for slab in slabs} for slabs in held]
        file = written(plans_to_write(specs, held), memory)
        _, wanted = held_by(MODEL, *after, sharded=sharded, once=False)
        plans = plan_all([(specs, slabs) for slabs in wanted], exactly_once=False)
        assert len({(task.box, task.index) for plan in plans for task in plan.tasks}) == len(file)
        assert sum(len(plan.tasks) for plan in plans) == len(file)  # each block is read once, whoever needs it
        for found in read(plans, file):
            assert all(array.tobytes() == values[s.dataset][index_of(s)].tobytes() for s, array in found.items())


def owned_bytes(plans: Sequence[Plan]) -> list[int]:
    return [sum(task.box.elements * plan.dtype(task.box).itemsize for task in plan.tasks) for plan in plans]


@pytest.mark.parametrize("ranks", range(2, 9))
def test_columns_are_written_by_all_in_one_stretch_each(ranks):
    """However unevenly the columns divide: each owns as many blocks as the others, give or take one."""
    spec = DatasetSpec((999, 41), "float32")
    held = []
    for rank in range(ranks):
        first, end = chunk_range(41, ranks, rank)
        held.append([Slab("w", (0, first), (999, end - first))])
    with small_blocks(41 * 4 * 10):
        plans = plans_to_write({"w": spec}, held)
    counts = [len(plan.tasks) for plan in plans]
    assert sum(counts) == 100
    assert max(counts) - min(counts) <= 1
    assert all(plan.tasks[-1].index - plan.tasks[0].index + 1 == len(plan.tasks) for plan in plans)


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2), (4, 1, 2), (2, 2, 2), (1, 1, 4), (8, 1, 1), (1, 1, 8)])
def test_a_model_is_written_evenly(mesh):
    """With tensors of many blocks: at most a tenth and a few blocks above the mean; most bytes do not travel far."""
    model = ModelConfig(layers=6, hidden=96, heads=8, ffn=256, vocabulary=1024)
    with small_blocks(1024):
        specs, held = held_by(model, *mesh, sharded=True, once=True)
        plans = plans_to_write(specs, held)
    total = sum(spec.bytes for spec in specs.values())
    brought = [sum(4 * slab.elements for slab in slabs) for slabs in held]
    for owned, own in zip(owned_bytes(plans), brought, strict=True):
        assert owned <= 1.1 * max(own, total / len(plans)) + 16 * 1024
    if mesh[2] == 1:  # without columns only blocks at the edges of shares travel
        sent = sum(4 * part.box.elements for plan in plans for turn in plan.remote for part in turn)
        assert sent <= 0.5 * 1024 * sum(len(slabs) for slabs in held)


def test_small_tensors_that_all_need_are_read_by_all():
    """200 tensors of one block: nobody reads more than twice the mean, and who reads which follows from names alone."""
    specs = {f"model/layout.{n}.norm.weight": DatasetSpec((64,), "float32") for n in range(200)}
    wanted = [whole(name, spec.shape) for name, spec in specs.items()]
    plans = plan_all([(specs, wanted)] * 8, exactly_once=False)
    assert max(len(plan.tasks) for plan in plans) <= 50
    again = plan_all([(specs, wanted[::-1])] * 8, exactly_once=False)
    assert [[task.box for task in plan.tasks] for plan in again] == [
        [task.box for task in plan.tasks] for plan in plans
    ]


def test_who_has_most_of_a_block_owns_it():
    spec = DatasetSpec((10, 10), "float32")
    parts = [
        Part(0, 0, Slab("w", (0, 0), (10, 2))),
        Part(1, 0, Slab("w", (0, 2), (10, 7))),
        Part(2, 0, Slab("w", (0, 9), (10, 1))),
    ]
    assert [owner for owner, _ in assign(Request("w", spec, tuple(parts)))] == [1]


def test_what_cannot_be_planned_is_named():
    spec, other = DatasetSpec((4,), "float32"), DatasetSpec((5,), "float32")
    left, right = Slab("w", (0,), (2,)), Slab("w", (2,), (2,))
    cases: list[tuple[list, str]] = [
        ([({"w": spec}, [left]), ({"w": other}, [])], "ranks disagree on w"),
        ([({"w": spec}, [left]), ({}, [])], r"do not make up w \(4,\): element \(2,\) is held 0 times"),
        ([({"w": spec}, [left]), ({"w": spec}, [left, right])], r"element \(0,\) is held 2 times"),
    ]
    for asked, message in cases:
        with pytest.raises(CheckpointError, match=message):
            plan_all(asked, exactly_once=True)
    assert plan_all(cases[1][0], exactly_once=False)[0].tasks  # a reader may leave something


@quick
@given(shape=SHAPES, seed=SEEDS)
def test_a_stretch_is_what_has_no_gaps(partition, index_of, shape, seed):
    rng = np.random.default_rng(seed)
    for outer in partition(rng, "w", shape, 2):
        numbers = np.arange(outer.elements).reshape(outer.shape)
        for cut in partition(rng, "w", outer.shape, 4):
            if not cut.elements:
                continue
            inner = Slab("w", tuple(np.add(outer.start, cut.start).tolist()), cut.shape)
            found = numbers[index_of(cut)].reshape(-1)
            has_gaps = found[-1] - found[0] + 1 != found.size
            assert stretch(inner, outer) == (None if has_gaps else found[0])
            assert intersection(inner, outer) == inner
