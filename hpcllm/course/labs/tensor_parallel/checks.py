"""Checks of lab 5: layers split by outputs and by inputs, forward and backward, alone and in the project's decoder.

laws        whole numbers, which no order rounds --> exact: each rank's result beside the piece of the whole layer's;
            a wrong one is compared with those of known mistakes, so that the hint names it (layers.py)
            traffic: how many sums are started, and how many bytes go into them
            the decoder that training uses, on the student's functions: loss and gradients of ours (decoder.py)
race        a feed-forward block forward and backward, beside our layers
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.course.lab import RANKS, Lab, Law, LawError, Prediction, Race, Row, Trial
from hpcllm.course.labs.tensor_parallel import ours
from hpcllm.course.labs.tensor_parallel.decoder import check_decoder, count_decoder_sums, summing
from hpcllm.course.labs.tensor_parallel.layers import call, check_backward, check_forward, draw, own, shapes
from hpcllm.course.labs.tensor_parallel.ours import REFERENCE
from hpcllm.course.ranges import HINTS, check_ranges, lengths
from hpcllm.course.turns import quartiles
from hpcllm.perf.timing import Case

Values = NDArray[np.float32]
Layer = tuple[Values, Values]
HIDDEN, CHANNELS, TOKENS = 512, 2048, 1000  # of the feed-forward block in the questions
RACE_HIDDEN, RACE_TOKENS = 128, (128, 512)
ROUNDS = 15
__all__ = ["LAB", "REFERENCE"]


def block(student: Any, x: Values, up: Layer, down: Layer, comm: MPI.Intracomm) -> list[Values]:
    """Run a feed-forward block both ways by the functions of a student: y, gradients of x, up and down."""
    (high,) = student.columns(x, [up], comm)
    active = np.maximum(high, 0)
    y = student.rows(active, *down, comm)
    of_active, *of_down = student.rows_backward(y, active, down[0], comm)
    of_x, (of_up,) = student.columns_backward([of_active * (high > 0)], x, [up], comm)
    return [y, of_x, *of_up, *of_down]


def seeds(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    yield {"seed": drawn.randrange(1000)}


def check_traffic(trial: Trial) -> None:
    """Count the sums, and the bytes that go into them."""
    wholes = draw(trial)
    whole, outputs, inputs = wholes[0], own(trial, trial.case["outputs"]), own(trial, trial.case["inputs"])
    layers = [(each.w[outputs].copy(), each.b[outputs].copy()) for each in wholes]
    gradients = [each.gradient[:, outputs].copy() for each in wholes]
    x, w = whole.x[:, inputs].copy(), whole.w[:, inputs].copy()
    count(trial, "columns", 0, 0, whole.x.copy(), layers)
    count(trial, "rows", 1, whole.gradient.nbytes, x, w, whole.b.copy())
    count(trial, "columns_backward", 1, whole.x.nbytes, gradients, whole.x.copy(), layers)
    count(trial, "rows_backward", 0, 0, whole.gradient.copy(), x, w)


def count(trial: Trial, name: str, most: int, most_bytes: int, *arguments: Any) -> None:
    """Call a function and count what it sends. Raises LawError if it is too much."""
    trial.comm.restart_counts()
    call(trial, name, *arguments)
    sums, sent_bytes = len(trial.comm.calls), trial.comm.sent_bytes
    said = f"{name} of {trial.case['layers']} layers: {sums} sums, {sent_bytes} bytes in all"
    if sums > most or (trial.comm.messages and not most):
        raise LawError("many_sums" if most else "sums_for_nothing", f"{said}; at most {most}")
    if trial.comm.messages > sums:  # a sum made of messages: at most all that this rank has to each other
        most_bytes *= max(1, trial.comm.size - 1)
    if sent_bytes > most_bytes:
        raise LawError("bytes", f"{said}; at most {most_bytes} bytes")


def race(trial: Trial) -> Iterator[Row]:
    """Time a feed-forward block forward and backward, the student's and ours in turns."""
    comm = MPI.Intracomm(trial.comm)
    for tokens in RACE_TOKENS:
        arrays = block_arrays(tokens, RACE_HIDDEN, 4 * RACE_HIDDEN, trial.student.own_range, comm)
        cases = [Case(partial(block, trial.student, *arrays, comm)), Case(partial(ours.block, *arrays, trial.control))]
        yield Row(f"{tokens} tokens", tokens, *quartiles(trial.control, cases, ROUNDS))


def block_arrays(tokens: int, hidden: int, channels: int, own_range: Any, comm: Any) -> tuple[Values, Layer, Layer]:
    """Make x, up and down of a feed-forward block, this rank's part."""
    start, end = own_range(channels, comm)
    drawn = np.random.default_rng(3)
    x, up, down = (drawn.standard_normal(shape).astype(np.float32) / hidden**0.5 for shape in (
        (tokens, hidden), (channels, hidden), (hidden, channels)))  # fmt: skip
    biases = np.zeros(end - start, np.float32), np.zeros(hidden, np.float32)
    return x, (up[start:end].copy(), biases[0]), (down[:, start:end].copy(), biases[1])


