"""Schedules are proved on paper: complete, free of deadlock, as idle as the formula says, as small as promised."""

from __future__ import annotations

import itertools
import re

import pytest

from hpcllm.pipeline import schedules
from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.schedules import SCHEDULES, bubble, forward_only, with_messages
from tests.pipeline.simulation import DeadlockError, drawing, simulate

SIZES = list(itertools.product(range(1, 9), range(1, 21)))
WORK = {Op.FORWARD, Op.BACKWARD}
SENDS = {Op.SEND_FORWARD: (Op.RECV_FORWARD, 1), Op.SEND_BACKWARD: (Op.RECV_BACKWARD, -1)}


def pipeline(schedule, stages: int, microbatches: int) -> list[list[Action]]:
    return [list(with_messages(schedule(s, stages, microbatches), s, stages)) for s in range(stages)]


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("microbatch", [0, 7, 12345])
def test_an_action_prints_and_parses_as_text(op, microbatch):
    action = Action(op, microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "3", "X3", "F-1", "F3 ", " F3", "f3", "F3B3", "RECV_3", "F1.5"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is no action; an action is one of F, B"):
        Action.parse(text)


def test_all_actions_print_differently():
    assert len({str(Action(op, m)) for op in Op for m in range(20)}) == 20 * len(Op)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_microbatch_goes_forward_once_then_backward_once_and_gradients_are_final_last(name):
    for stages, microbatches in SIZES:
        for stage in range(stages):
            work = list(SCHEDULES[name](stage, stages, microbatches))
            place = {action: i for i, action in enumerate(work)}
            assert set(place) == {Action(op, m) for op in WORK for m in range(microbatches)}
            assert len(work) == len(place)
            assert all(place[Action(Op.FORWARD, m)] < place[Action(Op.BACKWARD, m)] for m in range(microbatches))
            assert work[-1] == Action(Op.BACKWARD, microbatches - 1)


def most_alive(work: list[Action]) -> int:
    alive = itertools.accumulate(1 if action.op is Op.FORWARD else -1 for action in work)
    return max(alive)


def test_1f1b_holds_no_more_activations_than_stages_and_gpipe_holds_all():
    for stages, microbatches in SIZES:
        for stage in range(stages):
            one_f_one_b, gpipe = (list(SCHEDULES[n](stage, stages, microbatches)) for n in ("1f1b", "gpipe"))
            assert most_alive(one_f_one_b) == min(stages - stage, microbatches)
            assert most_alive(gpipe) == microbatches


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), forward_only], ids=lambda s: s.__name__)
def test_every_send_has_its_receive_on_the_neighbour_in_the_same_order(schedule):
    for stages, microbatches in SIZES:
        actions = pipeline(schedule, stages, microbatches)
        sent = {(s, op): [a.microbatch for a in actions[s] if a.op is op] for s in range(stages) for op in Op}
        for stage in range(stages):
            for send, (receive, step) in SENDS.items():
                has_neighbour = 0 <= stage + step < stages
                assert sent[stage, send] == (sent[stage + step, receive] if has_neighbour else [])
        total = sum(len(m) for (_, op), m in sent.items() if op in SENDS)
        ways = 1 if schedule is forward_only else 2
        assert total == ways * (stages - 1) * microbatches


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), forward_only], ids=lambda s: s.__name__)
def test_messages_stand_beside_their_work(schedule):
    """A receive starts at most one piece of work early, so one spare buffer is enough; a send follows at once."""
    for stages, microbatches in SIZES:
        for stage, actions in enumerate(pipeline(schedule, stages, microbatches)):
            assert [a for a in actions if a.op in WORK] == list(schedule(stage, stages, microbatches))
            for i, action in enumerate(actions):
                if action.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD):
                    rest = [a for a in actions[i:] if a.op in WORK]
                    assert Action(Op(action.op[-1]), action.microbatch) in rest[:2]
                if action.op in SENDS:
                    assert actions[i - 1] == Action(Op(action.op[-1]), action.microbatch)


@pytest.mark.parametrize("name", SCHEDULES)
def test_nobody_waits_for_ever_and_idle_time_is_the_bubble_exactly(name):
    for stages, microbatches in SIZES:
        starts = simulate(pipeline(SCHEDULES[name], stages, microbatches))
        length = 1 + max(max(times.values()) for times in starts)
        idle = 1 - 2 * microbatches / length
        assert idle == pytest.approx(bubble(stages, microbatches), abs=1e-12)


def test_validation_fills_the_pipe_once():
    for stages, microbatches in SIZES:
        starts = simulate(pipeline(forward_only, stages, microbatches))
        assert 1 + max(starts[-1].values()) == microbatches + stages - 1


def test_the_clock_sees_a_deadlock():
    """Two stages that each want the other's message first: the proof above would notice."""
    texts = [["F0", "SEND_F0", "RECV_B1", "B1"], ["RECV_F0", "F0", "B0", "SEND_B0"]]
    with pytest.raises(DeadlockError, match="B1"):
        simulate([[Action.parse(text) for text in row] for row in texts])


def test_the_picture_in_the_module_is_what_the_generators_give():
    rows = re.findall(r"^stage \d   (.{35})   +(.+)$", schedules.__doc__, re.MULTILINE)
    for column, name in enumerate(["1f1b", "gpipe"]):
        assert [row[column].rstrip() for row in rows] == drawing(simulate(pipeline(SCHEDULES[name], 3, 4)))
