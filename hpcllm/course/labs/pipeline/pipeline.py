"""Lab 4: pipeline schedules as data. Fill in this file, then run `hpcllm course check`.

A schedule is what each rank does, in its order, as words: F3 is the forward pass of microbatch 3, B3 its backward pass.
The backward pass also comes in halves: I3, which the rank before waits for, and W3, which nobody waits for.
The schedule below is GPipe: it is right, but holds the activations of all microbatches at once.
"""

from __future__ import annotations


def one_f_one_b(ranks: int, microbatches: int, rank: int) -> list[str]:  # noqa: ARG001 -- GPipe: all ranks alike
    """List the words of a rank in 1F1B: each F and each B once, and no rank idles longer than in GPipe.

    Rank r holds the activations of at most `ranks - r` microbatches: it starts that many, then a B before each F.
    """
    return [f"F{m}" for m in range(microbatches)] + [f"B{m}" for m in range(microbatches)]


def less_idle(ranks: int, microbatches: int, rank: int) -> list[str]:
    """List the words of a rank, F, I and W, such that ranks idle less than in 1F1B and hold no more than its rank 0.

    An activation is held from its F to its W. All of F, I, W take the same time.
    """
    raise NotImplementedError


PREDICTIONS: dict[str, float | None] = {
    "idle": None,  # share of the time that a rank idles in 1F1B: 4 ranks, 8 microbatches, B takes twice as long as F
    "held": None,  # microbatches whose activations rank 0 of 4 holds at most in GPipe with 8 microbatches
    "microbatches": None,  # the fewest with which ranks idle at most 10 % of the time in 1F1B, on 4 ranks
}
