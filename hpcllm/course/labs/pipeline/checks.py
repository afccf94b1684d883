"""Checks of lab 4: the student's words become a schedule, which our checker proves and our engine runs.

words of each rank --> actions: each once? --> messages added --> runs to its end, or who waits for whom
                   --> simulated: idle time, activations held --> as 1F1B; less than 1F1B
                   --> a run of the trainer on 4 ranks, loss for loss as with ours
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hpcllm.course.lab import RANKS, Lab, Law, LawError, Prediction, Race, Row, Trial
from hpcllm.course.small_run import make_store, train_losses
from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Action, Op, Placement
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.schedules import Schedule, make_schedule, make_work, with_messages
from hpcllm.pipeline.timing import Timeline, simulate

MOST_WORDS = 10_000  # of a rank
LOSS_ERROR = 1e-5  # relative: another order of sums
STEPS = 2
HALVES = {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}


def words_of(name: str, ranks: int, microbatches: int, rank: int) -> list[str]:
    """List the words of one of our schedules."""
    return [str(action) for action in make_work(name, ranks, microbatches)[1][rank]]


def one_f_one_b(ranks: int, microbatches: int, rank: int) -> list[str]:
    """List the words of our 1F1B."""
    return words_of("1f1b", ranks, microbatches, rank)


def less_idle(ranks: int, microbatches: int, rank: int) -> list[str]:
    """List the words of our zb-h1."""
    return words_of("zb-h1", ranks, microbatches, rank)


REFERENCE = SimpleNamespace(one_f_one_b=one_f_one_b, less_idle=less_idle)


def shapes(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield ranks and microbatches: one of each, fewer microbatches than ranks, many."""
    fixed = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (3, 5), (4, 8), (4, 1), (5, 2)]
    more = [(drawn.randrange(2, 9), drawn.randrange(1, 30)) for _ in range(8)]
    yield from ({"stages": stages, "microbatches": m} for stages, m in fixed + sorted(more))


