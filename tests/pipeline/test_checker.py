"""The checker refuses what does not run, and nothing else; its messages say who waits for whom."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Action, Op, Placement
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.schedules import MOST_SCHEDULED, SCHEDULES, Schedule, forward_only, make_schedule
from tests.pipeline.rendezvous import runs
from tests.pipeline.shapes import made, shapes, small


@st.composite
def tiny(draw) -> Schedule:
    """Small enough that a change at random often matters."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    return make_schedule(name, draw(st.integers(1, 4)), draw(st.integers(1, 5)))


def accepts(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


def with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return replace(schedule, actions=tuple(rows))


def some_place(data, schedule: Schedule) -> tuple[int, list[Action], int]:
    """A rank, a copy of its actions, and a place among them."""
    rank = data.draw(st.integers(0, schedule.placement.ranks - 1))
    row = list(schedule.actions[rank])
    return rank, row, data.draw(st.integers(0, len(row) - 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_the_checker_proves_runs(name):
    for shape in small(name)[::3]:
        assert runs(made(*shape))


@given(tiny(), st.data())
@settings(max_examples=150)
def test_a_schedule_that_lacks_an_action_is_refused(schedule, data):
    rank, row, place = some_place(data, schedule)
    del row[place]
    assert not accepts(with_row(schedule, rank, row))


@given(tiny(), st.data())
@settings(max_examples=100)
def test_a_schedule_with_an_action_twice_is_refused(schedule, data):
    rank, row, place = some_place(data, schedule)
    row.insert(data.draw(st.integers(0, len(row))), row[place])
    assert not accepts(with_row(schedule, rank, row))


@given(tiny(), st.data())
@settings(max_examples=150)
def test_a_schedule_with_another_action_in_the_place_of_one_is_refused(schedule, data):
    rank, row, place = some_place(data, schedule)
    m = data.draw(st.integers(0, schedule.microbatches - 1))
    other = Action(data.draw(st.sampled_from(Op)), m, data.draw(st.integers(0, schedule.placement.chunks - 1)))
    if other != row[place]:
        row[place] = other
        assert not accepts(with_row(schedule, rank, row))


@given(tiny(), st.data())
@settings(max_examples=300)
def test_with_actions_moved_or_exchanged_it_is_accepted_exactly_if_it_runs(schedule, data):
    for _ in range(data.draw(st.integers(1, 3))):
        rank, row, place = some_place(data, schedule)
        other = min(data.draw(st.integers(0, 6)) + place, len(row) - 1)
        if data.draw(st.booleans()):
            row[place], row[other] = row[other], row[place]
        else:
            row.insert(place, row.pop(other))
        schedule = with_row(schedule, rank, row)
    assert accepts(schedule) == runs(schedule)


@given(shapes(), st.data())
@settings(max_examples=100)
def test_receives_may_be_posted_as_early_as_anybody_likes(shape, data):
    schedule = make_schedule(*shape)
    rank, row, place = some_place(data, schedule)
    if row[place].op in (Op.RECV_FORWARD, Op.RECV_BACKWARD):
        row.insert(data.draw(st.integers(0, place)), row.pop(place))
        check(with_row(schedule, rank, row))


@given(st.lists(st.sampled_from(["B", "I W"]), min_size=4, max_size=4))
@settings(max_examples=16)
def test_whole_and_halved_backward_passes_may_be_mixed(halves):
    rows = ["RECV_B0 RECV_B1 F0 SEND_F0 F1 SEND_F1 0 1", "RECV_F0 RECV_F1 F0 2 SEND_B0 F1 3 SEND_B1"]
    texts = []
    for row in rows:
        words = [
            " ".join(f"{op}{int(word) % 2}" for op in halves[int(word)].split()) if word.isdigit() else word
            for word in row.split()
        ]
        texts.append(tuple(map(Action.parse, " ".join(words).split())))
    schedule = Schedule("mixed", Placement(2), 2, tuple(texts))
    check(schedule)
    assert runs(schedule)


def of_text(*rows: str, microbatches: int = 1, placement: Placement | None = None) -> Schedule:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("by hand", placement or Placement(len(rows)), microbatches, actions)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (of_text("B0"), "rank 0: F0 is missing"),
        (of_text("F0"), "rank 0: F0 needs either B0, or I0 and W0, but has none of them"),
        (of_text("F0 I0"), "but has I0"),
        (of_text("F0 I0 W0 B0"), "but has B0, I0, W0"),
        (of_text("F0 W0 I0"), "rank 0: F0, I0, W0 have to come in this order"),
        (of_text("F0 B0 B0"), "rank 0: B0 twice"),
        (of_text("F0 SEND_F0 B0"), "rank 0: SEND_F0 has no other end"),
        (of_text("F0 RECV_F0 B0"), "rank 0: RECV_F0 has no other end"),
        (of_text("F0 F0.1 RECV_B0 B0.1 B0", placement=Placement(1, 2)), "rank 0: RECV_B0 has no other end"),
        (of_text("F0 F0.1 B0 B0.1", placement=Placement(1, 2)), "deadlock: rank 0 at B0 waits for itself to do B0.1"),
        (of_text("F0 RECV_B0 B0", "RECV_F0 F0 B0 SEND_B0"), "rank 0: SEND_F0 is missing, which belongs to F0"),
        (of_text("F0 SEND_F0 RECV_B0 B0", "F0 RECV_F0 B0 SEND_B0"), "rank 1: F0 comes before RECV_F0, but needs it"),
        (of_text("SEND_F0 F0 RECV_B0 B0", "RECV_F0 F0 B0 SEND_B0"), "rank 0: SEND_F0 comes before F0, but needs it"),
        (
            of_text(
                "F0 SEND_F0 RECV_B0 B0 F1 SEND_F1 RECV_B1 B1",
                "RECV_F0 RECV_F1 F0 F1 B0 SEND_B0 B1 SEND_B1",
                microbatches=2,
            ),
            "a deadlock: rank 0 at B0 waits for rank 1 to do SEND_B0; rank 1 at F1 waits for rank 0 to do SEND_F1",
        ),
        (
            of_text(
                "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1",
                "RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1",
                microbatches=2,
            ),
            "rank 0 at SEND_F1 waits for rank 1 to post RECV_F1; rank 1 at SEND_B0 waits for rank 0 to post RECV_B0",
        ),
    ],
)
def test_the_fault_is_named(schedule, words):
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    assert words in str(error.value)
    assert not runs(schedule)


def test_the_circle_of_many_ranks_goes_round_once_and_starts_where_it_closes():
    """Four ranks in a row; the last three wait for each other, and rank 0 for them."""
    good = make_schedule("1f1b", 4, 6)
    row = list(good.actions[3])
    row.remove(Action.parse("F5"))
    row.insert(row.index(Action.parse("F0")), Action.parse("F5"))
    row.remove(Action.parse("RECV_F5"))
    row.insert(0, Action.parse("RECV_F5"))
    with pytest.raises(ScheduleError, match="a deadlock") as error:
        check(with_row(good, 3, row))
    sentences = str(error.value).removeprefix("a deadlock: ").split("; ")
    waiting = [sentence.split()[1] for sentence in sentences]
    awaited = [sentence.split(" rank ")[1].split()[0] for sentence in sentences]
    assert awaited == waiting[1:] + waiting[:1]
    assert len(set(waiting)) == len(waiting) > 1


def test_forward_passes_alone_are_no_training_and_training_is_more_than_them():
    for p, v in itertools.product(range(1, 4), range(1, 3)):
        schedule = forward_only(Placement(p, v), 3)
        with pytest.raises(ScheduleError, match="needs either B0"):
            check(schedule)
        with pytest.raises(ScheduleError, match="B0 among forward passes alone"):
            check(make_schedule("1f1b", p, 3), backward=False)


def test_messages_with_one_tag_have_to_be_posted_in_the_order_of_their_sends():
    """16384 messages later tags are used again."""
    m = 16385
    schedule = make_schedule("gpipe", 2, m)
    check(schedule)
    row = list(schedule.actions[1])
    late = Action(Op.RECV_FORWARD, m - 1)
    row.remove(late)
    with pytest.raises(
        ScheduleError, match=r"rank 1 posts RECV_F16384 where rank 0 sends what is for RECV_F0,.* tag 0"
    ):
        check(with_row(schedule, 1, [late, *row]))


def test_the_checker_is_not_fooled_by_many_microbatches_and_few_actions():
    rows = ((Action(Op.FORWARD, 0), Action(Op.BACKWARD, 0)),)
    with pytest.raises(ScheduleError, match="F1 is missing"):
        check(Schedule("short", Placement(1), MOST_SCHEDULED, rows))
    with pytest.raises(ScheduleError, match="at most"):
        check(Schedule("short", Placement(1), MOST_SCHEDULED + 1, rows))
