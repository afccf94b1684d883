"""The algorithm that `auto` takes, and whether a codec pays. Pure: the planner and `perf tune` ask the same functions.

Without measured rates, by rule, so that every run sums in the same order; arrays on the CPU:

    one node,  raw    node_window; where the library may block, native up to LIBRARY_BYTES, to LIBRARY_BYTES_CROWDED if
                      ranks have to share cores (group.py), which a rank that spins in the window may keep from another,
                      or, if the communicator has arrays in shared memory, to LIBRARY_BYTES_SHARED
    more,      raw    fp32 up to 64 KiB native, then two_level where ranks share nodes, else by size per rank; of
                      two ranks recursive_doubling up to EXCHANGED_BYTES.
                      Where the library may block, sums are native for longer: _library_bytes_between
    a codec           two_level where ranks share nodes, else two_step; of many ranks, and inside two_level of many
                      nodes, grid (strips.takes_grid). Between nodes raw below codec_bytes, and where coarse rates of
                      the codec and of the wire (assumed_rates.py) do not make it 5 % faster

Arrays on a device share no windows: by the lines for more nodes, however many there are, with the library only up to
64 KiB: it adds up on the host and takes a whole array there at once, while ours copy parts as others are on the wire.
A wait that polls gives way and sleeps, and a library's sum moves on only when it is polled: 16 KiB between two ranks
that compute in between took 600 us native and 40 in node_window. So the library is for waits that may block: without a
limit, or short ones of the foreground (mpi/wait.py).

With measured rates, by cost.py:

    candidates: algorithms that carry the codec and sum the dtype   ->   seconds of each   ->   least; the library's
                                                                         if that is not 25 % faster
    a codec:    the least with it against the least raw             ->   with it only if 5 % faster; between nodes from
                                                                         codec_bytes on, where raw takes RAW_S
    a codec that was not measured                                   ->   raw: it may be slower than any link
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hpcllm.codecs.names import parse_name
from hpcllm.collectives.assumed_rates import WIRE_GB_S, assumed_rates
from hpcllm.collectives.cost import COSTS, cost_s, message_cost_s
from hpcllm.collectives.strips import takes_grid
from hpcllm.collectives.tuning import VALUE_BITS, Coding, Rates, Shape, Tuning
from hpcllm.config.policies import FEEDBACK

IN_WINDOWS = ("allreduce", "reduce_scatter", "allgather")
SUMS = ("allreduce", "reduce_scatter")
SMALL_BYTES = 64 << 10  # up to here latency decides, and the library's is the lowest
# up to here the library's blocking call was the fastest on a node, or as fast: MPICH and Open MPI on 2 cores, private
# arrays of 2 ranks, of 3 and 4, and shared ones of 2
LIBRARY_BYTES = {"allreduce": 4 << 20, "reduce_scatter": 2 << 20, "allgather": 4 << 20}
LIBRARY_BYTES_CROWDED = LIBRARY_BYTES | {"reduce_scatter": 4 << 20, "allgather": 1 << 62}  # MPICH's: at all sizes
LIBRARY_BYTES_SHARED = {"allreduce": 256 << 10, "reduce_scatter": 512 << 10, "allgather": 4 << 20}
LIBRARY_BYTES_BETWEEN = 1 << 20  # as those, of sums between nodes: _library_bytes_between says which
LIBRARY_BYTES_OF_TWO = 8 << 20  # of an allreduce between two ranks there
EXCHANGED_BYTES = 4 << 20  # between two ranks: as many bytes as a ring sends, in one exchange and not two
# between nodes a codec is taken from here for each rank, of up to so many ranks: an array is cut for all, and of less,
# messages and turns of the codec decide; they do, too, of what arrives sooner than in RAW_S: behind cold caches the way
# through a codec takes a part of a millisecond, which no measured rate has
CODEC_BYTES_A_RANK, MOST_CODEC_RANKS = 128 << 10, 16
RAW_S = 2e-3
LONG_CHUNK_BYTES = 32 << 10  # a ring sends 2 (ranks - 1) chunks one after another: worth it from here
LEAST_GAIN = 1.05  # less is not worth a codec's error
LEAST_GAIN_OVER_LIBRARY = 1.25  # of the same values: the library's time was measured, ours is composed of rates
LARGEST_COUNT = 2**31 - 1  # of most MPI libraries
# algorithms that round a partial sum at each of up to 2 (ranks - 1) hops: never with a lossy codec or 16-bit values
ROUNDS_EACH_HOP = ("ring", "rabenseifner")


@dataclass(frozen=True)
class Values:
    """Values that a collective is to sum or move: those of x, of `out` for an all-gather."""

    n: int
    item_bytes: int
    dtype: str  # "float32", ...
    codec: str  # "raw", ...
    on_cpu: bool = True

    @property
    def size_bytes(self) -> int:
        return self.n * self.item_bytes

    @property
    def raw(self) -> bool:
        return self.codec == "raw"

    @property
    def full(self) -> bool:
        return self.dtype == "float32"

    @property
    def small(self) -> bool:
        return self.size_bytes <= SMALL_BYTES


@dataclass(frozen=True)
class Choice:
    """An algorithm and a codec for one call."""

    algorithm: str
    codec: str
    predicted_s: float
    why: str


def by_rule(operation: str, x: Values, shape: Shape, may_block: bool, has_shared: bool = False) -> str:
    """The algorithm for x over ranks that lie on nodes as shape says.

    may_block: true if the library's call may block. has_shared: true if the ranks have arrays in memory that they
    share. Whether x is one of them is known on its own rank only, and all have to choose alike.
    """
    if x.raw and shape.nodes == 1 and operation in IN_WINDOWS and x.on_cpu:
        may_use_library = operation not in SUMS or x.full
        private = LIBRARY_BYTES_CROWDED if shape.crowded else LIBRARY_BYTES
        most_bytes = (LIBRARY_BYTES_SHARED if has_shared else private)[operation]
        is_faster = may_block and x.size_bytes <= most_bytes
        return "native" if may_use_library and is_faster else "node_window"
    is_plain_sum = operation in SUMS and x.raw and x.full and x.on_cpu
    if is_plain_sum and may_block and x.size_bytes <= _library_bytes_between(operation, shape):
        return "native"
    if operation == "allreduce":
        return _allreduce(x, shape)
    if operation == "reduce_scatter":
        if not (x.raw and x.full):
            return "two_step"  # 16-bit sums too: it rounds once, a ring at every hop
        return "native" if x.small else "ring"
    if x.raw and library_counts(operation, x.n) and x.on_cpu:
        return "native"  # nothing to add up: the library moves bytes as well as we do
    if operation == "broadcast":
        return "binomial" if x.small or shape.ranks <= 2 else "ring"
    if operation == "alltoall":
        return "pairwise"
    return "bruck" if x.small else "ring"


def codec_bytes(ranks: int, wire_gb_s: float | None) -> int:
    """The least array between nodes that a codec is run on.

    wire_gb_s: each way of a node; None: not known; 0: no matter, as for arrays on a device and with measured rates.
    """
    wire_gb_s = WIRE_GB_S if wire_gb_s is None else wire_gb_s
    return max(CODEC_BYTES_A_RANK * min(ranks, MOST_CODEC_RANKS), int(RAW_S * 1e9 * wire_gb_s))


def codec_by_rule(operation: str, x: Values, shape: Shape, wire_gb_s: float | None) -> str:
    """The codec for x where no rates were measured: the one that was asked for, but raw where that is faster.

    wire_gb_s: each way of a node; None: not known. Inside a node it is what was asked for at any size, although raw is
    faster there: a policy would do nothing on one machine, where it is tried out. On a device size alone
    decides: its codecs are many times as fast as a core's.
    """
    if x.raw or shape.nodes == 1:
        return x.codec
    if x.size_bytes < codec_bytes(shape.ranks, wire_gb_s if x.on_cpu else 0.0):
        return "raw"
    if not x.on_cpu:
        return x.codec
    rates = assumed_rates(x.codec, x.dtype, wire_gb_s)
    plain_s, coded_s = (_by_rule_s(operation, each, shape, rates) for each in (replace(x, codec="raw"), x))
    return "raw" if plain_s < LEAST_GAIN * coded_s else x.codec


def _by_rule_s(operation: str, x: Values, shape: Shape, rates: Rates) -> float:
    """Seconds of the algorithm that the rule takes between nodes; of a ring where two ranks exchange whole arrays.

    Those move as many bytes, and are taken for their messages, which cost nothing here.
    """
    algorithm = by_rule(operation, x, shape, may_block=False)  # by messages of ours, which cost.py knows by their bytes
    if algorithm == "recursive_doubling":
        algorithm = "ring"
    return cost_s(operation, algorithm, x.size_bytes, rates.codings[x.codec, x.dtype], shape, rates)


def _allreduce(x: Values, shape: Shape) -> str:
    """The algorithm of an allreduce between nodes, or through a codec."""
    if x.raw and x.full and x.small:
        return "native"
    if _share_nodes(shape) and not (x.raw and x.small):
        return "two_level"
    through_owners = "grid" if takes_grid(shape.ranks) else "two_step"
    if not x.raw:
        return through_owners
    if x.small:
        return "recursive_doubling"
    if not x.full:
        return through_owners
    if shape.ranks == 2 and x.on_cpu and x.size_bytes <= EXCHANGED_BYTES:
        return "recursive_doubling"
    return "ring" if x.size_bytes // shape.ranks >= LONG_CHUNK_BYTES else "rabenseifner"


def _share_nodes(shape: Shape) -> bool:
    """True if there are several nodes, and ranks that share one."""
    return 1 < shape.nodes < shape.ranks


def _library_bytes_between(operation: str, shape: Shape) -> int:
    """Up to here the library's blocking sum between nodes was the fastest, or as fast."""
    if operation == "allreduce" and shape.ranks == 2:
        return LIBRARY_BYTES_OF_TWO
    if operation == "allreduce" and not _share_nodes(shape):
        return min(SMALL_BYTES * shape.ranks, LIBRARY_BYTES_BETWEEN)  # a ring of more is the faster one
    return LIBRARY_BYTES_BETWEEN


