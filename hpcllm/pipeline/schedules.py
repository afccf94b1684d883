"""Pipeline schedules as pure generators of typed actions: the order of work of one stage, then its messages.

1F1B, 3 stages, 4 microbatches, one tick a cell:          GPipe, the same:
stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3             F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .              .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .              .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

Both idle (p - 1) / (m + p - 1) of the time for p stages and m microbatches of equal work; 1F1B holds at most p
activations, GPipe m. Sources: GPipe arXiv:1811.06965 section 2.3; 1F1B arXiv:1806.03377 section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hpcllm.pipeline.actions import Action, Op


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Action]:  # noqa: ARG001 -- every stage does the same
    """All forward passes, then all backward passes in the same order."""
    for m in range(microbatches):
        yield Action(Op.FORWARD, m)
    for m in range(microbatches):
        yield Action(Op.BACKWARD, m)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Fill the pipe, alternate, drain it."""
    warmup = min(stages - 1 - stage, microbatches)
    for m in range(warmup):
        yield Action(Op.FORWARD, m)
    for m in range(warmup, microbatches):
        yield Action(Op.FORWARD, m)
        yield Action(Op.BACKWARD, m - warmup)
    for m in range(microbatches - warmup, microbatches):
        yield Action(Op.BACKWARD, m)


def forward_only(stage: int, stages: int, microbatches: int) -> Iterator[Action]:  # noqa: ARG001
    """Validation: nothing comes back."""
    for m in range(microbatches):
        yield Action(Op.FORWARD, m)


Schedule = Callable[[int, int, int], Iterator[Action]]  # (stage, stages, microbatches) -> the stage's work
SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def stage_actions(schedule: Schedule, stage: int, stages: int, microbatches: int) -> list[Action]:
    """All that one stage does in a step: its work and its messages."""
    return list(with_messages(schedule(stage, stages, microbatches), stage, stages))


def with_messages(work: Iterable[Action], stage: int, stages: int) -> Iterator[Action]:
    """Add the messages: a receive starts one action before its work, so it lands meanwhile; a send follows its work."""
    actions = list(work)
    if actions:
        yield from _receives(actions[0], stage, stages)
    for action, following in zip(actions, [*actions[1:], None], strict=True):
        if following:
            yield from _receives(following, stage, stages)
        yield action
        yield from _sends(action, stage, stages)


def bubble(stages: int, microbatches: int) -> float:
    """Share of a step that each stage idles under gpipe or 1f1b, arXiv:2104.04473 section 2.2."""
    return (stages - 1) / (microbatches + stages - 1)


def _receives(action: Action, stage: int, stages: int) -> Iterator[Action]:
    if action.op is Op.FORWARD and stage > 0:
        yield Action(Op.RECV_FORWARD, action.microbatch)
    if action.op is Op.BACKWARD and stage < stages - 1:
        yield Action(Op.RECV_BACKWARD, action.microbatch)


def _sends(action: Action, stage: int, stages: int) -> Iterator[Action]:
    if action.op is Op.FORWARD and stage < stages - 1:
        yield Action(Op.SEND_FORWARD, action.microbatch)
    if action.op is Op.BACKWARD and stage > 0:
        yield Action(Op.SEND_BACKWARD, action.microbatch)
