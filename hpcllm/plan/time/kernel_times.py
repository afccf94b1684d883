"""Interpolate times of kernels on a device of one machine, as `perf step --calibrate` measured them. Pure.

    curve       seconds of a kernel by the values it goes over      ~                        .'
    products    TFLOP/s of x w^T, g w and g^T x by (m, n, k)        seconds               .'      beyond the last size:
    attention   seconds of a head by (sequence, channels)                     _.-'''         in proportion
                                                                    ---------'   before the first: the cost of a call

Between sizes that were measured, logarithms are interpolated: a rate that grows by a power of the size stays a line.
All numbers are of one rank while all ranks of its node do the same.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcllm.errors import ConfigError

ORIENTATIONS = ("forward", "input", "weight")  # x w^T, g w, g^T x
CURVES = (
    *(f"{kind}_{way}" for kind in ("rmsnorm", "layernorm", "swiglu", "gelu", "rotary", "loss", "embedding")
      for way in ("forward", "backward")),
    "add", "accumulate", "zero", "fresh", "norm", "largest", "adamw",
)  # fmt: skip
PRECISIONS = ("fp32", "bf16", "fp16")
FRESH_BYTES = 32 << 20  # glibc's largest M_MMAP_THRESHOLD: smaller results come from the process's own heap
SHARED_CURVES = ("allreduce", "reduce_scatter", "allgather")  # collectives of arrays in a node's shared memory


@dataclass(frozen=True)
class Curve:
    """Seconds of a kernel by its size, at sizes that grow."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        if size <= 0:
            return 0.0
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        low, share = _between(self.sizes, size)
        first = math.log(self.seconds[low])
        return math.exp(first + share * (math.log(self.seconds[low + 1]) - first))


