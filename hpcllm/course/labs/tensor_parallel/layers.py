"""Layers split by outputs and by inputs, of whole numbers: each result beside the whole layer's, and known mistakes.

              drawn alike on all ranks        student, on this rank's part       compared, bit for bit
forward       x, w, b                   -->   columns, rows                 -->  own outputs; the whole sum
backward      x, w, b, gradient of y    -->   ..._backward                  -->  whole x, own w, own b; own x, own w, b
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcllm.course.lab import LawError, Trial

Values = NDArray[np.float32]
Mistakes = Iterable[tuple[str, NDArray[Any] | None]]  # key of the hint, what comes of it; the likeliest first

ROUNDED = 0.01  # of the largest value: fewer bits than float32 has
LARGEST = 60  # of the values drawn: sums of products are exact in float32, but not in 16 bits


class Whole(NamedTuple):
    """A whole layer, what goes in, and the gradient of what comes out."""

    x: Values  # (tokens, inputs)
    w: Values  # (outputs, inputs)
    b: Values  # (outputs,)
    gradient: Values  # (tokens, outputs)


def shapes(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield shapes of layers: parts of equal length, square ones, one that does not divide, then any."""
    yield {"tokens": 3, "inputs": 2 * ranks, "outputs": 4 * ranks, "layers": 1}
    yield {"tokens": 3, "inputs": 2 * ranks, "outputs": 2 * ranks, "layers": 2}
    yield {"tokens": 2, "inputs": ranks + 1, "outputs": 2 * ranks + 1, "layers": 2}
    drawn_sizes = [drawn.randrange(ranks, 12 * ranks) for _ in range(2)]
    yield {"tokens": drawn.randrange(5, 30), "inputs": drawn_sizes[0], "outputs": drawn_sizes[1], "layers": 3}


def draw(trial: Trial) -> list[Whole]:
    """Draw the layers of a case, which read one x, in small whole numbers. The same on all ranks."""
    drawn = np.random.default_rng(trial.random.getrandbits(64))
    tokens, inputs, outputs = (trial.case[key] for key in ("tokens", "inputs", "outputs"))

    def array(*shape: int) -> Values:
        values: Values = (drawn.integers(1, LARGEST + 1, shape) * drawn.choice([-1, 1], shape)).astype(np.float32)
        return values

    x = array(tokens, inputs)
    count = range(trial.case["layers"])
    return [Whole(x, array(outputs, inputs), array(outputs), array(tokens, outputs)) for _ in count]


def own(trial: Trial, n: int) -> slice:
    """Return this rank's part of n by the student's ranges."""
    return slice(*map(int, trial.student.own_range(n, trial.comm)))


def call(trial: Trial, name: str, *arguments: Any) -> Any:
    """Call a function of the student, and return what it returns. Raises LawError if it changes what it was given."""
    before = [array.copy() for array in _flat(arguments)]
    result = getattr(trial.student, name)(*arguments, trial.comm)
    if not trial.comm.waited_for():
        raise LawError("not_waited", f"{name}: {_place(trial)}")
    if not all(np.array_equal(a, b) for a, b in zip(before, _flat(arguments), strict=True)):
        raise LawError("overwritten", f"{name}: {_place(trial)}: an array that was given has changed")
    return result


def _flat(nested: Any) -> list[Values]:
    return [nested] if isinstance(nested, np.ndarray) else [array for each in nested for array in _flat(each)]


def _place(trial: Trial) -> str:
    case = ", ".join(f"{number} {key}" for key, number in trial.case.items())
    return f"rank {trial.comm.rank} of {trial.comm.size}, {case}"


def compare(trial: Trial, what: str, found: Any, wanted: Values, mistakes: Mistakes = ()) -> None:
    """Raise LawError unless found is as wanted."""
    if not isinstance(found, np.ndarray) or found.shape != wanted.shape:
        seen = f"shape {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
        raise LawError("shape", f"{what}: {_place(trial)}: {seen}, not shape {list(wanted.shape)}")
    if found.dtype != np.float32:
        raise LawError("dtype", f"{what}: {_place(trial)}: {found.dtype}, not float32")
    if np.array_equal(found, wanted):
        return
    first = tuple(int(i) for i in np.argwhere(found != wanted)[0])
    values = f"place {list(first)} is {found[first]:.9g}, not {wanted[first]:.9g}"
    likely = (key for key, made in mistakes if made is not None and made.shape == found.shape and near(found, made))
    vague = "rounded" if np.abs(found - wanted).max() <= ROUNDED * np.abs(wanted).max() else "other"
    raise LawError(next(likely, vague), f"{what}: {_place(trial)}: {values}")


def near(found: Values, made: NDArray[Any]) -> bool:
    return np.allclose(found, made, rtol=1e-6, atol=0)


def unpacked(trial: Trial, name: str, found: Any, count: int) -> Sequence[Any]:
    """Return found if it is a list or tuple of so many. Raises LawError."""
    if not isinstance(found, list | tuple) or len(found) != count:
        seen = f"{len(found)} values" if isinstance(found, list | tuple) else type(found).__name__
        raise LawError("shape", f"{name}: {_place(trial)}: returns {seen}, not a list or tuple of {count}")
    return found


def check_forward(trial: Trial) -> None:
    """Compare what layers of both kinds make."""
    _check_columns(trial, draw(trial))
    _check_rows(trial, draw(trial)[0])


