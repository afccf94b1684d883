"""Checks of lab 3: bytes of a codec, value by value; what feedback keeps; when it pays; sums by it.

laws        encodings of random blocks, and of zeros, tiny, huge and broken ones, by the formula (diagnosis.py);
            our own encodings decoded; feedback step by step, and what was sent in all; the model, over random links
            sums by the codec: bound, bits, bytes; a run of the trainer whose gradients it sums (summed.py)
races       encode and decode beside ours; an allreduce over links that are made slow
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from hpcllm.course.lab import RANKS, Lab, Law, LawError, Prediction, Race, Row, Trial
from hpcllm.course.labs.codec import ours
from hpcllm.course.labs.codec.diagnosis import Fault, wrong_encoding, wrong_form, wrong_values
from hpcllm.course.labs.codec.hints import HINTS
from hpcllm.course.labs.codec.ours import BLOCK, REFERENCE, Bytes, Values, encoded_bytes, parts_of, scales_like
from hpcllm.course.labs.codec.summed import check_run, check_sum, count_speedup, crossover_mb_per_s, lengths, slow_race
from hpcllm.perf.timing import Case, in_turns

QUESTION = 1_000_000  # values in the questions
RACE_VALUES = (1 << 16, 1 << 17, 1 << 18)
ROUNDS = 7
ROW_S = 120.0  # for a row of a file that is right and slow, on a busy machine
FEEDBACK_STEPS = 12
ROUNDING = 1e-4  # of a scale, for sums and differences in float32
CLOSE = 1e-6  # relative, of the model
EDGES = ("zeros", "tiny", "one_huge", "ties", "nan", "inf", "all_nan")
__all__ = ["LAB", "REFERENCE"]


def sizes(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield numbers of values: first those in which most mistakes can be told apart, then few, none, many."""
    few = (3 * BLOCK, 2 * BLOCK + 5, 5, BLOCK, 1, 0, BLOCK - 1, BLOCK + 1)
    yield from ({"n": n} for n in (*few, drawn.randrange(1000, 5000), drawn.randrange(20_000, 50_000)))


