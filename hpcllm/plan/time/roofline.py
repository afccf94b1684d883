"""Estimate how long a kernel takes on a device: what it computes or what it moves, whichever is longer, and its start.

    product    pieces of 256 x 128 results, one a multiprocessor at a time

               |################|################|####            |   4 waves of 108 pieces, the last one not full:
                  wave 1            wave 2           wave 3 ...       small products lose what is left of it

    flash      what it computes, the causal half; a short sequence leaves more of the diagonal's pieces half used
    stream     bytes / what such kernels get of the memory's bandwidth

A machine file with measured kernels (plan --calibrate) answers from those instead. How well a type of device does it is
one row a family, for every machine and every paper:

    sustained    large matrix products in training / the best that a benchmark finds: power, clocks, operands in memory
    stream       share of the memory's bandwidth of kernels that only read and write
    scores       the same for kernels that go over attention's scores, and for the products that write them
    flash_*      fused attention / large matrix products, by what it computes (the causal half), for long sequences
    first_flash  its first version / its second
    vector       products that matrix units do not take (float32, rows not aligned to 16 bytes) / peak of matrix units
    launch_us    what a kernel costs beyond its work, while the host is ahead of the device
    tiles        rows and columns of the pieces of a product, and how good they are

Sources. sustained, scores of nvidia-ampere: rows of perf/plan/rows that are not held out; of amd-cdna2: the two of
LUMI; of others: by likeness (devices that draw all their power in large products lower their clocks). stream: copies
reach 80 to 90 % of HBM on NVIDIA, 75 to 80 % on others. flash: arXiv:2307.08691 figures 4 to 7, heads of 128 channels,
on A100 and H100. vector: float32 of data sheets, of which two thirds are reached. tiles: those of cuBLAS on A100. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hpcllm.plan.machine import Device
from hpcllm.plan.time.kernel_times import KernelTimes
from hpcllm.plan.time.kernels import Flash, Kernel, Kernels, Product, Stream

FILL_K = 128  # a piece's first operands come and its results go in the time of so many products a value
FLASH_K = 256  # positions of a sequence at which half of its time is lost
ALIGNED_BYTES = 16  # alignment of rows that matrix units need
SUM_BYTES = 12.0  # read and written for each value by a sum of float32
SPLITS = (1, 2, 4, 8)  # parts of k, where a product has too few pieces

Tiles = tuple[tuple[int, int, float], ...]
TILES: Tiles = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.72), (64, 64, 0.5))


@dataclass(frozen=True)
class Family:
    """Shares of what a device has at best; meanings and sources at the top of the file."""

    sustained: float
    stream: float
    flash_forward: float
    flash_backward: float
    vector: float
    launch_us: float
    scores: float = 0.6
    first_flash: float = 0.55
    tiles: Tiles = TILES

    @property
    def launch_s(self) -> float:
        return 1e-6 * self.launch_us


FAMILIES: dict[str, Family] = {
    "nvidia-volta": Family(0.90, 0.80, 0.45, 0.35, 0.08, 4.0),
    "nvidia-ampere": Family(0.92, 0.82, 0.72, 0.58, 0.04, 3.0),
    "nvidia-hopper": Family(0.85, 0.82, 0.50, 0.42, 0.04, 3.0),
    "amd-cdna2": Family(0.78, 0.75, 0.50, 0.35, 0.08, 6.0),
    "amd-cdna3": Family(0.90, 0.75, 0.50, 0.35, 0.08, 5.0),
    "intel-xe": Family(0.90, 0.75, 0.45, 0.30, 0.04, 8.0),
    "tpu": Family(0.95, 0.85, 0.50, 0.45, 0.05, 1.0),
}
OTHER = Family(0.85, 0.75, 0.50, 0.40, 0.05, 5.0)  # families without a row


def family_of(name: str) -> Family:
    """Return the row of a device's family, or that of families without one."""
    return FAMILIES.get(name, OTHER)