def _check_columns(trial: Trial, wholes: Sequence[Whole]) -> None:
    mine = own(trial, trial.case["outputs"])
    y = call(trial, "columns", wholes[0].x.copy(), [(whole.w[mine].copy(), whole.b[mine].copy()) for whole in wholes])
    for found, whole in zip(unpacked(trial, "columns", y, len(wholes)), wholes, strict=True):
        product = whole.x @ whole.w.T
        sums = _sum_of_parts(product + whole.b, 1, trial.comm.size)
        mistakes = [("no_bias", product[:, mine]), ("needless_sum", sums)]
        mistakes += [("divided", (product + whole.b / trial.comm.size)[:, mine])]
        mistakes += [("turned", whole.x @ whole.w[mine].reshape(whole.w[mine].shape[::-1]) + whole.b[mine])]
        compare(trial, "columns", found, (product + whole.b)[:, mine], mistakes)


def _check_rows(trial: Trial, whole: Whole) -> None:
    mine, ranks = own(trial, trial.case["inputs"]), trial.comm.size
    y = call(trial, "rows", whole.x[:, mine].copy(), whole.w[:, mine].copy(), whole.b.copy())
    part, product = whole.x[:, mine] @ whole.w[:, mine].T, whole.x @ whole.w.T
    turned = whole.x[:, mine] @ whole.w[:, mine].reshape(-1, len(whole.b))
    mistakes: list[tuple[str, NDArray[Any]]] = [("no_bias", product), ("no_sum", part + whole.b), ("no_sum", part)]
    mistakes += [("turned", turned + whole.b), ("turned", turned)]
    mistakes += [("bias_often", product + ranks * whole.b), ("mean", product / ranks + whole.b)]
    compare(trial, "rows", y, product + whole.b, [*mistakes, ("mean", (product + whole.b) / ranks)])


def check_backward(trial: Trial) -> None:
    """Compare the gradients of layers of both kinds."""
    _check_columns_backward(trial, draw(trial))
    _check_rows_backward(trial, draw(trial)[0])


def _check_columns_backward(trial: Trial, wholes: Sequence[Whole]) -> None:
    name, mine, ranks = "columns_backward", own(trial, trial.case["outputs"]), trial.comm.size
    layers = [(whole.w[mine].copy(), whole.b[mine].copy()) for whole in wholes]
    gradients = [whole.gradient[:, mine].copy() for whole in wholes]
    of_x, of_layers = unpacked(trial, name, call(trial, name, gradients, wholes[0].x.copy(), layers), 2)
    whole_x = [whole.gradient @ whole.w for whole in wholes]
    own_x = sum(gradient @ w for gradient, (w, _) in zip(gradients, layers, strict=True))
    wanted = np.asarray(sum(whole_x))
    mistakes: list[tuple[str, NDArray[Any]]] = [
        ("no_sum", np.asarray(own_x)),
        ("mean", wanted / ranks),
        ("one_layer", whole_x[0]),
    ]
    mistakes += [("one_layer", whole_x[-1]), ("summed_again", _summed_again(whole_x, ranks))]
    compare(trial, f"{name}, x", of_x, wanted, [*mistakes, ("summed_again", ranks * wanted)])
    for whole, found in zip(wholes, unpacked(trial, name, of_layers, len(wholes)), strict=True):
        _compare_weights(trial, name, whole, (mine, slice(None)), unpacked(trial, name, found, 2))


def _summed_again(whole_x: Sequence[Values], ranks: int) -> Values:
    """Make the gradient in which, layer by layer, the total so far is summed over the ranks, which summed it before."""
    total = np.zeros_like(whole_x[0])
    for of_layer in whole_x:
        total = ranks * total + of_layer
    return total


def _check_rows_backward(trial: Trial, whole: Whole) -> None:
    name, mine, ranks = "rows_backward", own(trial, trial.case["inputs"]), trial.comm.size
    arguments = whole.gradient.copy(), whole.x[:, mine].copy(), whole.w[:, mine].copy()
    of_x, *of_weights = unpacked(trial, name, call(trial, name, *arguments), 3)
    wanted = whole.gradient @ whole.w
    mistakes = [("needless_sum", _sum_of_parts(wanted, 1, ranks)), ("divided", wanted[:, mine] / ranks)]
    compare(trial, f"{name}, x", of_x, wanted[:, mine], mistakes)
    _compare_weights(trial, name, whole, (slice(None), mine), of_weights)


def _compare_weights(trial: Trial, name: str, whole: Whole, part: tuple[slice, slice], found: Sequence[Values]) -> None:
    """Compare the gradients of w and b. part: of outputs and of inputs, those that this rank has."""
    of_w, of_b = whole.gradient.T @ whole.x, whole.gradient.sum(0)
    tokens, ranks = len(whole.x), trial.comm.size
    axis = 0 if part[1] == slice(None) else 1
    compare(trial, f"{name}, w", found[0], of_w[part], _weight_mistakes(of_w, part, axis, ranks, tokens))
    mistakes = _weight_mistakes(of_b, part[:1], 0, ranks, tokens)
    compare(trial, f"{name}, b", found[1], of_b[part[0]], [*mistakes, ("bias_rank", 0 * of_b[part[0]])])


def _weight_mistakes(whole: Values, part: tuple[slice, ...], axis: int, ranks: int, tokens: int) -> Mistakes:
    """List what mistakes make of the gradient of w or b."""
    own_part = whole[part]
    return [
        ("needless_sum", _sum_of_parts(whole, axis, ranks)),
        ("needless_sum", ranks * own_part),
        ("token_mean", own_part / tokens),
        ("divided", own_part / ranks),
    ]


def _sum_of_parts(whole: Values, axis: int, ranks: int) -> Values | None:
    """Sum the parts of all ranks, as if they were parts of a sum; None where their lengths differ."""
    if whole.shape[axis] % ranks:
        return None
    total: Values = np.sum(np.split(whole, ranks, axis), axis=0)
    return total
