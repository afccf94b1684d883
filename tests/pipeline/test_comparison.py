"""Side by side: the numbers are those of each schedule alone, and what recomputation takes back is told."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Op
from hpcllm.pipeline.report import MOST_COMPARED, compare, comparison_facts, comparison_lines, peak_full
from hpcllm.pipeline.schedules import SCHEDULES, make_placement, make_schedule
from hpcllm.pipeline.timing import Times, simulate


def entries(ranks, microbatches, chunks=None, **times):
    return {entry.name: entry for entry in compare(ranks, microbatches, chunks, Times(**times)).entries}


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_each_row_is_what_the_schedule_has_alone(ranks, microbatches, chunks, recompute):
    found = compare(ranks, microbatches, chunks, Times(recompute=recompute))
    assert [entry.name for entry in found.entries] == list(SCHEDULES)
    for entry in found.entries:
        own = entry.timeline.schedule.placement.chunks
        alone = make_schedule(entry.name, ranks, microbatches, chunks if entry.name == "interleaved" else None)
        assert entry.timeline == simulate(alone, Times(recompute=recompute))
        assert entry.plain_step_time == simulate(alone).makespan
        assert entry.peak_live * own == max(entry.timeline.peak_live)


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 12))
def test_recomputation_costs_at_least_the_forward_passes_again(ranks, microbatches):
    for entry in entries(ranks, microbatches, recompute=True).values():
        assert entry.timeline.makespan >= entry.plain_step_time + microbatches - 1e-9


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12))
def test_what_is_held_in_full_is_what_waits_for_its_w_and_never_more_than_is_live(name, ranks, microbatches):
    timeline = simulate(make_schedule(name, ranks, microbatches))
    for row, live in zip(timeline.schedule.actions, timeline.peak_live, strict=True):
        undone = [sum(a.op is Op.BACKWARD_INPUT for a in row[:k]) - sum(a.op is Op.BACKWARD_WEIGHT for a in row[:k])
                  for k in range(len(row) + 1)]  # fmt: skip
        assert peak_full(row) == max(1, *undone)
        assert peak_full(row) <= live


def test_a_schedule_that_puts_w_off_is_told_to_save_no_memory_by_recomputation():
    told = "\n".join(comparison_lines(compare(4, 8, None, Times(recompute=True)), None, 120))
    assert "zb-h1, whose W wait, holds 4 recomputed activations in full where 1f1b holds 1" in told
    assert "it saves no memory" in told
    assert "note" not in "\n".join(comparison_lines(compare(4, 8, None, Times()), None, 120))


def test_a_gain_that_recomputation_takes_away_is_told():
    """With W next to nothing there is nothing to put off; what is recomputed must not be called a gain."""
    found = compare(4, 8, None, Times(1, 2, 0, recompute=True))
    gain = {e.name: 1 - e.timeline.makespan / found.entries[1].timeline.makespan for e in found.entries}
    told = "\n".join(comparison_lines(found, None, 120))
    for name in ("zb-h1", "zb-v"):
        assert (f"{name} gains nothing over 1f1b" in told) == (gain[name] <= 0)
    assert "zb-h1 gains nothing" in told


def test_a_schedule_that_cannot_have_the_shape_is_a_row_with_the_reason():
    found = compare(2, 3, 4_000_000, Times())
    assert set(found.rejected) == {"interleaved"}
    row = next(line for line in comparison_lines(found, None, 120) if line.startswith("  interleaved"))
    assert "rejected: 2 ranks x 4000000 chunks" in row
    assert {"schedule": "interleaved", "refused": found.rejected["interleaved"]} in comparison_facts(found, None)[
        "schedules"
    ]


def test_a_shape_of_which_none_can_be_compared_is_an_error():
    with pytest.raises(ScheduleError, match="no schedule of this shape can be compared: 4000 ranks x 1 chunks"):
        compare(4000, 4000, None, Times())


@given(st.integers(1, 2 * MOST_COMPARED), st.integers(1, 4))
def test_a_shape_that_is_too_large_is_refused_with_the_largest_that_is_not(ranks, chunks):
    def made(microbatches: int) -> str:
        """Make a placement; returns why it is rejected."""
        try:
            make_placement("interleaved", ranks, microbatches, chunks, MOST_COMPARED)
        except ScheduleError as error:
            return str(error)
        return ""

    told = re.search(r"at most 4096 of all ranks together(?:, so (\d+) microbatches)?$", made(10**6))
    assert told
    assert (told[1] is None) == (ranks * chunks > MOST_COMPARED)
    if told[1]:
        assert not made(int(told[1]))
        assert made(int(told[1]) + 1)


def test_bytes_are_messages_times_their_size():
    for row in comparison_facts(compare(3, 4, None, Times()), 1000)["schedules"]:
        assert row["bytes"] == 1000 * row["messages"]
