"""Schedules in every shape: complete, proved by the checker, their messages where they overlap with work."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.errors import ScheduleError
from hpcllm.pipeline import orders, schedules
from hpcllm.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Op, Placement, message_tag
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.clock import compute_needs, walk
from hpcllm.pipeline.schedules import SCHEDULES, Schedule, forward_only, make_schedule
from hpcllm.pipeline.timing import Times, simulate
from tests.pipeline.shapes import made, shapes, small

PLACEMENTS = [Placement(p, v, kind) for p in range(1, 6) for v in (1, 2, 3) for kind in ("loop", "v")]


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("chunk", [0, 1, 12])
def test_an_action_prints_and_parses_as_text(op, chunk):
    for microbatch in (0, 7, 12345):
        action = Action(op, microbatch, chunk)
        assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "3", "X3", "F-1", "F3 ", " F3", "f3", "F3B3", "RECV_3", "F1.", "F.1", "F٣"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is no action; an action is one of F, B"):
        Action.parse(text)


def test_all_actions_print_differently():
    assert len({str(Action(op, m, c)) for op in Op for m in range(20) for c in range(12)}) == 240 * len(Op)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_placement_gives_each_rank_its_chunks_and_finds_them_again(placement):
    homes = [placement.home(stage) for stage in range(placement.stages)]
    assert sorted(homes) == list(itertools.product(range(placement.ranks), range(placement.chunks)))
    assert [placement.stage(*home) for home in homes] == list(range(placement.stages))


def test_tags_fit_mpi_and_differ_between_all_messages_that_are_near_each_other():
    for chunks in (1, 2, 5):
        numbers = [(m, c, b) for m in range(16384 // chunks) for c in range(chunks) for b in (False, True)]
        tags = {message_tag(m, c, chunks, b) for m, c, b in numbers}
        assert len(tags) == len(numbers)
        assert max(tags) <= 32767
    assert message_tag(10**9, 3, 4, True) <= 32767


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_checker_proves_every_small_shape(name):
    for shape in small(name):
        check(made(*shape))


@given(shapes())
@settings(max_examples=150)
def test_the_checker_proves_larger_shapes(shape):
    check(make_schedule(*shape))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_validation_goes_forward_once_through_every_stage(placement):
    for microbatches in range(1, 9):
        schedule = forward_only(placement, microbatches)
        check(schedule, backward=False)
        assert sum(map(len, schedule.work())) == placement.stages * microbatches


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_backward_passes_are_whole_unless_bubbles_are_to_be_filled(name):
    assert all(action.op in (Op.FORWARD, Op.BACKWARD) for row in made(name, 3, 7, 1).work() for action in row)


def test_with_one_chunk_interleaved_is_1f1b():
    for p, m in itertools.product(range(1, 7), range(1, 14)):
        assert made("interleaved", p, m, 1).actions == made("1f1b", p, m, 1).actions


@given(shapes())
@settings(max_examples=100)
def test_sends_follow_their_work_and_receives_are_posted_ahead_of_theirs(shape):
    """Between work and its send stand receives alone; a receive has a piece of work to overlap with."""
    for row in make_schedule(*shape).actions:
        place = {action: i for i, action in enumerate(row)}
        first = next(action for action in row if action.op in COMPUTE)
        for action in row:
            if action.op in SENDS and (send := action.message(SENDS)) in place:
                assert all(a.op in RECEIVES.values() for a in row[place[action] + 1 : place[send]])
            if action.op in RECEIVES and (receive := action.message(RECEIVES)) in place and action != first:
                assert any(a.op in COMPUTE for a in row[place[receive] : place[action]])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_with_one_chunk_one_piece_of_work_ahead_is_early_enough(name):
    """So a rank needs one spare buffer."""
    for shape in small(name):
        for row in made(*shape).actions:
            for i, action in enumerate(row):
                if action.op in RECEIVES.values():
                    ahead = [a for a in row[i:] if a.op in COMPUTE][:2]
                    assert any(a.op in RECEIVES and a.message(RECEIVES) == action for a in ahead)


@given(shapes())
@settings(max_examples=60)
def test_no_send_ever_waits_for_its_receive_if_work_goes_by_the_clock(shape):
    """Each receive is posted at the latest when its message leaves."""
    schedule = make_schedule(*shape)
    chunks = schedule.placement.chunks
    spans = simulate(schedule, Times(forward=chunks, backward=2 * chunks, weight=chunks)).spans
    ends = [{action: end for action, _, end in row} for row in spans]
    posted: dict[tuple[int, Action], float] = {}
    for rank, row in enumerate(schedule.actions):
        now = 0.0
        for action in row:
            now = ends[rank].get(action, now)
            if action.op in RECEIVES.values():
                posted[rank, action] = now
    for rank, action, source in walk(schedule.work(), compute_needs(schedule.placement, schedule.work())):
        if source and source[0] != rank:
            assert posted[rank, action.message(RECEIVES)] <= ends[source[0]][source[1]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2f2b", 2, 4), f"no schedule '2f2b'; there are {', '.join(SCHEDULES)}"),
        (("1f1b", 2, 4, 2), "1f1b .* 1 chunk, not 2; chunks = 1 works, and so does interleaved with chunks = 2"),
        (("gpipe", 1, 1, 3), "1 chunk, not 3; chunks = 1 works, and so does interleaved with chunks = 3"),
        (("zb-v", 2, 4, 3), "2 chunks, not 3; chunks = 2 works, and so does interleaved with chunks = 3"),
        (("zb-v", 2, 4, 1), "2 chunks, not 1; chunks = 2 works, and so does interleaved with chunks = 1"),
        (("1f1b", 0, 4), "ranks = 0 does not exist; the least is 1"),
        (("interleaved", 2, -1, 0), "chunks = 0, microbatches = -1 does not exist; the least is 1"),
        (("1f1b", 10**6, 10**6), "1000000 ranks x 1 chunks x 1000000 microbatches = 1000000000000 forward passes"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(arguments, words):
    with pytest.raises(ScheduleError, match=words) as error:
        make_schedule(*arguments)
    assert error.value.exit_code == 2


def test_a_schedule_holds_what_is_in_range_alone():
    f0 = ((Action(Op.FORWARD, 0),),)
    for actions, m, words in [
        (f0, 0, "microbatches = 0"),
        ((*f0, ()), 1, "1 ranks has actions of 2"),
        (((Action(Op.FORWARD, 1),),), 1, "rank 0: F1, but microbatches go from 0 to 0"),
        (((Action(Op.FORWARD, 0, 2),),), 1, "rank 0: F0.2, but chunks go from 0 to 0"),
    ]:
        with pytest.raises(ScheduleError, match=re.escape(words)):
            Schedule("mine", Placement(1), m, actions)


def drawing(schedule: Schedule) -> list[str]:
    """One line a rank, one cell a tick, '.' where it idles."""
    chunks = schedule.placement.chunks
    timeline = simulate(schedule, Times(forward=chunks, backward=2 * chunks, weight=chunks))
    rows = []
    for row in timeline.spans:
        cells = ["."] * int(timeline.makespan)
        for action, start, end in row:
            cells[int(start) : int(end)] = [str(action), *["--"] * (int(end - start) - 1)]
        rows.append(" ".join(cell.ljust(2 if chunks == 1 else 4) for cell in cells).rstrip())
    return rows


@pytest.mark.parametrize(
    ("name", "p", "m"), [("gpipe", 3, 4), ("1f1b", 3, 4), ("zb-h1", 3, 4), ("interleaved", 2, 2), ("zb-v", 2, 3)]
)
def test_the_pictures_in_the_module_are_what_is_made(name, p, m):
    picture = re.search(rf"^{name}[,:].*\n((rank \d .*\n)+)", orders.__doc__, re.MULTILINE)
    assert [row[len("rank 0   ") :] for row in picture[1].splitlines()] == drawing(make_schedule(name, p, m))


def test_the_text_in_the_module_is_what_is_made():
    rows = re.findall(r"^    (rank \d: .*)$", schedules.__doc__, re.MULTILINE)
    assert rows == make_schedule("1f1b", 2, 2).text().splitlines()[-2:]


@given(st.integers(1, 12), st.integers(1, 40))
def test_groups_are_contiguous_and_as_large_as_the_ranks_or_larger_but_less_than_twice(ranks, microbatches):
    groups = orders._groups(microbatches, ranks)
    assert [m for group in groups for m in group] == list(range(microbatches))
    assert len(groups) == 1 or all(ranks <= len(group) for group in groups)
    assert all(len(group) < 2 * ranks for group in groups)
    assert len(groups[0]) == max(map(len, groups))