def seconds(kernels: Kernels, device: Device, times: KernelTimes | None = None) -> float:
    """Add up kernels that run one after another. times: measured on the device for this type of values."""
    if times is not None:
        return sum(_measured_s(kernel, times) for kernel in kernels)
    return sum(kernel_s(kernel, device) for kernel in kernels)


def _measured_s(kernel: Kernel, times: KernelTimes) -> float:
    """Look one kernel up. Measured attention includes its reordering; kernels without a curve move bytes as sums do."""
    match kernel:
        case Product(m, n, k, batch, orientation, item_bytes, sum_bytes):
            pages_s = 0.0 if sum_bytes else times.pages_s(m * n * item_bytes)
            return batch * (times.product_s(orientation, m, n, k) + pages_s)
        case Flash():
            way = "backward" if kernel.backward else "forward"
            return times.attention_s(way, kernel.heads, kernel.sequence, kernel.channels)
        case Stream() if kernel.kernel in times.curves:
            return times.curve_s(kernel.kernel, kernel.values)
        case Stream() if kernel.kernel == "order" or not kernel.moved_bytes:
            return 0.0
        case Stream():
            return times.curve_s("add", kernel.moved_bytes / SUM_BYTES)


def kernel_s(kernel: Kernel, device: Device) -> float:
    """Estimate one kernel, or as many launches as it says."""
    if not kernel.moved_bytes:
        return 0.0
    family, work_s, of_scores, launches = family_of(device.family), 0.0, False, 1
    match kernel:
        case Stream():
            of_scores, launches = kernel.kernel == "softmax", kernel.launches
        case Flash():
            work_s = _flash_s(kernel, device, family)
        case Product():  # of each head: it reads or writes scores
            work_s, of_scores = _product_s(kernel, device, family), kernel.batch > 1
    memory_s = kernel.moved_bytes / (1e9 * device.hbm_gb_s * (family.scores if of_scores else family.stream))
    return max(work_s, memory_s) + launches * family.launch_s


def _flash_s(kernel: Flash, device: Device, family: Family) -> float:
    share = family.flash_backward if kernel.backward else family.flash_forward
    if kernel.first_version:
        share *= family.first_flash
    share *= kernel.sequence / (kernel.sequence + FLASH_K)
    computed = kernel.flops / 2 * (1.25 if kernel.backward else 1.0)  # the scores once more
    return computed / (1e12 * _rate(device, kernel.item_bytes, family) * share)


def _product_s(kernel: Product, device: Device, family: Family) -> float:
    """Estimate a product by the best of the tiles that libraries choose from."""
    rows = (size * kernel.item_bytes for size in (kernel.m, kernel.n, kernel.k))  # of all three, whichever way they lie
    if any(size % ALIGNED_BYTES for size in rows):
        return kernel.flops / (1e12 * device.peak_bf16_tflops * family.vector)
    m, n, k, batch = (math.ceil(size) for size in (kernel.m, kernel.n, kernel.k, kernel.batch))
    done = _in_pieces(m, n, k, batch, device.multiprocessors, family.tiles)
    return done / (1e12 * _rate(device, kernel.item_bytes, family))


def _rate(device: Device, item_bytes: int, family: Family) -> float:
    """Return the TFLOP/s of large products in training."""
    if item_bytes == 4:
        return device.peak_bf16_tflops * family.vector
    return device.gemm_bf16_tflops * family.sustained


@lru_cache(maxsize=1 << 16)
def _in_pieces(m: int, n: int, k: int, batch: int, at_once: int, tiles: Tiles) -> float:
    """Return the FLOPs that the device could have done in the time of this product, `at_once` pieces at a time."""
    best = math.inf
    for rows, columns, share in tiles:
        pieces = batch * math.ceil(m / rows) * math.ceil(n / columns)
        split = max(parts for parts in SPLITS if parts == 1 or pieces * parts <= at_once)
        waves = math.ceil(pieces * split / at_once)
        best = min(best, waves * at_once * 2.0 * rows * columns * (k / split + FILL_K) / share)
    return best
