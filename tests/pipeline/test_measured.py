"""A trace comes back as it was written; what is no trace is refused by name, whatever it is."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.errors import DataError, ScheduleError
from hpcllm.pipeline.measured import FIRST_ID, parse_trace, read_trace
from hpcllm.pipeline.schedules import SCHEDULES, make_schedule
from tests.pipeline.made_up_traces import Disturbance, as_text, happened, made_up, trace

JUNK = [
    None,
    True,
    -1,
    0,
    1.5,
    1e300,
    float("nan"),
    10**400,
    "",
    "F0",
    "\ud800",
    [],
    {},
    [[]],
    {"a": 1},
    "loop",
    1 << 40,
]


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99), st.floats(0, 1e5))
def test_a_trace_comes_back_from_the_time_of_the_first_entry_on(name, ranks, m, seed, later_s):
    schedule = make_schedule(name, ranks, m)
    rows, waits = happened(schedule, Disturbance(0.01, 0.01, 0.01, 0.01), seed)
    (measured,) = parse_trace(as_text(trace(schedule, rows, waits, later_s=later_s)))
    assert measured.schedule == schedule
    zero = min(start for row in (*rows, *waits) for _, start, _ in row)
    assert min(measured.entries) == 0
    for before, after in zip([*rows, *waits], [*measured.rows, *measured.waits], strict=True):
        assert [what for what, _, _ in after] == [what for what, _, _ in before]
        assert [s for _, s, _ in after] == pytest.approx([s - zero for _, s, _ in before], abs=2e-6)
        assert [e for _, _, e in after] == pytest.approx([e - zero for _, _, e in before], abs=2e-6)


def test_every_replica_is_read_and_events_of_others_are_left_alone():
    first, second = made_up(seed=1, jitter=0.01), made_up(seed=2, jitter=0.01)
    for event in second["traceEvents"]:
        event["pid"] = FIRST_ID + 3
    first["traceEvents"] += [*second["traceEvents"], {"ph": "C", "name": "memory"}, {"ph": "X", "cat": "gpu"}, 7]
    assert [measured.replica for measured in parse_trace(as_text(first))] == [0, 3]


def _event(trace, category="compute"):
    return next(event for event in trace["traceEvents"] if event.get("cat") == category)


BROKEN = {
    "no 'otherData'": lambda t: t.pop("otherData"),
    "no 'traceEvents'": lambda t: t.update(traceEvents={}),
    "no event": lambda t: t.update(traceEvents=[]),
    "no 'schedule'": lambda t: t["otherData"].update(schedule=3),
    "no 'ranks'": lambda t: t["otherData"].update(ranks=True),
    "no 'microbatches'": lambda t: t["otherData"].update(microbatches=0),
    "for 4 ranks has actions of 3": lambda t: t["otherData"].update(ranks=4),
    "valid: at most 131072": lambda t: t["otherData"].update(chunks=1 << 30),
    "its placement is 'w'": lambda t: t["otherData"].update(placement="w"),
    "no 'clock_error_us'": lambda t: t["otherData"].update(clock_error_us=float("inf")),
    "'X9' is no action": lambda t: t["otherData"]["actions"][0].append("X9"),
    "not lists": lambda t: t["otherData"]["actions"].__setitem__(0, 5),
    "rank 1": lambda t: t["otherData"]["actions"][1].pop(),
    "rank 8; its schedule has 3 ranks": lambda t: _event(t).update(tid=FIRST_ID + 8),
    "no 'tid'": lambda t: _event(t).update(tid="1"),
    "no 'ts'": lambda t: _event(t).update(ts="early"),
    "has the duration -1": lambda t: _event(t).update(dur=-1),
    "did 'F9' as its action 0, where its schedule says 'F0'": lambda t: _event(t).update(name="F9"),
    "did 9 actions, its schedule says 10": lambda t: t["traceEvents"].remove(
        [event for event in t["traceEvents"] if event.get("cat") == "compute" and event["tid"] == FIRST_ID][-1]
    ),
    "began F1": lambda t: _event(t).update(dur=_event(t)["dur"] + 1000),
}


@pytest.mark.parametrize("said", BROKEN)
def test_what_is_wrong_is_named(said, tmp_path):
    broken = made_up()
    BROKEN[said](broken)
    path = tmp_path / "a trace.json"
    path.write_text(as_text(broken))
    with pytest.raises(DataError, match=r"a trace\.json' is no trace that a run wrote") as refused:
        read_trace(path)
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "null", "[]", "3", '"trace"', "NaN"])
def test_other_texts_are_refused(text):
    with pytest.raises(DataError):
        parse_trace(text)


def test_files_that_are_not_there_or_no_text_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(DataError, match="cannot be read: it is a folder"):
        read_trace(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        read_trace(tmp_path / "bytes.json")


@given(st.data())
def test_junk_anywhere_is_refused_or_harmless(data):
    """No other exception, whatever a value is replaced by and wherever."""
    found = made_up("interleaved", 2, 2)
    place: dict | list = found
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(st.sampled_from(JUNK))
    with contextlib.suppress(DataError, ScheduleError):
        measured = parse_trace(json.dumps(found))
        assert [m.schedule.placement.ranks for m in measured] == [2] * len(measured)
