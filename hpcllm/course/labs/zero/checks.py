"""Checks of lab 6: an update whose states are spread over the ranks, beside one of everything on one rank.

laws        ranges and states: who owns what, and how much of it
            weights after some steps, clipped ones and others, beside PyTorch's on one rank; a wrong result is compared
            with those of known mistakes, so that the hint names it (adamw.py)
            traffic and memory of an update, counted; losses of the project's decoder, trained by it (trained.py)
race        an update beside ours
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcllm.config.schema import OptimizerConfig
from hpcllm.course.lab import RANKS, Lab, Law, LawError, Prediction, Race, Row, Trial
from hpcllm.course.labs.zero import ours
from hpcllm.course.labs.zero.adamw import MISTAKES, RIGHT, Problem, Ranges, Values, draw, faulty
from hpcllm.course.labs.zero.ours import REFERENCE
from hpcllm.course.labs.zero.trained import check_losses
from hpcllm.course.ranges import HINTS, check_ranges, lengths
from hpcllm.course.turns import quartiles
from hpcllm.perf.timing import Case

NEAR = 1e-5  # of a parameter: a step moves it by up to 0.05
LONG = 400_000  # values, of which each temporary array shows
MOST_SHARES = 8  # of scratch memory, in parts of n / p values
SPARE_BYTES = 1 << 16
QUESTION = 1_000_000  # parameters in the questions
RACE_VALUES = (100_000, 1_000_000)
ROUNDS = 11
WIRE = {"Allreduce": 2, "Reduce_scatter": 1, "Allgatherv": 1}  # times (p - 1) / p of the longer array, in a ring
NEARLY = 3e-4
STATES = ("exp_avg", "exp_avg_sq")
__all__ = ["LAB", "REFERENCE"]


def sizes(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield numbers of parameters: few, some that divide and some that do not."""
    yield from ({"n": n} for n in (2 * ranks, 2 * ranks + 1, 3 * ranks - 1, drawn.randrange(40, 300)))