@dataclass(frozen=True)
class Grid:
    """A number by several sizes on a grid; the last size varies fastest."""

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def at(self, *sizes: float) -> float:
        """Interpolate; beyond the ends take what was measured there."""
        corners = [self._sides(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        total = 0.0
        for corner in itertools.product(*corners):
            index, weight = 0, 1.0
            for (place, share), axis in zip(corner, self.axes, strict=True):
                index, weight = index * len(axis) + place, weight * share
            if weight:
                total += weight * math.log(self.values[index])
        return math.exp(total)

    @staticmethod
    def _sides(axis: Sequence[float], size: float) -> list[tuple[int, float]]:
        if size <= axis[0] or len(axis) == 1:
            return [(0, 1.0)]
        if size >= axis[-1]:
            return [(len(axis) - 1, 1.0)]
        low, share = _between(axis, size)
        return [(low, 1.0 - share), (low + 1, share)]


@dataclass(frozen=True, eq=False)  # identity is its key in caches
class KernelTimes:
    """Times of kernels for one type of values: fp32, bf16 or fp16."""

    products: Mapping[str, Grid]  # TFLOP/s by m, n, k, for each of ORIENTATIONS
    attention: Mapping[str, Grid]  # "forward", "backward": seconds of a head by its sequence and its channels
    curves: Mapping[str, Curve]

    def product_s(self, orientation: str, m: float, n: float, k: float) -> float:
        """Return the seconds of an m x k by k x n product. Below the smallest size it takes as long as there."""
        grid = self.products[orientation]
        flops = 2.0 * math.prod(max(size, axis[0]) for size, axis in zip((m, n, k), grid.axes, strict=True))
        return flops / grid.at(m, n, k) / 1e12

    def attention_s(self, way: str, heads: float, sequence: float, channels: float) -> float:
        """Return the seconds of causal attention; longer than measured, work grows as sequence^2 x channels."""
        grid = self.attention[way]
        lengths, widths = grid.axes
        beyond = max(1.0, sequence / lengths[-1]) ** 2 * max(1.0, channels / widths[-1])
        return heads * grid.at(sequence, channels) * beyond

    def curve_s(self, kernel: str, values: float) -> float:
        """Return the seconds of a kernel with a curve. Raises KeyError for one that is not measured by itself."""
        return self.curves[kernel].at(values)

    def pages_s(self, size_bytes: float) -> float:
        """Return what a CPU's result of that size costs beyond its work: the system gives its memory page by page."""
        if size_bytes < FRESH_BYTES:
            return 0.0
        values = size_bytes / 4
        return max(0.0, self.curve_s("fresh", values) - self.curve_s("zero", values))


@dataclass(frozen=True, eq=False)
class MeasuredKernels:
    """Times of kernels on a device, for each type of values that was measured."""

    types: Mapping[str, KernelTimes]  # by precision: fp32, bf16, fp16

    def of(self, item_bytes: int) -> KernelTimes | None:
        """Return the times for values of that size, None if they were not measured."""
        names = ("fp32",) if item_bytes == 4 else ("bf16", "fp16")
        return next((self.types[name] for name in names if name in self.types), None)


def read_measured_kernels(table: Any) -> MeasuredKernels:
    """Read the tables [kernels.fp32...] of a machine file. Raises ConfigError."""
    types = _tables("kernels", table, (), PRECISIONS)
    return MeasuredKernels({name: read_kernel_times(f"kernels.{name}", each) for name, each in types.items()})


def read_kernel_times(title: str, table: Any) -> KernelTimes:
    """Read the times of one type of values; every key, type and range is checked. Raises ConfigError."""
    parts = _tables(title, table, ("products", "attention", "curves"))
    products = _tables(f"{title}.products", parts["products"], ("sizes", *ORIENTATIONS))
    sizes = _numbers(f"{title}.products.sizes", products["sizes"], grows=True)
    attention = _tables(f"{title}.attention", parts["attention"], ("sequence", "channels", "forward", "backward"))
    axes = tuple(_numbers(f"{title}.attention.{key}", attention[key], grows=True) for key in ("sequence", "channels"))
    curves = _tables(f"{title}.curves", parts["curves"], CURVES, SHARED_CURVES)
    return KernelTimes(
        {key: _grid(f"{title}.products.{key}", products[key], (sizes,) * 3) for key in ORIENTATIONS},
        {key: _grid(f"{title}.attention.{key}", attention[key], axes) for key in ("forward", "backward")},
        {key: _curve(f"{title}.curves.{key}", value) for key, value in curves.items()},
    )


def _grid(title: str, values: Any, axes: tuple[tuple[float, ...], ...]) -> Grid:
    numbers = _numbers(title, values)
    if len(numbers) != math.prod(map(len, axes)):
        raise ConfigError(f"{title} has {len(numbers)} numbers; valid: {math.prod(map(len, axes))}, one for each shape")
    return Grid(axes, numbers)


def _curve(title: str, table: Any) -> Curve:
    parts = _tables(title, table, ("sizes", "seconds"))
    sizes, seconds = _numbers(f"{title}.sizes", parts["sizes"], grows=True), _numbers(title, parts["seconds"])
    if len(sizes) != len(seconds):
        raise ConfigError(f"{title} has {len(sizes)} sizes and {len(seconds)} seconds; valid: as many of both")
    return Curve(sizes, seconds)


def _tables(title: str, table: Any, keys: Sequence[str], others: Sequence[str] = ()) -> dict[str, Any]:
    """Check that a table has all of `keys`, and nothing but these and `others`."""
    if not isinstance(table, dict):
        raise ConfigError(f"{title} = {table!r} should be a table")
    for key in keys:
        if key not in table:
            raise ConfigError(f"{title}.{key} is missing; measure anew with `python -m hpcllm.perf step --calibrate`")
    for key in table:
        if key not in keys and key not in others:
            raise ConfigError(f"unknown key {title}.{key}; valid: {', '.join((*keys, *others))}")
    return table


def _numbers(title: str, values: Any, grows: bool = False) -> tuple[float, ...]:
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{title} = {values!r} should be a list of numbers above 0")
    for value in values:
        if type(value) not in (int, float) or not 1e-15 <= value <= 1e15:  # also rejects NaN
            raise ConfigError(f"{title} holds {value!r}; valid: finite numbers above 0")
    if grows and any(after <= before for before, after in itertools.pairwise(values)):
        raise ConfigError(f"{title} = {values!r} should grow")
    return tuple(map(float, values))


def _between(axis: Sequence[float], size: float) -> tuple[int, float]:
    """Return the index before `size`, and how far `size` is on the way to the next, in logarithms."""
    low = bisect_right(axis, size) - 1
    return low, math.log(size / axis[low]) / math.log(axis[low + 1] / axis[low])
