"""A schedule as text: what is written is read again; what nobody could have meant is refused with line and word."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Placement
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.schedules import Schedule, make_schedule, read_schedule
from tests.pipeline.rendezvous import runs
from tests.pipeline.shapes import shapes

HEAD = "schedule my own\nranks 2\nchunks 1\nplacement loop\nmicrobatches 2\n"
WORK = "rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1\n"


@given(shapes())
@settings(max_examples=60)
def test_what_is_written_is_read_again(shape):
    schedule = make_schedule(*shape)
    assert read_schedule(schedule.text()) == schedule


def test_lines_in_any_order_with_comments_and_room_are_read():
    head = "\n\t# \n".join(reversed(HEAD.splitlines()))
    text = "# of the course\r\n\r\n  " + head + "\n" + WORK.replace(" F", "   F")
    assert read_schedule(text) == read_schedule(HEAD + WORK)


@given(shapes())
@settings(max_examples=60)
def test_messages_are_added_where_there_are_none(shape):
    schedule = make_schedule(*shape)
    silent = Schedule(schedule.name, schedule.placement, schedule.microbatches, tuple(map(tuple, schedule.work())))
    assert read_schedule(silent.text()) == schedule


def test_messages_that_are_there_are_left_as_they_are():
    text = make_schedule("1f1b", 2, 2).text().replace("RECV_F1 ", "")
    assert "RECV_F1" not in read_schedule(text).text()
    with pytest.raises(ScheduleError, match="rank 1: RECV_F1 is missing"):
        check(read_schedule(text))


def test_a_name_may_have_words_and_the_v_any_number_of_chunks():
    rows = "rank 0: F0 F0.1 F0.2 B0.2 B0.1 B0\nrank 1: F0 F0.1 F0.2 B0.2 B0.1 B0\n"
    schedule = read_schedule("schedule a b c\nplacement v\nranks 2\nmicrobatches 1\nchunks 3\n" + rows)
    assert (schedule.name, schedule.placement) == ("a b c", Placement(2, 3, "v"))
    check(schedule)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line of the schedule says schedule or ranks or chunks or placement or microbatches; a line is one of"),
        (HEAD.replace("chunks 1\n", "") + WORK, "no line of the schedule says chunks"),
        ("stages 3\n" + HEAD + WORK, "line 1: 'stages'; a line is one of schedule, ranks, chunks"),
        (HEAD + "ranks 2\n" + WORK, "line 6: a second 'ranks'"),
        (HEAD.replace("ranks 2", "ranks two") + WORK, "line 2: ranks 'two'; it is a number from 1"),
        (HEAD.replace("ranks 2", "ranks ٢") + WORK, "line 2: ranks '٢'; it is a number"),
        (HEAD.replace("ranks 2", "ranks") + WORK, "line 2: ranks ''; it is a number"),
        (HEAD.replace("ranks 2", "ranks 0") + WORK, "ranks = 0 does not exist; the least is 1"),
        (HEAD.replace("ranks 2", "ranks 3") + WORK, "3 ranks has actions of 2"),
        (HEAD.replace("ranks 2", "ranks 999999999") + WORK, "999999999 ranks x .* forward passes; valid: at most"),
        (HEAD.replace("chunks 1", "chunks 999999999") + WORK, "999999999 chunks x .* forward passes; valid: at most"),
        (HEAD.replace("microbatches 2", "microbatches " + "9" * 5000) + WORK, "line 5: microbatches '9{40}...'"),
        (HEAD.replace("loop", "spiral") + WORK, "line 4: placement 'spiral'; it is loop or v"),
        (HEAD.replace("my own", "") + WORK, "name is one line of printable characters, not ''"),
        (HEAD.replace("my own", "a\x1b[2Jb") + WORK, r"printable characters, not 'a\\x1b"),
        (HEAD + WORK.replace("rank 1", "rank 2"), "line 7: rank 2, but rank 1 comes next"),
        (HEAD + "rank 1: F0\n", "line 6: rank 1, but rank 0 comes next"),
        (HEAD + WORK.replace("F0 B0", "F0 b0"), "line 7, word 2: 'b0' is no action; an action is one of F, B"),
        (HEAD + WORK.replace("F1 B0", "F2 B0"), "line 6, word 2: F2, but microbatches go from 0 to 1"),
        (HEAD + WORK.replace("F1 B0", "F1.1 B0"), "line 6, word 2: F1.1, but chunks go from 0 to 0"),
        (HEAD + WORK.replace("F1 B0", "X" * 10**6 + " B0"), "line 6, word 2: 'X{40}...' is no action"),
        (
            HEAD + WORK.replace("F0 F1 B0", "B0 F0 F1"),
            "rank 0 at B0 waits for rank 1 to do B0; rank 1 at F0 waits",
        ),
        (HEAD + WORK.replace("F0 F1 B0", "F0 B0"), "rank 1 at F1 waits for rank 0 to do F1, which it never does"),
        ("PK\x03\x04\x00\x00", "line 1: "),
    ],
)
def test_what_nobody_could_have_meant_is_refused(text, words):
    with pytest.raises(ScheduleError, match=words) as error:
        read_schedule(text)
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()


WORDS = ["F0", "B1", "I0", "W0", "F0.1", "SEND_F0", "RECV_B1", "rank", "0:", "ranks", "2", "\n", " ", "#", "v", "\x85"]


@given(st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join), st.booleans())
@settings(max_examples=300)
def test_any_text_is_a_schedule_or_refused(text, with_head):
    try:
        schedule = read_schedule(HEAD + WORK[: len(text)] + text if with_head else text)
    except ScheduleError:
        return
    assert read_schedule(schedule.text()) == schedule


@given(st.data())
@settings(max_examples=200)
def test_a_written_schedule_with_a_few_characters_changed_is_a_schedule_or_refused(data):
    text = make_schedule("zb-v", 2, 2).text()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text)))
        text = text[:place] + data.draw(st.sampled_from(["", " ", "\n", "1", ".", "F", "-"])) + text[place + 1 :]
    try:
        schedule = read_schedule(text)
        check(schedule)
    except ScheduleError:
        return
    assert runs(schedule)
