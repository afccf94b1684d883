"""The cheapest algorithm and codec by cost.py. Pure: the selector, the planner and `perf tune` ask the same function.

candidates: what may carry the codec and sum the dtype   ->   seconds of each   ->   least
a codec:    the least with it against the least raw      ->   with it only if 5 % faster
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcllm.codecs.names import parse_name
from hpcllm.collectives.cost import COSTS, cost_s, message_cost_s
from hpcllm.collectives.rates import VALUE_BITS, Coding, Rates, Shape
from hpcllm.collectives.tuning import Tuning

LEAST_GAIN = 1.05  # less is not worth a codec's error, nor the prediction's
LARGEST_COUNT = 2**31 - 1  # of most MPI libraries
SUMS = ("allreduce", "reduce_scatter")
# what rounds a partial sum at each of up to 2 (ranks - 1) hops: never with a lossy codec, nor where x has 16 bits
ROUNDS_EACH_HOP = ("ring", "rabenseifner")


@dataclass(frozen=True)
class Choice:
    algorithm: str
    codec: str
    predicted_s: float
    why: str


def candidates(operation: str, codec: str, dtype: str, shape: Shape, n: int = 0) -> list[str]:
    """Algorithms that can run it on n values and that keep its error flat in the number of ranks."""
    names = [name for name in COSTS[operation] if _suits(operation, name, codec, dtype, shape)]
    return [name for name in names if name != "native" or library_counts(operation, n)]


def library_counts(operation: str, n: int) -> bool:
    """Whether the MPI library can be asked for n values: sums and copies of one buffer are cut, others cannot be."""
    return n <= LARGEST_COUNT or operation in ("allreduce", "broadcast")


def _suits(operation: str, algorithm: str, codec: str, dtype: str, shape: Shape) -> bool:
    sums, full = operation in SUMS, dtype == "float32"
    if algorithm == "native":
        return codec == "raw" and (full or not sums)
    if algorithm == "node_window":
        return codec == "raw" and shape.nodes == 1
    if algorithm == "two_level":
        return 1 < shape.nodes < shape.ranks
    if sums and algorithm in ROUNDS_EACH_HOP:
        return full and parse_name(codec).lossless
    return True


def choose(operation: str, size_bytes: int, codec: str, dtype: str, shape: Shape, rates: Rates) -> Choice | None:
    """Algorithm and codec for one call, None if a codec was asked that was not measured.

    size_bytes: as cost.py counts it. dtype: "float32", ...; of others, which are only moved, rates are float32's.
    """
    raw = find_coding("raw", dtype, rates) or find_coding("raw", "float32", rates)
    asked = find_coding(codec, dtype, rates) if codec != "raw" else raw
    if raw is None or asked is None:
        return None
    plain_s, plain = _cheapest(operation, size_bytes, raw, "raw", dtype, shape, rates)
    if codec == "raw":
        return Choice(plain, codec, plain_s, "least time predicted")
    coded_s, coded = _cheapest(operation, size_bytes, asked, codec, dtype, shape, rates)
    if plain_s < LEAST_GAIN * coded_s:
        return Choice(plain, "raw", plain_s, f"{codec} refused: {_times(plain_s, coded_s)}")
    return Choice(coded, codec, coded_s, f"{codec}: {_times(plain_s, coded_s)}")


def link_codec(name: str, n: int, same_node: bool, tuning: Tuning | None, dtype: str = "float32") -> str:
    """What to send n values with to one rank: `name`, or "raw" if the codec does not win by 5 %.

    Without tuning, and for a codec that was not measured, `name`. Both ends find the same: it is arithmetic alone.
    """
    if tuning is None or name == "raw":
        return name
    rates = tuning.rates
    raw, asked = find_coding("raw", dtype, rates), find_coding(name, dtype, rates)
    if raw is None or asked is None:
        return name
    size_bytes = n * VALUE_BITS[dtype] // 8
    plain_s, coded_s = (message_cost_s(size_bytes, coding, same_node, rates) for coding in (raw, asked))
    return "raw" if plain_s < LEAST_GAIN * coded_s else name


def find_coding(codec: str, dtype: str, rates: Rates) -> Coding | None:
    """The measured rates of a codec; stochastic rounding counts as rounding to nearest if not measured."""
    return rates.codings.get((codec, dtype)) or rates.codings.get((codec.removesuffix(":sr"), dtype))


def _cheapest(
    operation: str, size_bytes: int, coding: Coding, codec: str, dtype: str, shape: Shape, rates: Rates
) -> tuple[float, str]:
    names = candidates(operation, codec, dtype, shape, size_bytes // (VALUE_BITS.get(dtype, 8) // 8))
    costs = {name: cost_s(operation, name, size_bytes, coding, shape, rates) for name in names}
    least = min(costs, key=costs.__getitem__)
    if "native" in costs and costs["native"] < LEAST_GAIN * costs[least]:
        least = "native"
    return costs[least], least


def _times(plain_s: float, coded_s: float) -> str:
    gain = plain_s / coded_s
    return f"{gain:.2f}x only" if 1 <= gain < LEAST_GAIN else f"{gain:.2f}x"
