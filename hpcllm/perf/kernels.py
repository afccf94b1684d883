# ruff: noqa: N806 - shape suffixes are upper case: B batch, T sequence, H heads, K channels of a head, D hidden
"""Seconds of the kernels that a training step is made of, one by one, for `step --calibrate`.

    for each kernel and size:   several sets of operands
                                meet | run on set 0, 1, 2 ... | the device is done     all ranks of a node at once

A training step comes to a weight, its gradient and its moments long after it was last touched: what goes over those
has so many sets that no cache holds them all. An activation was made just before it is read: what goes over those has
a few sets, which are in caches if they are small. Results lie where others have lain before. The functions are those
of model/ and optim/, not stand-ins for them.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import functional

from hpcllm.codecs.gpu.launch import launcher_of
from hpcllm.config.schema import ModelConfig, OptimizerConfig
from hpcllm.model.attention import apply_rotary, rotary_table
from hpcllm.model.gradient_sums import add_product
from hpcllm.model.loss import cross_entropy_sum
from hpcllm.model.transformer import norm, normed
from hpcllm.optim.adamw import update_by_pytorch
from hpcllm.optim.gpu import fused_adamw
from hpcllm.optim.gpu.fused_adamw import Numbers, Operands
from hpcllm.plan.time.kernel_times import ORIENTATIONS
from hpcllm.system.device import synchronize

Run = Callable[[], object]
Make = Callable[[], Run]  # makes operands, and gives what is to be timed with them
WIDTH = 512  # channels of a token, where a kernel goes over tokens
VOCABULARY = 4096


@dataclass(frozen=True)
class Extent:
    """Sizes at which kernels are measured, and how carefully."""

    products: tuple[int, ...]  # m, n and k each take all of them
    sequences: tuple[int, ...]
    channels: tuple[int, ...]
    values: tuple[int, ...]
    scores: tuple[int, ...]  # values of a loss, and of what is too large for a process's own heap
    beyond_caches_bytes: int  # all sets of operands together
    rounds: int = 3
    largest_flops: float = 5e9  # of a product


CPU = Extent(
    products=(32, 128, 512, 2048),
    sequences=(64, 256, 1024),
    channels=(32, 64, 128),
    values=(1 << 12, 1 << 15, 1 << 18, 1 << 21),
    scores=(1 << 14, 1 << 19, 1 << 22, 1 << 24),
    beyond_caches_bytes=48 << 20,
)
DEVICE = Extent(
    products=(128, 512, 2048, 8192),
    sequences=(512, 2048, 8192),
    channels=(64, 128),
    values=(1 << 14, 1 << 18, 1 << 22, 1 << 26),
    scores=(1 << 18, 1 << 22, 1 << 26, 1 << 28),
    beyond_caches_bytes=1 << 30,
    rounds=5,
    largest_flops=2e12,
)
SHORT = Extent((32, 512), (64, 256), (32, 64), (1 << 12, 1 << 20), (1 << 14, 1 << 20), 4 << 20, 1)  # for a trial
FEW_SETS = 3
HEAP_BYTES = 32 << 20  # glibc: what is larger comes from the system, page by page, and goes back to it


@dataclass(frozen=True)
class Bench:
    """Times what all ranks of comm do at once."""

    comm: MPI.Intracomm
    device: torch.device
    dtype: torch.dtype
    extent: Extent

    def seconds(self, make: Make, operand_bytes: float = 0.0, once: bool = False) -> float:
        """Seconds of one run: the median of rounds over all sets of operands, the slowest rank's. Collective over comm.

        operand_bytes: of what comes from memory, 0 if from where work has just left it. once: what `make` gives can
        run a single time, as a backward pass.
        """
        cold = math.ceil(self.extent.beyond_caches_bytes / operand_bytes) if operand_bytes else 0
        count = max(FEW_SETS, min(16, cold))
        self._round([make()])  # compiles, and asks the system for memory
        runs: list[Run] = []
        rounds = []
        for _ in range(self.extent.rounds):
            runs = [make() for _ in range(count)] if once or not runs else runs
            rounds.append(self._round(runs))
        slowest = np.array([max(statistics.median(rounds), 1e-9)])
        self.comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        return float(slowest[0])

    def _round(self, runs: list[Run]) -> float:
        synchronize(self.device)
        self.comm.Barrier()
        start = time.perf_counter()
        kept = [run() for run in runs]  # results lie where others have lain before
        synchronize(self.device)
        return (time.perf_counter() - start) / len(kept)

    def random(self, *shape: int) -> Tensor:
        """Random values, 2^18 of them over and over: quickly made."""
        some = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)).sub_(0.5).to(self.device)
        n = math.prod(shape)
        return some.repeat(-(-n // len(some)))[:n].clone().view(shape).to(self.dtype)


def measured_kernels(bench: Bench) -> dict[str, dict[str, Any]]:
    """The tables that plan/time/kernel_times.py reads. Collective over bench.comm."""
    torch.empty(HEAP_BYTES - 65536, dtype=torch.uint8)  # given back at once: from now on the heap keeps what is freed
    with torch.autograd.set_multithreading_enabled(False):  # as a chunk's backward pass
        return {"products": _products(bench), "attention": _attention(bench), "curves": dict(_curves(bench))}


def _products(bench: Bench) -> dict[str, list[float]]:
    """TFLOP/s. What is too large to be measured takes the rate of its like with the largest sizes that are not."""
    sizes = bench.extent.products
    tables: dict[str, list[float]] = {"sizes": [float(size) for size in sizes]}
    for orientation in ORIENTATIONS:
        rates: dict[tuple[int, ...], float] = {}
        for shape in itertools.product(sizes, repeat=3):
            small = _measurable(shape, bench.extent)
            rates[shape] = rates[small] if small != shape else _product_tflops(bench, orientation, *shape)
        tables[orientation] = [_rounded(rate) for rate in rates.values()]
    return tables


def _measurable(shape: tuple[int, ...], extent: Extent) -> tuple[int, ...]:
    while 2.0 * math.prod(shape) > extent.largest_flops:
        largest = shape.index(max(shape))
        smaller = extent.products[extent.products.index(shape[largest]) - 1]
        shape = (*shape[:largest], smaller, *shape[largest + 1 :])
    return shape


def _product_tflops(bench: Bench, orientation: str, m: int, n: int, k: int) -> float:
    def make() -> Run:
        if orientation == "forward":
            x, w = bench.random(m, k), bench.random(n, k)
            return lambda: functional.linear(x, w)
        right = bench.random(k, n)
        if orientation == "weight":
            left, total = bench.random(k, m).t(), bench.random(m, n).float()
            return lambda: add_product(total, left, right, begun=True)
        left = bench.random(m, k)
        return lambda: left @ right

    return 2e-12 * m * n * k / bench.seconds(make, (m * k + n * k + m * n) * bench.dtype.itemsize)


def _attention(bench: Bench) -> dict[str, list[float]]:
    extent = bench.extent
    axes = {"sequence": extent.sequences, "channels": extent.channels}
    tables = {key: [float(size) for size in sizes] for key, sizes in axes.items()}
    for way in ("forward", "backward"):
        shapes = itertools.product(extent.sequences, extent.channels)
        tables[way] = [_rounded(_attention_s(bench, way, *shape)) for shape in shapes]
    return tables


def _attention_s(bench: Bench, way: str, sequence: int, channels: int) -> float:
    """Seconds of one head of several."""
    heads, samples = 4, max(1, min(16, bench.extent.values[-2] // (4 * sequence * channels)))

    def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (x.transpose(1, 2) for x in (query, key, value))
        out_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return out_BHTK.transpose(1, 2).flatten(-2)

    seconds = _passes_s(bench, lambda: [bench.random(samples, sequence, heads, channels) for _ in range(3)], core, way)
    return seconds / heads / samples


def _passes_s(bench: Bench, operands: Callable[[], list[Tensor]], run: Callable[..., Tensor], way: str) -> float:
    """Seconds of run(*operands), or of its backward pass."""

    def make() -> Run:
        given = [x.requires_grad_(x.is_floating_point()) for x in operands()]
        if way == "forward":
            return lambda: run(*given)
        y = run(*given)
        gradient = torch.ones_like(y)
        return lambda: torch.autograd.backward(y, gradient)

    return bench.seconds(make, once=way == "backward")


def _curves(bench: Bench) -> Iterator[tuple[str, dict[str, list[float]]]]:
    for name, (operands, run) in _differentiable(bench).items():
        for way in ("forward", "backward"):
            sizes = bench.extent.scores if name == "loss" else bench.extent.values
            yield f"{name}_{way}", _curve(sizes, lambda n: _passes_s(bench, lambda: operands(n), run, way))  # noqa: B023
    for name, (operands, kernel, each) in _plain(bench).items():
        sizes = bench.extent.scores if name in ("fresh", "largest") else bench.extent.values
        yield name, _curve(sizes, lambda n: bench.seconds(lambda: partial(kernel, *operands(n)), each * n))  # noqa: B023


def _curve(sizes: tuple[int, ...], seconds: Callable[[int], float]) -> dict[str, list[float]]:
    return {"sizes": [float(n) for n in sizes], "seconds": [_rounded(seconds(n)) for n in sizes]}


def _differentiable(bench: Bench) -> dict[str, tuple[Callable[[int], list[Tensor]], Callable[..., Tensor]]]:
    """Name -> operands of n values, and what is made of them; the size is that of the result, of the loss its input."""
    shapes = (ModelConfig(hidden=WIDTH, norm="rmsnorm"), ModelConfig(hidden=WIDTH, norm="layernorm"))
    rms, layer = (norm(shape).to(bench.device, bench.dtype) for shape in shapes)
    table = rotary_table(ModelConfig(hidden=256, heads=4, max_sequence=64)).to(bench.device)
    rows = bench.random(64, WIDTH)  # few: that all of a table's gradient is made zero first is another kernel

    def tokens(n: int) -> list[Tensor]:
        return [bench.random(max(1, n // WIDTH), WIDTH)]

    def heads(n: int) -> list[Tensor]:
        return [bench.random(max(1, n // (64 * 4 * 64)), 64, 4, 64)]

    def scores(n: int) -> list[Tensor]:
        some = max(1, n // VOCABULARY)
        return [bench.random(1, some, VOCABULARY), torch.randint(VOCABULARY, (1, some), device=bench.device)]

    def chosen(n: int) -> list[Tensor]:
        return [rows.detach(), torch.randint(64, (max(1, n // WIDTH),), device=bench.device)]

    return {
        "rmsnorm": (tokens, lambda x: normed(rms, x).value()),
        "layernorm": (tokens, lambda x: normed(layer, x).value()),
        "swiglu": (lambda n: tokens(n) + tokens(n), lambda gate, up: functional.silu(gate) * up),
        "gelu": (tokens, lambda up: functional.gelu(up, approximate="tanh")),
        "rotary": (heads, lambda x: apply_rotary(x, table)),
        "loss": (scores, lambda logits, targets: cross_entropy_sum(logits, targets)),
        "embedding": (chosen, lambda weights, indices: functional.embedding(indices, weights)),
    }


def _plain(bench: Bench) -> dict[str, tuple[Callable[[int], list[Any]], Callable[..., object], int]]:
    """Name -> operands of n values, what goes over them, and bytes of a value's operands; 0 where it was just made."""

    def single(n: int) -> list[Tensor]:
        return [bench.random(n).float()]

    launcher, _ = launcher_of(bench.device.type)

    def adamw_operands(n: int) -> list[Any]:
        weights, gradients, first, second = (bench.random(n).float() for _ in range(4))
        return [Operands(weights, gradients, first, second.abs_())]

    def adamw(operands: Operands) -> None:
        numbers = Numbers(1, 1e-4, 2.0, OptimizerConfig())  # clipped, as most of the first steps of a run are
        if launcher:
            fused_adamw.update(launcher, operands, numbers)
        else:
            update_by_pytorch(operands, numbers)

    def fresh(n: int) -> Tensor:
        return torch.empty(n, device=bench.device, dtype=torch.float32).fill_(0.0)

    return {
        "add": (lambda n: [bench.random(n), bench.random(n)], torch.add, 0),
        "accumulate": (lambda n: [*single(n), bench.random(n)], Tensor.add_, 8),
        "zero": (lambda n: [single(n)], torch._foreach_zero_, 8),
        "fresh": (lambda n: [n], fresh, 0),
        "norm": (lambda n: [single(n)], torch._foreach_norm, 8),
        "largest": (lambda n: [bench.random(max(1, n // VOCABULARY), VOCABULARY).float(), -1], torch.amax, 0),
        "adamw": (adamw_operands, adamw, 16),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3e}")
