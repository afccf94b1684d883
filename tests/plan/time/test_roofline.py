"""Seconds of a kernel: never faster than the device, never slower for a better one, in waves of pieces."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hpcllm.config import machines
from hpcllm.plan.machine import Device, read_machine
from hpcllm.plan.time.kernels import Flash, Kernel, Product, Stream
from hpcllm.plan.time.roofline import FAMILIES, family_of, kernel_s, seconds

DEVICES = {name: read_machine(name).device for name in machines.names() if "device" in machines.load(name)}
A100 = DEVICES["dgx-a100"]
KERNELS: list[Kernel] = [
    *(Product(m, n, k) for m in (128, 2048, 5000) for n in (256, 5376) for k in (64, 4096)),
    Product(2048, 2048, 112, 40),
    Product(2048, 2048, 108, 40),
    Product(1024, 1024, 1024, item_bytes=4),
    *(
        Flash(40, length, 128, back, first)
        for length in (512, 8192)
        for back in (False, True)
        for first in (False, True)
    ),
    Stream("norm", 1e7, 4.0),
    Stream("softmax", 1e7, 4.0, 3),
]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_no_kernel_beats_its_device(device: Device) -> None:
    for kernel in KERNELS:
        computed = 0.0 if isinstance(kernel, Stream) else kernel.flops / (2 if isinstance(kernel, Flash) else 1)
        took_s = kernel_s(kernel, device)
        assert took_s > computed / (1e12 * device.gemm_bf16_tflops), kernel
        assert took_s > kernel.moved_bytes / (1e9 * device.hbm_gb_s), kernel


@pytest.mark.parametrize("key", ["hbm_gb_s", "gemm_bf16_tflops", "peak_bf16_tflops"])
def test_a_better_device_is_never_slower(key: str) -> None:
    better = dataclasses.replace(A100, **{key: 2 * getattr(A100, key)})
    for kernel in KERNELS:
        assert kernel_s(kernel, better) <= kernel_s(kernel, A100), kernel


@pytest.mark.parametrize("key", ["m", "n", "k", "batch"])
def test_more_of_a_product_never_takes_less(key: str) -> None:
    aligned = [k for k in KERNELS if isinstance(k, Product) and k.k % 8 == 0]
    for kernel, factor in itertools.product(aligned, (2, 3, 16)):
        larger = dataclasses.replace(kernel, **{key: factor * getattr(kernel, key)})
        assert kernel_s(larger, A100) >= kernel_s(kernel, A100), kernel


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_large_products_reach_what_they_do_in_training(device: Device) -> None:
    large = Product(32768, 16384, 16384)
    rate = large.flops / kernel_s(large, device) / 1e12
    sustained = device.gemm_bf16_tflops * family_of(device.family).sustained
    assert 0.95 * sustained < rate < sustained


def test_a_wave_that_is_not_full_takes_as_long_as_one_that_is() -> None:
    full = Product(256, 128 * A100.multiprocessors, 8192)
    more = dataclasses.replace(full, n=full.n + 128)
    assert 1.2 * kernel_s(full, A100) < kernel_s(more, A100) < 2.1 * kernel_s(full, A100)


def test_rows_that_are_not_aligned_cost_the_matrix_units() -> None:
    aligned, other = (Product(2048, 2048, channels, 64) for channels in (112, 108))
    assert kernel_s(other, A100) > 3 * kernel_s(aligned, A100)
    assert kernel_s(Product(4096, 4096, 4096, item_bytes=4), A100) > 8 * kernel_s(Product(4096, 4096, 4096), A100)


def test_flash_gains_with_length_and_version() -> None:
    def tflops(length: int, first: bool, back: bool) -> float:
        kernel = Flash(64, length, 128, back, first)
        return kernel.flops / kernel_s(kernel, A100)

    for back in (False, True):
        assert tflops(512, False, back) < tflops(2048, False, back) < tflops(16384, False, back)
        assert tflops(2048, True, back) < tflops(2048, False, back)
    assert tflops(2048, False, True) < tflops(2048, False, False)


def test_kernels_run_one_after_another() -> None:
    kernels = tuple(KERNELS)
    assert seconds(kernels, A100) == pytest.approx(sum(kernel_s(kernel, A100) for kernel in kernels))
    assert kernel_s(Stream("drop", 1e9, 0.0), A100) == 0.0


def test_each_device_belongs_to_a_family() -> None:
    assert {device.family for device in DEVICES.values()} <= FAMILIES.keys()
