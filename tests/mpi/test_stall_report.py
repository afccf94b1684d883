"""From what ranks say of their waits: the one that holds all up is found, in a report of one screen at any size."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.mpi.rank_names import name_ranks, named_ranks
from hpcllm.mpi.watchdog import Waiting, stall_report


def stage(rank: int, replicas: int) -> str:
    return f"dp {rank % replicas}, stage {rank // replicas}"


def stopped_job(replicas: int, stages: int, stopped: int) -> list[Waiting]:
    """Order dp, pp: the stopped rank's pipeline waits along itself, its replicas for a sum, the others for all."""
    waits, everyone = [], name_ranks(range(replicas * stages))
    for rank in range(replicas * stages):
        here, place = divmod(rank, replicas)
        at, replica = divmod(stopped, replicas)
        if place == replica:
            peer = rank + replicas if here < at else rank - replicas
            what = f"the message of microbatch {abs(here - at)} from stage {peer // replicas} (rank {peer})"
        elif here == at:
            what = f"hop 2 of a ring over {replicas} ranks, from rank {at * replicas + (place - 1) % replicas}, lane 0"
        else:
            what = f"all ranks to agree on a step's loss, {everyone}"
        if rank != stopped:
            waits.append(Waiting(rank, 30 + random.Random(rank).random(), what))
    return waits


@pytest.mark.parametrize(("replicas", "stages"), [(1, 4), (2, 2), (4, 1), (64, 8), (16, 32), (512, 1), (1, 512)])
def test_the_stopped_rank_is_named_first_with_all_that_wait_for_it(replicas, stages):
    ranks = replicas * stages
    for stopped in {0, 1, ranks // 2 + 1, ranks - 1}:
        text = stall_report(stopped_job(replicas, stages, stopped), ranks, lambda rank: stage(rank, replicas))
        verdict = text.splitlines()[0]
        assert verdict.startswith(f"nothing has moved for 3{'0' if '30 s' in verdict else '1'} s: rank {stopped} ")
        assert f"({stage(stopped, replicas)}) has not answered; {ranks - 1} ranks wait for it" in verdict


@pytest.mark.parametrize(("replicas", "stages"), [(64, 8), (1, 512), (4096, 4)])
def test_a_report_is_one_screen(replicas, stages):
    text = stall_report(stopped_job(replicas, stages, replicas * stages // 2), replicas * stages).splitlines()
    assert len(text) <= 40
    assert max(map(len, text)) <= 200


@given(st.integers(2, 40), st.integers(0, 2**32))
def test_a_chain_is_followed_to_its_end(ranks, seed):
    order = random.Random(seed).sample(range(ranks), ranks)
    waits = [Waiting(r, 5, f"a letter from rank {q}") for r, q in itertools.pairwise(order)]
    first, *rest = stall_report(waits, ranks).splitlines()
    assert f"rank {order[-1]} has not answered" in first
    assert ("directly or through others" in first) == (ranks > 2)
    line = next(line for line in rest if "awaited by" in line)
    assert f": awaited by rank {order[-2]}" in line


@given(st.integers(2, 20), st.integers(0, 5), st.integers(0, 2**32))
def test_a_circle_is_named_when_all_have_answered(length, tail, seed):
    order = random.Random(seed).sample(range(length + tail), length + tail)
    circle = order[:length]
    waits = [Waiting(r, 5, f"a letter from rank {q}") for r, q in zip(circle, [*circle[1:], circle[0]], strict=True)]
    waits += [Waiting(r, 5, f"a letter from rank {circle[0]}") for r in order[length:]]
    verdict = stall_report(waits, length + tail).splitlines()[0]
    assert "wait in a circle" in verdict
    assert named_ranks(verdict) == set(circle)


def test_ranks_in_the_same_collective_do_not_wait_for_one_another():
    everyone = name_ranks(range(4))
    inside = [Waiting(rank, 5, f"all to agree, {everyone}") for rank in range(3)]
    assert "rank 3 has not answered; 3 ranks wait for it" in stall_report(inside, 4)
    all_inside = [*inside, Waiting(3, 5, f"all to agree, {everyone}")]
    assert "circle" not in stall_report(all_inside, 4)
    assert "not heard from" not in stall_report(all_inside, 4)


def test_a_rank_that_computes_in_peace_is_no_culprit():
    text = stall_report([Waiting(0, 5, "a letter from rank 1")], 3)
    assert "rank 1 has not answered; 1 rank waits for it" in text
    assert "nobody waits for them: rank 2" in text


def test_a_rank_that_waits_in_two_threads_leads_to_both():
    waits = [Waiting(0, 5, "a letter from rank 1"), Waiting(0, 6, "a sum with rank 2"), Waiting(1, 4, "rank 2")]
    assert "rank 2 has not answered; 2 ranks wait for it" in stall_report(waits, 3)