def edges(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield kinds of values at the edges of float32."""
    for kind in EDGES:
        yield {"n": 3 * BLOCK + drawn.randrange(1, BLOCK), "kind": kind}


def uneven(trial: Trial, n: int) -> Values:
    """Draw n values whose blocks differ in size and sign, the largest of each a negative or a positive one."""
    drawn = np.random.default_rng(trial.random.getrandbits(64))
    sizes_of_blocks = 10.0 ** drawn.uniform(-4, 4, ours.blocks_of(n))
    return (drawn.standard_normal(n) * sizes_of_blocks.repeat(BLOCK)[:n]).astype(np.float32)


def at_an_edge(trial: Trial) -> Values:
    """Draw values of which the second block is of the case's kind."""
    x, kind = uneven(trial, trial.case["n"]), trial.case["kind"]
    block, place = x[BLOCK : 2 * BLOCK], trial.random.randrange(BLOCK)
    if kind == "zeros":
        block[:] = 0
    elif kind == "tiny":
        block[:] = np.float32(1e-44) * np.sign(block)
    elif kind == "one_huge":
        block[place] = -1e38
    elif kind == "ties":  # the scale is 1, and values lie between two codes
        block[:] = np.clip(np.rint(block / np.abs(block).max() * 100) + 0.5, -126.5, 126.5)
        block[place] = -127
    elif kind == "all_nan":
        x[:] = np.nan
    else:
        block[place] = {"nan": np.nan, "inf": -np.inf}[kind]
    return x


def fail(trial: Trial, found: Fault | None) -> None:
    """Raise LawError for a fault."""
    if found:
        kind = f"{trial.case['kind']}, " if "kind" in trial.case else ""
        raise LawError(found[0], kind + found[1])


def check_encoding(trial: Trial) -> None:
    """Encode random values, and look at the bytes."""
    _check_encoding(trial, uneven(trial, trial.case["n"]))


def check_edges(trial: Trial) -> None:
    """Encode values at the edges, look at the bytes, and decode them."""
    x = at_an_edge(trial)
    data = _check_encoding(trial, x)
    with np.errstate(invalid="ignore"):
        fail(trial, wrong_values(trial.student.decode(data, x.size), *parts_of(data, x.size)))


def _check_encoding(trial: Trial, x: Values) -> Bytes:
    given = x.copy()
    data = trial.student.encode(given)
    if given.tobytes() != x.tobytes():
        raise LawError("overwritten", f"n = {x.size}: encode has changed the values")
    fail(trial, wrong_encoding(data, x))
    found: Bytes = data.copy()
    mirrored = trial.student.encode(-x)
    if not np.array_equal(data, found):
        raise LawError("shared", f"n = {x.size}: the second call of encode has changed what the first one returned")
    fail(trial, wrong_encoding(mirrored, -x))
    codes, of_minus = (parts_of(each.copy(), x.size)[1] for each in (found, mirrored))
    if not np.array_equal(-codes, of_minus):
        i = int(np.flatnonzero(-codes != of_minus)[0])
        seen = f"n = {x.size}: the code of {x[i]:.6g} is {codes[i]}, that of {-x[i]:.6g} is {of_minus[i]}"
        raise LawError("unsymmetric", seen)
    return found


def check_decoding(trial: Trial) -> None:
    """Decode an encoding of ours."""
    x = uneven(trial, trial.case["n"])
    data = ours.encode(x)
    given = data.copy()
    found = trial.student.decode(given, x.size)
    fail(trial, wrong_values(found, *parts_of(data, x.size)))
    if not np.array_equal(given, data):
        raise LawError("overwritten", f"n = {x.size}: decode has changed the bytes")


def feedback_sizes(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield numbers of values, and whether a step has one that is not finite."""
    yield from ({"n": n, "nan": False} for n in (2 * BLOCK + 3, 0, 1, drawn.randrange(300, 3000)))
    yield {"n": drawn.randrange(300, 3000), "nan": True}


def check_feedback(trial: Trial) -> None:
    """Encode step after step with feedback; look at each step, and at the sums of what was sent and was to be sent."""
    n, drawn = trial.case["n"], np.random.default_rng(trial.random.getrandbits(64))
    residual, sent, wanted = np.zeros(n, np.float32), np.zeros(n), np.zeros(n)
    scale = np.zeros(n)
    steady = drawn.standard_normal(n) * np.where(np.arange(n) % 7, 1e-3, 1.0)  # most of it is below half a scale
    for step in range(1, FEEDBACK_STEPS + 1):
        values = (steady + 0.1 * drawn.standard_normal(n) * steady).astype(np.float32)
        before = residual.copy()
        if trial.case["nan"] and step == 3:
            values[n // 2] = np.nan
        given = values.copy()
        data = trial.student.with_feedback(given, residual)
        fail(trial, wrong_form(data, np.uint8, encoded_bytes(n), "with_feedback"))
        if given.tobytes() != values.tobytes():
            raise LawError("overwritten", f"n = {n}, step {step}: with_feedback has changed the values")
        decoded = ours.decode(np.ascontiguousarray(data), n)
        scale = scales_like(data, n)
        fail(trial, wrong_step(values, before, residual, decoded, scale, f"n = {n}, step {step}"))
        is_kept = np.isfinite(decoded)
        sent += np.where(is_kept, decoded, 0)
        wanted += np.where(is_kept, values, -before)  # what a broken block held is lost
    off = np.abs(sent - wanted) - 0.51 * np.nan_to_num(scale) - FEEDBACK_STEPS * ROUNDING * np.abs(wanted)
    if n and off.max() > 0:
        i = int(off.argmax())
        raise LawError("lost", f"n = {n}: {FEEDBACK_STEPS} steps have sent {sent[i]:.6g} of {wanted[i]:.6g}")


def wrong_step(
    values: Values, before: Values, after: Values, decoded: Values, scale: np.ndarray[Any, Any], place: str
) -> Fault | None:
    """Find what is wrong with one step of feedback: first with what was sent, then with what was kept."""
    fine = np.isfinite(decoded)
    if not np.isfinite(after).all():
        return "poisoned", f"{place}: the residual has values that are not finite"
    v, b, a, d, s = (np.where(fine, each, 0).astype(np.float64) for each in (values, before, after, decoded, scale))
    near = 0.51 * s + ROUNDING * np.abs(v)
    if not np.all(np.abs(d - (v + b)) <= near):
        known = {"not_added": v, "sign": v - b, "doubled": v + 2 * b}
        key = next((key for key, each in known.items() if np.all(np.abs(d - each) <= near)), "feedback")
        i = int(np.argmax(np.abs(d - (v + b)) - near))
        return key, f"{place}: sent is {d[i]:.6g}, for the value {v[i]:.6g} and a residual of {b[i]:.6g}"
    left = v + b - d
    near = 1e-3 * s + ROUNDING * (np.abs(v) + np.abs(b)) * 0.1
    if np.all(np.abs(a - left) <= near):
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        known = {
            "not_kept": b,
            "sign": -left,
            "only_last": v - d,
            "doubled": b + left,
            "units": np.nan_to_num(left / np.where(s, s, 1)),
            "kept_sent": d,
            "kept_all": v + b,
        }
    fits = (k for k, each in known.items() if np.all(np.abs(a - each) <= near + CLOSE * np.abs(each)))
    i = int(np.argmax(np.abs(a - left) - near))
    return next(fits, "feedback"), f"{place}: the residual is {a[i]:.6g}, what was left out {left[i]:.6g}"


def links(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield links and codecs: slow links, on which it pays, and one that is too fast."""
    for share in (0.1, 0.5, drawn.uniform(0.05, 0.7), 1.2, 0.76):
        codec = 10 ** drawn.uniform(8, 10)
        yield {"link": share * codec, "call_s": 10 ** drawn.uniform(-6, -4), "codec": codec}


def check_model(trial: Trial) -> None:
    """Compare the model with the formula."""
    arguments = tuple(trial.case[key] for key in ("link", "call_s", "codec"))
    found, wanted = trial.student.pays_from(*arguments), ours.pays_from(*arguments)
    seen = "pays_from({:.4g}, {:.4g}, {:.4g})".format(*arguments) + f" is {found!r}"
    if not isinstance(found, float | int | np.integer):
        raise LawError("form", seen)
    # a message has a whole number of values
    is_rounded_up = isinstance(found, int | np.integer) and 0 <= found - wanted <= 1
    if not (math.isclose(found, wanted, rel_tol=CLOSE) or is_rounded_up):
        raise LawError(model_mistake(float(found), *arguments), seen)


def model_mistake(found: float, link: float, call_s: float, codec: float) -> str:
    """Tell a known mistake from its result: key of the hint."""
    code = 1 + 4 / BLOCK
    if math.isinf(ours.pays_from(link, call_s, codec)):
        return "never"
    known = {
        "no_scales": call_s / (3 / link - 4 / codec),
        "all_bytes": call_s / (4 / link - 4 / codec) if link < codec else math.nan,
        "in_bytes": 4 * call_s / ((4 - code) / link - 4 / codec),
        "values_a_second": call_s / ((4 - code) / link - 1 / codec),
        "twice": call_s / ((4 - code) / link - 8 / codec),
    }
    known |= {"twice": 2 * known["in_bytes"] / 4} if math.isclose(found, 2 * known["in_bytes"] / 4) else {}
    return next((key for key, value in known.items() if math.isclose(found, value, rel_tol=CLOSE)), "other")


def codec_race(trial: Trial) -> Iterator[Row]:
    """Time encoding and decoding, the student's and ours in turns."""
    for n in RACE_VALUES:
        x = uneven(trial, n)
        runs: list[Callable[[], object]] = [partial(_round_trip, each, x) for each in (trial.student, ours)]
        seconds = in_turns(trial.control, [Case(run) for run in runs], ROUNDS, 1, lambda: False)
        yield Row(f"{n} values", n, *(each.median for each in seconds))


def _round_trip(codec: Any, x: Values) -> Values:
    decoded: Values = codec.decode(codec.encode(x), x.size)
    return decoded


def count_bytes(trial: Trial) -> float:
    """Count the bytes of an encoding."""
    return float(trial.student.encode(np.ones(QUESTION, np.float32)).nbytes)


def count_sent_bytes(trial: Trial) -> float:
    """Count the bytes that a rank sends in an allreduce."""
    trial.comm.restart_counts()
    trial.student.allreduce(np.ones(QUESTION, np.float32), trial.comm)
    return trial.comm.sent_bytes


def sums(_: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    yield from lengths(ranks)


def only_case(_: random.Random, __: int) -> Iterator[Mapping[str, Any]]:
    yield {}


LAB = Lab(
    number=3,
    name="codec",
    title="a lossy codec, and when it pays",
    functions=("encode", "decode", "with_feedback", "pays_from", "allreduce"),
    laws=(
        Law("encoding", "scales and codes of any n values are those of the formula", 20, sizes, check_encoding, (1,)),
        Law("decoding", "decode gives code * scale, for encodings of anybody", 10, sizes, check_decoding, (1,)),
        Law("edges", "zeros, tiny, huge and broken blocks harm no others", 10, edges, check_edges, (1,)),
        Law("feedback", "what many steps send is what was to be sent", 15, feedback_sizes, check_feedback, (1,)),
        Law("model", "pays_from is right for any link and codec", 10, links, check_model, (1,)),
        Law("sums", "allreduce is near the sum, alike on all ranks, in few bytes", 10, sums, check_sum),
        Law("run", "the trainer sums its gradients by it, with near losses", 5, only_case, check_run, (RANKS,), 60.0),
    ),
    races=(
        Race("codec", "encode and decode on 4 ranks, beside ours", 5, codec_race, ((50.0, 1.0), (100.0, 0.5)),
             x_label="values", limit_s=ROW_S),
        Race("slow link", "an allreduce on links of 10 MB/s, beside ours", 5, slow_race, ((1.6, 1.0), (2.5, 0.5)),
             hint="slow_link", native_label="float32", limit_s=ROW_S),
    ),
    predictions=(
        Prediction("bytes", "bytes of the encoding of a million values", 2, count_bytes),
        Prediction("sent_bytes", "bytes that a rank of 4 sends in a sum of a million", 2, count_sent_bytes),
        Prediction("crossover", "MB/s of a link where your codec takes what it saves", 3, crossover_mb_per_s, 4.0),
        Prediction("speedup", "of your sum of 4 MiB over float32's, at 10 MB/s", 3, count_speedup, 1.6),
    ),
    hints=HINTS,
    forbidden=(
        *("Allreduce", "Iallreduce", "Reduce", "Ireduce", "Allgather", "Allgatherv", "Reduce_scatter", "Alltoall"),
        *("Reduce_scatter_block", "Bcast", "Gather", "Gatherv", "allreduce", "reduce", "allgather", "alltoall"),
        *("bcast", "gather", "send", "isend", "recv", "irecv", "sendrecv", "Dup", "Split", "Alltoallv", "Allgatherv"),
    ),
)  # fmt: skip
