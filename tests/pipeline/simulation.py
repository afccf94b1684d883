"""A clock for schedules: every stage does its actions in order, work takes one tick, messages and their sends none.

stage 0   F0 F1 .  B0 ...      what a stage waits for: its next action's receive was started, and the neighbour's
stage 1   .  F0 B0 F1 ...      matching send is done
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcllm.pipeline.actions import Action, Op

MATCHING = {Op.FORWARD: (Op.RECV_FORWARD, Op.SEND_FORWARD, -1), Op.BACKWARD: (Op.RECV_BACKWARD, Op.SEND_BACKWARD, 1)}


class DeadlockError(Exception):
    """No stage can go on."""


def simulate(stages: Sequence[Sequence[Action]]) -> list[dict[Action, int]]:
    """The tick at which each stage begins each action. Raises DeadlockError."""
    starts: list[dict[Action, int]] = [{} for _ in stages]
    clocks = [0] * len(stages)
    while any(len(done) < len(actions) for done, actions in zip(starts, stages, strict=True)):
        before = [len(done) for done in starts]
        for stage, actions in enumerate(stages):
            _go_on(stage, actions, starts, clocks)
        if [len(done) for done in starts] == before:
            stuck = [str(a[len(d)]) if len(d) < len(a) else "-" for a, d in zip(stages, starts, strict=True)]
            raise DeadlockError(f"stages wait at {', '.join(stuck)}")
    return starts


def _go_on(stage: int, actions: Sequence[Action], starts: list[dict[Action, int]], clocks: list[int]) -> None:
    """Let one stage do what it can do by now."""
    for action in actions[len(starts[stage]) :]:
        if action.op not in MATCHING:
            starts[stage][action] = clocks[stage]  # a message is started in no time and holds nobody up
            continue
        arrived = _arrival(stage, action, starts)
        if arrived is None:
            return
        starts[stage][action] = max(clocks[stage], arrived)
        clocks[stage] = starts[stage][action] + 1


def _arrival(stage: int, action: Action, starts: list[dict[Action, int]]) -> int | None:
    """When what an action needs from a neighbour is there; None: not sent yet."""
    receive, send, step = MATCHING[action.op]
    if not 0 <= stage + step < len(starts):
        return 0
    assert Action(receive, action.microbatch) in starts[stage], f"stage {stage}: {action} without its receive"
    return starts[stage + step].get(Action(send, action.microbatch))


def drawing(starts: list[dict[Action, int]]) -> list[str]:
    """One line a stage, one cell a tick, '.' where it idles."""
    ticks = 1 + max(max(times.values()) for times in starts)
    rows = []
    for times in starts:
        cells = {tick: str(action) for action, tick in times.items() if action.op in MATCHING}
        rows.append(" ".join(cells.get(tick, ".").ljust(2) for tick in range(ticks)).rstrip())
    return rows
