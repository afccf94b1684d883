"""How long a kernel takes on a device: what it computes or what it moves, whichever is longer, and its start.

    product    pieces of 256 x 128 results, one a multiprocessor at a time

               |################|################|####            |   4 waves of 108 pieces, the last one not full:
                  wave 1            wave 2           wave 3 ...       small products lose what is left of it

    flash      what it computes, the causal half; a short sequence leaves more of the diagonal's pieces half used
    stream     bytes / what such kernels get of the memory's bandwidth

A machine file with measured kernels (plan --calibrate) answers from those instead. Efficiencies: families.py. Pure.
"""

from __future__ import annotations

import math
from functools import lru_cache

from hpcllm.plan.machine import Device
from hpcllm.plan.time.families import Family, Tiles, family_of
from hpcllm.plan.time.kernel_times import KernelTimes
from hpcllm.plan.time.kernels import Flash, Kernel, Kernels, Product, Stream

FILL_K = 128  # a piece's first operands come and its results go in the time of so many products a value
FLASH_K = 256  # positions of a sequence at which half of its time is lost
ALIGNED_BYTES = 16  # of rows: less, and matrix units cannot read them
SUM_BYTES = 12.0  # that a sum of float32 reads and writes for each value
SPLITS = (1, 2, 4, 8)  # of k, where a product has too few pieces


def seconds(kernels: Kernels, device: Device, times: KernelTimes | None = None) -> float:
    """One after another. times: what was measured on the device for this type of values."""
    if times is not None:
        return sum(_measured_s(kernel, times) for kernel in kernels)
    return sum(kernel_s(kernel, device) for kernel in kernels)


def _measured_s(kernel: Kernel, times: KernelTimes) -> float:
    """The order of heads is part of a measured attention; what else no curve is of goes over memory as sums do."""
    match kernel:
        case Product(m, n, k, batch, orientation, item_bytes):
            return batch * (times.product_s(orientation, m, n, k) + times.pages_s(m * n * item_bytes))
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
    """One of the kernels, or as many launches as it says."""
    family = family_of(device.family)
    if not kernel.moved_bytes:
        return 0.0
    share = family.scores if _is_of_scores(kernel) else family.stream
    memory_s = kernel.moved_bytes / (1e9 * device.hbm_gb_s * share)
    match kernel:
        case Stream():
            return memory_s + kernel.launches * family.launch_s
        case Flash():
            return max(_flash_s(kernel, device, family), memory_s) + family.launch_s
        case Product():
            return max(_product_s(kernel, device, family), memory_s) + family.launch_s


def _is_of_scores(kernel: Kernel) -> bool:
    """Whether it goes over attention's scores row by row, or is a product, of each head by itself, that has them."""
    if isinstance(kernel, Product):
        return kernel.batch > 1
    return isinstance(kernel, Stream) and kernel.kernel == "softmax"


def _flash_s(kernel: Flash, device: Device, family: Family) -> float:
    share = family.flash_backward if kernel.backward else family.flash_forward
    if kernel.first_version:
        share *= family.first_flash
    share *= kernel.sequence / (kernel.sequence + FLASH_K)
    computed = kernel.flops / 2 * (1.25 if kernel.backward else 1.0)  # the scores once more
    return computed / (1e12 * _rate(device, kernel.item_bytes, family) * share)


def _product_s(kernel: Product, device: Device, family: Family) -> float:
    """By the best of the pieces that libraries choose from."""
    if not _is_aligned(kernel):
        return kernel.flops / (1e12 * device.peak_bf16_tflops * family.vector)
    m, n, k, batch = (math.ceil(size) for size in (kernel.m, kernel.n, kernel.k, kernel.batch))
    done = _in_pieces(m, n, k, batch, device.multiprocessors, family.tiles)
    return done / (1e12 * _rate(device, kernel.item_bytes, family))


def _rate(device: Device, item_bytes: int, family: Family) -> float:
    """TFLOP/s of large products in training."""
    if item_bytes == 4:
        return device.peak_bf16_tflops * family.vector
    return device.gemm_bf16_tflops * family.sustained


def _is_aligned(kernel: Product) -> bool:
    """Whether rows of all three matrices start at a multiple of 16 bytes, whichever way they lie."""
    return all(size * kernel.item_bytes % ALIGNED_BYTES == 0 for size in (kernel.m, kernel.n, kernel.k))


@lru_cache(maxsize=1 << 16)
def _in_pieces(m: int, n: int, k: int, batch: int, at_once: int, tiles: Tiles) -> float:
    """FLOPs that the device could have done in the time of this product, so many pieces at once."""
    best = math.inf
    for rows, columns, share in tiles:
        pieces = batch * math.ceil(m / rows) * math.ceil(n / columns)
        split = max(parts for parts in SPLITS if parts == 1 or pieces * parts <= at_once)
        waves = math.ceil(pieces * split / at_once)
        best = min(best, waves * at_once * 2.0 * rows * columns * (k / split + FILL_K) / share)
    return best