def candidates(operation: str, codec: str, dtype: str, shape: Shape, n: int = 0) -> list[str]:
    """Algorithms that can run it on n values and that keep its error flat in the number of ranks."""
    return [name for name in COSTS[operation] if _suits(operation, name, codec, dtype, shape, n)]


def library_counts(operation: str, n: int) -> bool:
    """True if the MPI library takes n values: sums and copies of one buffer are cut, others cannot be."""
    return n <= LARGEST_COUNT or operation in ("allreduce", "broadcast")


def _suits(operation: str, algorithm: str, codec: str, dtype: str, shape: Shape, n: int) -> bool:
    sums, full = operation in SUMS, dtype == "float32"
    if algorithm == "native":
        return codec == "raw" and (full or not sums) and library_counts(operation, n)
    if algorithm == "node_window":
        return codec == "raw" and shape.nodes == 1
    if algorithm == "two_level":
        return _share_nodes(shape)
    if sums and algorithm in ROUNDS_EACH_HOP:
        return full and parse_name(codec).lossless
    return True


def choose(operation: str, size_bytes: int, codec: str, dtype: str, shape: Shape, rates: Rates) -> Choice | None:
    """The cheapest algorithm and codec for one call; None if not even raw was measured.

    size_bytes: as cost.py counts it. dtype: "float32", ...; for others, which are only moved, rates are float32's.
    """
    raw = find_coding("raw", dtype, rates) or find_coding("raw", "float32", rates)
    if raw is None:
        return None
    plain_s, plain = _cheapest(operation, size_bytes, raw, "raw", dtype, shape, rates)
    if codec == "raw":
        return Choice(plain, codec, plain_s, "least time predicted")
    coding = find_coding(codec, dtype, rates)
    if coding is None:
        return Choice(plain, "raw", plain_s, f"{codec} was not measured")
    coded_s, coded = _cheapest(operation, size_bytes, coding, codec, dtype, shape, rates)
    if plain_s < LEAST_GAIN * coded_s:
        return Choice(plain, "raw", plain_s, f"{codec} rejected: {_times(plain_s, coded_s)}")
    if shape.nodes > 1 and (size_bytes < codec_bytes(shape.ranks, 0.0) or plain_s < RAW_S):
        return Choice(plain, "raw", plain_s, f"too short for {codec}")
    return Choice(coded, codec, coded_s, f"{codec}: {_times(plain_s, coded_s)}")


