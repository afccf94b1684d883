"""A little MPI to hold the checker against: ranks that really act, with sends that block until their receive is posted.

It knows placements, actions and tags, and nothing of the checker: messages carry what was computed, a receive takes the
first message from its source with its tag, and each piece of work looks whether its input is the right one.
"""

from __future__ import annotations

from collections import defaultdict, deque

from hpcllm.pipeline.actions import Action, Op, message_tag
from hpcllm.pipeline.schedules import Schedule

F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741


class Rank:
    def __init__(self, rank: int, schedule: Schedule, posted: dict):
        self.rank, self.placement, self.m = rank, schedule.placement, schedule.microbatches
        self.row, self.done, self.posted = list(schedule.actions[rank]), 0, posted
        self.inbox: dict[Action, tuple] = {}  # what came, by its RECV
        self.made: dict[tuple, int] = defaultdict(int)  # (way, microbatch, stage) -> how often

    def step(self, ranks: list[Rank]) -> bool:
        """Do the next action if it can be done. Raises AssertionError if it computes nonsense."""
        action = self.row[self.done]
        stage = self.placement.stage(self.rank, action.chunk)
        if action.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD):
            self._receive(action, stage)
        elif action.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
            if not self._send(action, stage, ranks):
                return False
        elif not self._compute(action, stage):
            return False
        self.done += 1
        return True

    def _receive(self, action: Action, stage: int) -> None:
        backward = action.op is Op.RECV_BACKWARD
        source = stage + (1 if backward else -1)
        assert 0 <= source < self.placement.stages
        peer = self.placement.home(source)[0]
        assert peer != self.rank
        tag = message_tag(action.microbatch, action.chunk, self.placement.chunks, backward)
        self.posted[peer, self.rank, tag].append(action)

    def _send(self, action: Action, stage: int, ranks: list[Rank]) -> bool:
        backward = action.op is Op.SEND_BACKWARD
        what = ("gradient" if backward else "activation", action.microbatch, stage)
        assert self.made[what]
        target = stage + (-1 if backward else 1)
        assert 0 <= target < self.placement.stages
        peer, chunk = self.placement.home(target)
        assert peer != self.rank
        waiting = self.posted[self.rank, peer, message_tag(action.microbatch, chunk, self.placement.chunks, backward)]
        if not waiting:
            return False
        receive = waiting.popleft()
        assert receive not in ranks[peer].inbox
        ranks[peer].inbox[receive] = what
        return True

    def _compute(self, action: Action, stage: int) -> bool:
        m, op = action.microbatch, action.op
        if op is W:
            assert self.made["gradient", m, stage]
            assert not self.made["whole", m, stage]
            self.made["weights", m, stage] += 1
            return True
        if op is not F:
            assert self.made["activation", m, stage]
        if not self._has_input(action, stage):
            return False
        self.made["activation" if op is F else "gradient", m, stage] += 1
        self.made["whole", m, stage] += op is B
        self.made["weights", m, stage] += op is B
        return True

    def _has_input(self, action: Action, stage: int) -> bool:
        way, step = ("activation", -1) if action.op is F else ("gradient", 1)
        source = stage + step
        if not 0 <= source < self.placement.stages:
            return True
        what = (way, action.microbatch, source)
        if self.placement.home(source)[0] == self.rank:
            assert self.made[what]
            return True
        receive = Action(Op.RECV_FORWARD if step < 0 else Op.RECV_BACKWARD, action.microbatch, action.chunk)
        assert receive in self.row[: self.done]
        if receive not in self.inbox:
            return False
        assert self.inbox[receive] == what
        return True


def runs(schedule: Schedule) -> bool:
    """Whether all ranks come to their end, with everything computed once and no message left."""
    posted: dict[tuple, deque] = defaultdict(deque)
    ranks = [Rank(rank, schedule, posted) for rank in range(schedule.placement.ranks)]
    try:
        while [rank for rank in ranks if rank.done < len(rank.row) and rank.step(ranks)]:
            pass
    except AssertionError:
        return False
    wanted = [
        (what, m, stage)
        for what in ("activation", "gradient", "weights")
        for m in range(schedule.microbatches)
        for stage in range(schedule.placement.stages)
    ]
    made = {key: count for rank in ranks for key, count in rank.made.items() if key[0] != "whole" and count}
    ended = all(rank.done == len(rank.row) for rank in ranks)
    return ended and made == dict.fromkeys(wanted, 1) and not any(posted.values())