def pipe_shapes(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield shapes with at least two stages: first those that have as many microbatches or more."""
    cases = [case for case in shapes(drawn, ranks) if case["stages"] >= 2]
    yield from sorted(cases, key=lambda case: bool(case["microbatches"] < case["stages"]))


def actions_of(trial: Trial, function: str, stages: int, microbatches: int) -> list[list[Action]]:
    """Read the words of all ranks. Raises LawError where they are no words, or not each action once."""
    rows = []
    for rank in range(stages):
        words = getattr(trial.student, function)(stages, microbatches, rank)
        words = list(words) if isinstance(words, list | tuple) else words  # a list that is kept would change below
        place = f"{function}({stages}, {microbatches}, {rank})"
        if not isinstance(words, list | tuple) or len(words) > MOST_WORDS:
            raise LawError("words", f"{place} returns a {type(words).__name__}, not a list of words")
        try:
            rows.append([Action.parse(str(word)) for word in words])
        except ValueError as error:
            negative = any(str(word)[1:2] == "-" for word in words)
            raise LawError("range" if negative else "words", f"{place}: {error}") from error
        if list(getattr(trial.student, function)(stages, microbatches, rank)) != list(words):
            raise LawError("kept", f"{place} returns something else when it is called again")
        check_once(rows[-1], microbatches, f"{place} = {' '.join(map(str, words[:20]))}")
    return rows


def check_once(row: list[Action], microbatches: int, place: str) -> None:
    """Check that each microbatch has one F and one B, or one F, I and W, in this order."""
    if doubled := next((action for action in row if row.count(action) > 1), None):
        raise LawError("twice", f"{doubled} twice in {place}")
    if strange := next((action for action in row if action.microbatch >= microbatches or action.chunk), None):
        raise LawError("range", f"{strange}, of {microbatches} microbatches, in {place}")
    for m in range(microbatches):
        mine = "".join(action.op for action in row if action.microbatch == m)
        if mine in ("FB", "FIW"):
            continue
        missing = sorted(mine) not in (sorted("FB"), sorted("FIW"))
        hint = ("missing_w" if mine == "FI" else "missing_pass") if missing else "order"
        raise LawError(hint, f"microbatch {m} has {mine or 'nothing'} in {place}")


def schedule_of(trial: Trial, function: str, stages: int, microbatches: int) -> Schedule:
    """Make the student's schedule with its messages, and prove it. Raises LawError with who waits for whom."""
    rows = actions_of(trial, function, stages, microbatches)
    placement = Placement(stages)
    try:
        schedule = Schedule(function, placement, microbatches, with_messages(placement, rows))
        check(schedule)
    except ScheduleError as error:
        shape = f"{stages} ranks, {microbatches} microbatches"
        raise LawError("circle" if in_turn(rows) else "stack", f"{function}, {shape}: {error}") from error
    return schedule


def in_turn(rows: Sequence[Sequence[Action]]) -> bool:
    """Return True if F, and B or I, come in the order of their microbatches on every rank."""
    ops = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT
    kinds = [[action.microbatch for action in row if action.op == op] for row in rows for op in ops]
    return all(kind == sorted(kind) for kind in kinds)


def timeline_of(trial: Trial, function: str) -> tuple[Timeline, Timeline]:
    """Simulate the student's schedule of the case's shape, and our 1F1B."""
    stages, microbatches = trial.case["stages"], trial.case["microbatches"]
    mine = simulate(schedule_of(trial, function, stages, microbatches))
    return mine, simulate(make_schedule("1f1b", stages, microbatches))


def check_proof(trial: Trial) -> None:
    """Prove that 1F1B runs to its end."""
    timeline_of(trial, "one_f_one_b")


def check_memory(trial: Trial) -> None:
    """Compare what each rank holds, and the time, with 1F1B's."""
    mine, ours = timeline_of(trial, "one_f_one_b")
    for rank, (held, most) in enumerate(zip(mine.peak_live, ours.peak_live, strict=True)):
        if held > most:
            raise LawError("held", f"{shape_of(mine)}: rank {rank} holds {held} activations, 1F1B {most}")
    if mine.makespan > ours.makespan:
        raise LawError(
            "longer" if in_turn(mine.schedule.work()) else "stack",
            f"{shape_of(mine)}: {mine.makespan:g} ticks, 1F1B {ours.makespan:g}",
        )


def check_less_idle(trial: Trial) -> None:
    """Compare idle time and memory with 1F1B's."""
    mine, ours = timeline_of(trial, "less_idle")
    if trial.case["microbatches"] < trial.case["stages"]:  # it has to run; there may be nothing to fill
        return
    if mine.makespan >= ours.makespan:
        most = [put_off(row) for row in mine.schedule.work()]
        hint = "wrong_rank" if most[0] > most[-1] else "not_less"
        raise LawError(hint, f"{shape_of(mine)}: {mine.makespan:g} ticks, 1F1B {ours.makespan:g}")
    if max(mine.peak_live) > max(ours.peak_live):
        raise LawError("too_much", f"{shape_of(mine)}: holds {max(mine.peak_live)}, 1F1B {max(ours.peak_live)}")


def put_off(row: Sequence[Action]) -> int:
    """Return how many W a rank has put off at most."""
    most = waiting = 0
    for action in row:
        waiting += (action.op == Op.BACKWARD_INPUT) - (action.op == Op.BACKWARD_WEIGHT)
        most = max(most, waiting)
    return most


def shape_of(timeline: Timeline) -> str:
    """'3 ranks, 5 microbatches: rank 0: F0 F1 ...'."""
    rows = [" ".join(map(str, row[:12])) for row in timeline.schedule.work()]
    m = timeline.schedule.microbatches
    shape = f"{len(rows)} rank{'s' * (len(rows) != 1)}, {m} microbatch{'es' * (m != 1)}"
    return f"{shape} (rank 0: {rows[0]})"


def runs(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield a number of microbatches that divides the batch of the run."""
    yield {"stages": ranks, "microbatches": drawn.choice([4, 6])}


def check_engine(trial: Trial) -> None:
    """Train with the student's schedules and with ours, and compare the losses."""
    store = make_store(trial.folder, trial.control)
    stages, microbatches = trial.case["stages"], trial.case["microbatches"]
    mesh = {"dp": 1, "pp": stages}
    wanted = train_losses(store, trial.control, STEPS, mesh=mesh, pipeline={"microbatches": microbatches})
    for function in ("one_f_one_b", "less_idle"):
        file = trial.folder / f"{function}.txt"
        if trial.control.rank == 0:
            file.write_text(schedule_of(trial, function, stages, microbatches).text(), encoding="utf-8")
        trial.control.Barrier()
        pipeline = {"microbatches": microbatches, "schedule": "custom", "file": str(file)}
        found = train_losses(store, trial.control, STEPS, mesh=mesh, pipeline=pipeline)
        if any(abs(a - b) > LOSS_ERROR * abs(b) for a, b in zip(found, wanted, strict=True)):
            raise LawError("losses", f"{function}: losses {found}, with ours {wanted}")


def idle_race(trial: Trial) -> Iterator[Row]:
    """Compare the idle time of a rank with that of our zb-h1; the bound is the least that any rank's W cannot fill."""
    for microbatches in (8, 16, 32):
        found = simulate(schedule_of(trial, "less_idle", RANKS, microbatches))
        ours = simulate(make_schedule("zb-h1", RANKS, microbatches))
        usual = simulate(make_schedule("1f1b", RANKS, microbatches))
        label = f"{microbatches} microbatches"
        yield Row(label, microbatches, found.bubble, ours.bubble, native=usual.bubble)


def idle_share(_: Trial) -> float:
    """Simulate the idle share of 1F1B on 4 ranks with 8 microbatches."""
    return simulate(make_schedule("1f1b", RANKS, 8)).bubble


def held_by_gpipe(_: Trial) -> float:
    """Simulate what rank 0 holds in GPipe on 4 ranks with 8 microbatches."""
    return simulate(make_schedule("gpipe", RANKS, 8)).peak_live[0]


def enough_microbatches(_: Trial) -> float:
    """Find the fewest microbatches with which 1F1B idles at most 10 % on 4 ranks."""
    return next(m for m in range(1, 1000) if simulate(make_schedule("1f1b", RANKS, m)).bubble <= 0.1)


LAB = Lab(
    number=4,
    name="pipeline",
    title="pipeline schedules as data",
    functions=("one_f_one_b", "less_idle"),
    laws=(
        Law("proof", "one_f_one_b does each pass once and runs to its end", 20, shapes, check_proof, ranks=(1,)),
        Law("memory", "no rank holds more, or takes longer, than in 1F1B", 20, shapes, check_memory, ranks=(1,)),
        Law("less idle", "less_idle takes less time and no more memory", 20, pipe_shapes, check_less_idle, ranks=(1,)),
        Law("engine", "the trainer runs both, with equal losses", 10, runs, check_engine, ranks=(4,), limit_s=60.0),
    ),
    races=(
        Race("idle share", "less_idle on 4 ranks, beside our zb-h1", 15, idle_race, ((1.001, 1.0), (2.0, 0.5)),
             hint="still_idle", x_label="microbatches", unit="idle share", native_label="1F1B"),
    ),
    predictions=(
        Prediction("idle", "idle share in 1F1B: 4 ranks, 8 microbatches", 5, idle_share, within=1.02),
        Prediction("held", "held by rank 0 of 4 in GPipe with 8 microbatches", 5, held_by_gpipe),
        Prediction("microbatches", "the fewest with which 1F1B idles at most 10 %", 5, enough_microbatches),
    ),
    hints={
        "words": "Each rank's schedule is a list of words such as F0, B0, or F0, I0, W0.",
        "twice": "An action is there twice: which of your loops runs over a microbatch that another one has had?",
        "missing_pass": "A pass is missing: count the F and the B of each rank when there are fewer microbatches than "
        "ranks, too. All that was started in the warm-up has to be drained at the end.",
        "missing_w": "An I has no W: without it the gradients of the weights lack this microbatch. All that was put "
        "off is due at the end.",
        "kept": "A list is kept from one call to the next: make it inside the function. A default value, as in "
        "words=[], is made once.",
        "stack": "The passes back do not come in the order of the passes forward. The microbatch that went in first "
        "comes back first: a queue, not a stack.",
        "wrong_rank": "It takes as long as 1F1B: the wrong ranks put W off. Which rank has its last I first, and "
        "waits? The one before gets its I later.",
        "memory": "A list grows without end: which loop does not end, and which number never changes in it?",
        "range": "Microbatches go from 0 to microbatches - 1: a loop begins or ends one too late.",
        "order": "A microbatch has its backward pass before its forward pass, or W before I.",
        "circle": "The ranks wait for one another in a circle. The last rank does B0 right after F0; a rank before it "
        "needs enough forward passes first, or the last rank gets nothing to do. After those, F and B take turns.",
        "held": "A rank holds more activations than 1F1B: how many F come before the first B? On rank r it is "
        "ranks - r of them at most.",
        "longer": "It is right and takes little memory, but idles longer than 1F1B: rank r needs ranks - 1 - r forward "
        "passes before it begins to alternate. With fewer, ranks wait in turns.",
        "not_less": "It takes as long as 1F1B. Which pass does nobody wait for? At the end, where 1F1B idles, that one "
        "can be done, if it was put off before.",
        "too_much": "Time is bought with memory: an activation is held until its W. Put off few of them: as many as "
        "the rank would otherwise have idle at the end.",
        "predicts_idle": "The share of all the time, from 0 to 1: with what a pass of a microbatch takes as the unit, "
        "a rank works m and idles p - 1.",
        "predicts_held": "When does GPipe do its first B? Until then nothing is let go.",
        "predicts_microbatches": "Idle time over all the time, not over the work; and what does the last rounding do?",
        "losses": "The schedule runs, but the losses differ from ours.",
        "still_idle": "Less idle than 1F1B, but more than need be: rank r can put off r of its W to the end.",
    },
)  # fmt: skip