def count_weights(trial: Trial) -> float:
    """Count the values of w that a rank has of the block in the question."""
    _, up, down = block_arrays(1, HIDDEN, CHANNELS, trial.student.own_range, trial.comm)
    return float(up[0].size + down[0].size)


def count_bytes(trial: Trial) -> float:
    """Count the bytes that go into the sums of the block in the question, forward and backward."""
    arrays = block_arrays(TOKENS, HIDDEN, CHANNELS, trial.student.own_range, trial.comm)
    student, sums_bytes = summing(trial.student)
    block(student, *arrays, trial.comm)
    return sum(sums_bytes)


LAB = Lab(
    number=5,
    name="tensor_parallel",
    title="a layer split over ranks",
    functions=("own_range", "columns", "columns_backward", "rows", "rows_backward"),
    laws=(
        Law("ranges", "own_range cuts n into parts in the order of ranks", 5, lengths, check_ranges),
        Law("forward", "columns and rows are what the whole layers are", 20, shapes, check_forward),
        Law("backward", "so are all their gradients", 30, shapes, check_backward),
        Law("traffic", "one sum forward in rows, one backward in columns", 10, shapes, check_traffic),
        Law("decoder", "a decoder on your functions: our loss, our gradients", 10, seeds, check_decoder,
            ranks=(1, 2, RANKS), limit_s=20.0),
    ),
    races=(
        Race("block", "a feed-forward block, both ways, beside our layers", 10, race, ((1.6, 1.0), (3.2, 0.5)),
             x_label="tokens"),
    ),
    predictions=(
        Prediction("weights", "values of w of a block on one of 4 ranks", 5, count_weights),
        Prediction("sums", "sums in a step of a decoder of 3 layers", 5, count_decoder_sums),
        Prediction("bytes", "bytes that go into the sums of a block", 5, count_bytes),
    ),
    hints=HINTS | {
        "shape": "An array has another shape than the docstring says. Write the shapes of both factors of the product "
        "beneath it: which index is summed over, and which of w's two sides is split?",
        "dtype": "The result is no float32: an array of float64 was made on the way, which takes twice the memory.",
        "overwritten": "An array that was given has changed: the caller still needs it, as for the pass back. Sum into "
        "a new array.",
        "no_sum": "This is only this rank's part of a sum. Of which array does each rank hold a part? That is the one "
        "to be summed over the ranks.",
        "needless_sum": "This was summed over the ranks, though each rank has its own piece, or all have the same and "
        "whole value already. That habit is one of data parallelism, where ranks see other tokens.",
        "no_bias": "The bias is missing, on this rank at least: y is to be the same on all ranks.",
        "bias_rank": "The bias is the same on all ranks, and so is its gradient: each rank has all of it.",
        "divided": "This was divided by the number of ranks. Each rank has its own piece here, or the whole value: "
        "nothing is to be shared out.",
        "turned": "reshape does not transpose: it reads the values in the same order. w.T does.",
        "rounded": "This comes near, but not to all bits of float32: something was rounded to fewer on the way.",
        "bias_often": "The bias is in the sum once from each rank. Add it after the sum.",
        "mean": "This is the mean over the ranks; the sum is wanted.",
        "token_mean": "The gradient of w or b is a sum over the tokens, not a mean: the loss has divided already.",
        "one_layer": "x has gone into several layers, and here is the gradient by way of one of them only.",
        "summed_again": "What was summed over the ranks has been summed once more: add up all layers first, then sum.",
        "many_sums": "One sum is enough: add up what belongs together on this rank, then sum over the ranks.",
        "sums_for_nothing": "Nothing has to travel here.",
        "bytes": "More is summed than the result is long.",
        "decoder": "The laws above hold, but not in the decoder. Does a function keep something from an earlier call?",
        "forbidden": "Nothing has to travel but sums: by comm.Allreduce or comm.Iallreduce, or by messages of yours.",
        "other": "The result is wrong. Take the case above by hand: which rows or columns of each has this rank?",
        "predicts_weights": "Both layers are cut, one by outputs and one by inputs: how much of each has a rank of 4?",
        "predicts_sums": "rows sum forward, columns backward, once for all layers that read one x. Count both in "
        "attention and in the feed-forward block, three times, and do not forget the vocabulary.",
        "predicts_bytes": "What is summed is as long as the block's result, for all tokens, once each way; 4 bytes a "
        "value.",
        "slow": "Right, but slow beside our layers. Is each product one call of NumPy for all tokens at once?",
    },
    forbidden=(
        *("send", "isend", "recv", "irecv", "sendrecv", "Sendrecv_replace", "Reduce", "Ireduce", "Allgather"),
        *("Allgatherv", "Iallgather", "Gather", "Gatherv", "Alltoall", "Reduce_scatter", "Reduce_scatter_block"),
        *("allreduce", "reduce", "allgather", "alltoall", "bcast", "gather", "scatter", "Scatter", "Scatterv"),
        *("Bcast", "Dup", "Split"),
    ),
)  # fmt: skip