def long_sizes(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    yield {"n": LONG + drawn.randrange(4)}


def seeds(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    yield {"seed": drawn.randrange(1000)}


def check_states(trial: Trial) -> None:
    """Look at new states: names, lengths, zeros."""
    n, comm = trial.case["n"], trial.comm
    state, (start, end) = trial.student.new_state(n, comm), trial.student.own_range(n, comm)
    _check_state(trial, state, end - start)
    if np.shares_memory(*(state[name] for name in STATES)):
        raise LawError("state_alias", f"{_place(trial)}: both states are in the same memory")
    if any(array.any() for array in state.values()):
        raise LawError("state_names", f"{_place(trial)}: new states are not zeros")


def _check_state(trial: Trial, state: Any, own: int) -> None:
    if not isinstance(state, dict) or set(state) != set(STATES):
        said = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise LawError("state_names", f"{_place(trial)}: states are {said}, not {list(STATES)}")
    for name, array in state.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.shape != (own,):
            seen = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            whole = isinstance(array, np.ndarray) and array.shape == (trial.case["n"],) != (own,)
            raise LawError("state_whole" if whole else "state_names",
                           f"{_place(trial)}: {name} is {seen}, not float32 [{own}]")  # fmt: skip


def _place(trial: Trial) -> str:
    return f"rank {trial.comm.rank} of {trial.comm.size}, n = {trial.case['n']}"


def updated(trial: Trial, problem: Problem) -> Iterator[tuple[int, Values]]:
    """Make updates by the student's function; yields each step and the parameters after it."""
    comm, x = trial.comm, problem.start.copy()
    state = trial.student.new_state(x.size, comm)
    own = len(state[STATES[0]])
    for step, of_ranks in enumerate(problem.gradients, start=1):
        gradients = of_ranks[comm.rank].copy()
        trial.student.update(x, gradients, state, step, problem.config, comm)
        if not comm.waited_for():
            raise LawError("not_waited", _place(trial))
        if not np.array_equal(gradients, of_ranks[comm.rank]):
            raise LawError("overwritten", f"{_place(trial)}: the gradients of step {step} have changed")
        _check_state(trial, state, own)
        yield step, x


def check_weights(trial: Trial) -> None:
    """Compare the parameters after each step with those of one rank that does it all."""
    n, comm = trial.case["n"], trial.comm
    problem = draw(trial.random.getrandbits(32), n, comm.size)
    ranges = trial.control.allgather(tuple(map(int, trial.student.own_range(n, comm))))
    before = problem.start
    for step, x in updated(trial, problem):
        wanted = RIGHT.run(problem.start, problem.gradients[:step], ranges, problem.config)
        if not near(x, wanted):
            wrong = int(np.flatnonzero(~(np.abs(x - wanted) <= NEAR))[0])
            said = f"{_place(trial)}, step {step}: parameter {wrong} is {x[wrong]:.6g}, not {wanted[wrong]:.6g}"
            raise LawError(mistake(x, before, wanted, step, problem, ranges, comm.rank), said)
        before = x.copy()


def near(x: Values, wanted: Values) -> bool:
    return bool(np.all(np.abs(x - wanted) <= NEAR))


def mistake(x: Values, before: Values, wanted: Values, step: int, problem: Problem, ranges: Ranges, rank: int) -> str:
    """Tell a known mistake from its parameters: key of the hint."""
    if not np.isfinite(x).all():
        return "step"
    if np.array_equal(x, before):
        return "nothing"
    a, b = ranges[rank]
    others = np.delete(x, np.s_[a:b]), np.delete(before, np.s_[a:b])
    if others[0].size and np.array_equal(*others):
        return "not_gathered"
    for key, updates in MISTAKES.items():
        for update in updates:
            if near(x, update.run(problem.start, problem.gradients[:step], ranges, problem.config)):
                return key
    if near(x, wanted - before):
        return "moves"
    known = faulty(problem.start, problem.gradients[:step], ranges, problem.config)
    if key := next((key for key, made in known if near(x, made)), ""):
        return key
    return vague_mistake(x, wanted, before, problem.config)


def vague_mistake(x: Values, wanted: Values, before: Values, config: OptimizerConfig) -> str:
    """Tell from its looks what no known mistake makes."""
    if near(np.sort(x), np.sort(wanted)):
        return "misplaced"
    if np.all(np.abs(x - wanted) <= NEARLY):
        return "nearly"
    return "length" if is_another_length(x, wanted, before, config) else "other"


def is_another_length(x: Values, wanted: Values, before: Values, config: OptimizerConfig) -> bool:
    """Return True if the step beside the decay is a multiple of the right one."""
    decayed = before * (1 - config.learning_rate * config.weight_decay)
    with np.errstate(all="ignore"):
        ratio = (x - decayed) / (wanted - decayed)
    return bool(np.ptp(ratio) <= 1e-3 * abs(ratio[0]))


def check_bits(trial: Trial) -> None:
    """Compare the parameters of all ranks after each step, bit for bit."""
    problem = draw(trial.random.getrandbits(32), trial.case["n"], trial.comm.size)
    drawn = np.random.default_rng(trial.random.getrandbits(32))
    odd = drawn.standard_normal(problem.gradients.shape).astype(np.float32)
    for step, x in updated(trial, Problem(problem.start, odd, problem.config)):
        if trial.control.bcast(x.tobytes() if trial.comm.rank == 0 else None) != x.tobytes():
            raise LawError("bits", f"{_place(trial)}: after step {step} it is not what rank 0 has")


def wire_bytes(trial: Trial) -> float:
    """Return the bytes that the calls so far send by rings, from each rank."""
    share = (trial.comm.size - 1) / trial.comm.size
    calls = [(name.removeprefix("I").capitalize(), size) for name, size in trial.comm.calls]
    return sum(WIRE[name] * share * size for name, size in calls if size > SPARE_BYTES)


def one_update(trial: Trial, n: int) -> tuple[Values, Values, Mapping[str, Values]]:
    """Make one update of n parameters: they, gradients and states."""
    x, gradients = np.ones(n, np.float32), np.ones(n, np.float32)
    state = trial.student.new_state(n, trial.comm)
    trial.comm.restart_counts()
    trial.student.update(x, gradients, state, 1, OptimizerConfig(), trial.comm)
    return x, gradients, state


def check_traffic(trial: Trial) -> None:
    """Count the bytes that an update sends."""
    n, ranks = trial.case["n"], trial.comm.size
    one_update(trial, n)
    sent, most = wire_bytes(trial), 2 * (ranks - 1) / ranks * 4 * n
    if sent > 1.01 * most:
        raise LawError("traffic", f"{_place(trial)}: an update sends {sent:.0f} bytes; at most {most:.0f}")


def check_memory(trial: Trial) -> None:
    """Measure the memory that an update asks for beside its arguments."""
    n, comm = trial.case["n"], trial.comm
    x, gradients = np.ones(n, np.float32), np.ones(n, np.float32)
    state = trial.student.new_state(n, comm)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    trial.student.update(x, gradients, state, 1, OptimizerConfig(), comm)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    most = MOST_SHARES * 4 * -(-n // comm.size) + SPARE_BYTES
    if peak - before > most:
        raise LawError("scratch", f"{_place(trial)}: an update asks for {peak - before} bytes; at most {most}")


def race(trial: Trial) -> Iterator[Row]:
    """Time an update, the student's and ours in turns."""
    for n in RACE_VALUES:
        comm, config = MPI.Intracomm(trial.comm), OptimizerConfig()
        cases = []
        for functions, own in ((trial.student, comm), (ours.REFERENCE, trial.control)):
            arrays = np.ones(n, np.float32), np.ones(n, np.float32), functions.new_state(n, own)
            cases.append(Case(partial(functions.update, *arrays, 1, config, own)))
        yield Row(f"{n} parameters", n, *quartiles(trial.control, cases, ROUNDS))


def count_state_bytes(trial: Trial) -> float:
    """Count the bytes of the states of this rank."""
    state = trial.student.new_state(QUESTION, trial.comm)
    return float(sum(array.nbytes for array in state.values()))


def count_all_bytes(trial: Trial) -> float:
    """Count the bytes of parameters, gradients and states of this rank."""
    x, gradients, state = one_update(trial, QUESTION)
    return float(x.nbytes + gradients.nbytes + sum(array.nbytes for array in state.values()))


def count_sent_bytes(trial: Trial) -> float:
    """Count the bytes that a rank sends in an update by rings."""
    one_update(trial, QUESTION)
    return wire_bytes(trial)


LAB = Lab(
    number=6,
    name="zero",
    title="who owns which optimizer state",
    functions=("own_range", "new_state", "update"),
    laws=(
        Law("ranges", "own_range cuts n into parts in the order of ranks", 5, lengths, check_ranges),
        Law("states", "each rank has states of its range, and no others", 10, sizes, check_states),
        Law("weights", "after each step the weights are those of one rank", 30, sizes, check_weights, limit_s=30.0),
        Law("bits", "and the same bits on all ranks", 5, sizes, check_bits),
        Law("traffic", "an update sends no more than a plain sum does", 10, long_sizes, check_traffic, (2, RANKS)),
        Law("memory", "and asks for no more than 8 n / p values", 10, long_sizes, check_memory, (RANKS,)),
        Law("losses", "a decoder has the losses of one rank", 10, seeds, check_losses, (1, 3), limit_s=30.0),
    ),
    races=(
        Race("update", "an update of 4 ranks, beside ours", 5, race, ((3.0, 1.0), (6.0, 0.5)), x_label="parameters"),
    ),
    predictions=(
        Prediction("state_bytes", "bytes of states on one of 4 ranks", 5, count_state_bytes),
        Prediction("all_bytes", "bytes of all that a rank of 4 has", 5, count_all_bytes),
        Prediction("sent_bytes", "bytes that a rank of 4 sends in an update", 5, count_sent_bytes),
    ),
    hints=HINTS | {
        "state_names": 'States are a dict of "exp_avg" and "exp_avg_sq", float32, as long as the own range, zeros at '
        "first; update changes them in place.",
        "state_whole": "The states are those of all parameters: then no memory is saved. Which of them does this rank "
        "need?",
        "step": "Some weights are not finite: the correction divides by 1 - beta**step, and the first step is 1.",
        "nothing": "The parameters are as they were: the new ones have to be written into the array that was given.",
        "not_gathered": "This rank has new values in its own range only. The others have theirs: gather them.",
        "misplaced": "These are the right values in wrong places: look at lengths and displacements of the gathering.",
        "not_reduced": "A range was updated with its owner's gradients alone. The step needs the mean over the ranks.",
        "sum": "The gradient was summed; the mean over the ranks is wanted. AdamW forgives it, clipping does not.",
        "no_clip": "The gradient is not clipped where its norm is above clip_norm.",
        "local_norm": "The norm is that of this rank's range. Clipping needs the norm of the whole gradient: sum the "
        "squares over the ranks.",
        "norm_before": "The norm is that of this rank's gradients before the mean. Take it after the reduce-scatter.",
        "norms_added": "Norms do not add up, squares do: sum the squares over the ranks, then take one root.",
        "always_scaled": "The gradient is scaled even where its norm is below clip_norm: then it has to stay.",
        "mean_twice": "The gradient was divided by the number of ranks twice.",
        "largest": "The gradients were reduced by their maximum: the op has to be MPI.SUM.",
        "norm_of_sum": "The norm is that of the sum over the ranks. It is to be that of the mean: divide first.",
        "clip_values": "Each value was clipped by itself. Clipping by norm scales all of the gradient by one factor.",
        "clip_value": "It is clipped to 1, whatever clip_norm of config says.",
        "clip_turned": "The factor is turned round: clip_norm / norm makes a gradient smaller whose norm is larger.",
        "clip_late": "One of the moments was made of the gradient before it was clipped: clip first.",
        "half_correction": "Only one of the two moments is divided by its 1 - beta**step.",
        "correction_betas": "The moments are divided by something else than 1 - beta1**step and 1 - beta2**step: each "
        "by its own beta, to the power of the step.",
        "late_correction": "The correction counts the steps from 2: step is 1 for the first already.",
        "corrected_state": "The corrected moment was kept as the state. The state stays; a and b are for this step.",
        "epsilon": "epsilon is added to the root of the corrected exp_avg_sq: not below the root, not before the "
        "correction, and it is not left out.",
        "no_root": "The step is divided by exp_avg_sq; it is to be divided by its root.",
        "betas": "beta1 and beta2 have changed places: beta1 belongs to exp_avg.",
        "squares": "exp_avg_sq is the mean of the squares of the gradient's values.",
        "one_minus": "A new gradient counts by 1 - beta, and what was there by beta.",
        "states_lost": "The step before has left no trace: the states have to be changed in place (state[...][:] = "
        "...), not by another array of that name.",
        "ascent": "The parameters go up the gradient: the sign of the step.",
        "decay": "The weight decay is there, but of another size: it is learning_rate * weight_decay of the parameter "
        "before the step, taken off once.",
        "length": "The step has the right direction and another length: is the learning rate that of config?",
        "nearly": "This is nearly right: a value is rounded to fewer bits than float32 has, or something small is "
        "added that the formula does not have.",
        "moves": "The steps were gathered; the parameters are to be.",
        "state_alias": "Both states are one array: a change of one changes the other.",
        "no_decay": "The weight decay is missing.",
        "coupled_decay": "The weight decay went into the gradient, and by that into the moments. In AdamW it goes to "
        "the parameter, beside the step.",
        "no_correction": "The moments begin at zero; the division by 1 - beta**step that makes up for it is missing.",
        "bits": "Ranks have different bits. All must take the owner's values for a range, and none its own.",
        "overwritten": "The gradients that were given have changed. Reduce into an array of the own range.",
        "traffic": "An update sends more than a reduce-scatter and an all-gather do. Is a sum left on ranks that need "
        "only their range of it?",
        "scratch": "An update asks for much memory beside its arguments. Is anything as long as all parameters, where "
        "the own range would do?",
        "losses": "The laws above hold, but the losses of a training run are others. Does a function keep something "
        "from an earlier call?",
        "predicts_state_bytes": "Two states of 4 bytes for each parameter that the rank owns.",
        "predicts_all_bytes": "Which of parameters, gradients and states are split in ZeRO's first stage, and which "
        "are whole?",
        "predicts_sent_bytes": "Each of the two collectives sends (p - 1) / p of all bytes from each rank.",
        "forbidden": "Use Reduce_scatter, Allgatherv and Allreduce.",
    },
    forbidden=(
        *("Send", "Isend", "Ssend", "Issend", "Recv", "Irecv", "Sendrecv", "send", "isend", "recv", "irecv"),
        *("sendrecv", "Reduce", "Ireduce", "Allgather", "Iallgather", "Gather", "Gatherv", "Alltoall", "Alltoallv"),
        *("Reduce_scatter_block", "Bcast", "Ibcast", "allreduce", "reduce", "allgather", "alltoall", "bcast"),
        *("gather", "scatter", "Scatter", "Scatterv", "Dup", "Split"),
    ),
)  # fmt: skip