def link_codec(
    name: str,
    n: int,
    same_node: bool,
    tuning: Tuning | None,
    dtype: str = "float32",
    wire_gb_s: float | None = None,
) -> str:
    """The codec to send n values with from a CPU to one rank: `name`, or "raw" if the codec does not win by 5 %.

    Without tuning as codec_by_rule has it, for the same wire_gb_s; with it, a codec that was not measured is not used.
    Both ends find the same: it is arithmetic alone.
    """
    size_bytes = n * VALUE_BITS[dtype] // 8
    if name == "raw" or (tuning is None and same_node):
        return name
    if size_bytes < codec_bytes(2, 0.0 if tuning else wire_gb_s):
        return "raw"
    rates = tuning.rates if tuning else assumed_rates(name, dtype, wire_gb_s)
    raw, coding = find_coding("raw", dtype, rates), find_coding(name, dtype, rates)
    if raw is None or coding is None:
        return "raw"
    plain_s, coded_s = (message_cost_s(size_bytes, each, same_node, rates) for each in (raw, coding))
    is_short = tuning is not None and plain_s < RAW_S
    return "raw" if is_short or plain_s < LEAST_GAIN * coded_s else name


def find_coding(codec: str, dtype: str, rates: Rates) -> Coding | None:
    """The measured rates of a codec; stochastic rounding counts as rounding to nearest if not measured."""
    return rates.codings.get((codec, dtype)) or rates.codings.get((codec.removesuffix(":sr"), dtype))


def unmeasured(codecs: Iterable[str], rates: Rates) -> list[str]:
    """Those of the codecs, each once, that no type of values has rates of: with these rates they are never used."""
    known = {name for name, _ in rates.codings}
    asked = dict.fromkeys(name.removesuffix(FEEDBACK) for name in codecs)
    names = [str(parse_name(name)) for name in asked]
    return [name for name in names if not known & {name, name.removesuffix(":sr")} and name != "raw"]


def _cheapest(
    operation: str, size_bytes: int, coding: Coding, codec: str, dtype: str, shape: Shape, rates: Rates
) -> tuple[float, str]:
    names = candidates(operation, codec, dtype, shape, size_bytes // (VALUE_BITS.get(dtype, 8) // 8))
    costs = {name: cost_s(operation, name, size_bytes, coding, shape, rates) for name in names}
    least = min(costs, key=costs.__getitem__)
    if "native" in costs and costs["native"] < LEAST_GAIN_OVER_LIBRARY * costs[least]:
        least = "native"
    return costs[least], least


def _times(plain_s: float, coded_s: float) -> str:
    gain = plain_s / coded_s
    return f"{gain:.2f}x only" if 1 <= gain < LEAST_GAIN else f"{gain:.2f}x"
