"""The AdamW kernel gives the bits of PyTorch's, in one launch and fewer bytes, wherever its arrays begin and end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from emulated import EMULATOR, WAVEFRONTS, why_not
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.config.schema import OptimizerConfig
from hpcllm.optim import adamw
from hpcllm.optim.adamw import make_share, update_by_pytorch
from hpcllm.optim.flat_buffers import FlatBuffer, Traits
from hpcllm.optim.gpu import fused_adamw
from hpcllm.optim.gpu.fused_adamw import Numbers, Operands
from hpcllm.optim.shard_spec import ShardSpec
from tests.model.counting import Counting

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
WAVES = pytest.mark.parametrize("launcher", [EMULATOR, WAVEFRONTS], ids=["32", "64"])
NARROWED = [torch.bfloat16, torch.float16, torch.float32, None]
FUSES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # PyTorch, a product and a sum
VECTOR = 64  # values, a multiple of what any of its vector loops takes at once
MARGIN, UNTOUCHED = 40, -123.0


@pytest.fixture(autouse=True)
def one_thread():
    """So that PyTorch's vector loop has one end, that of an array."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def configs():
    betas, sizes = st.sampled_from([0.0, 0.3, 0.9, 0.95, 0.999]), st.sampled_from([0.0, 1e-8, 1e-3])
    return st.builds(OptimizerConfig, beta1=betas, beta2=betas, epsilon=sizes, weight_decay=st.sampled_from([0.0, 0.1]))


def drawn(generator, n, shift, dtype=torch.float32):
    """(n,) random values in memory that begins `shift` of them behind a multiple of 64 bytes; what is around them."""
    memory = torch.full((n + shift + MARGIN,), UNTOUCHED, dtype=dtype)
    values = memory[shift : shift + n].copy_(torch.randn(n, generator=generator))
    return values, [memory[:shift], memory[shift + n :]]


def by_vectors(operands, numbers):
    """(weights, exp_avg, exp_avg_sq) after PyTorch's update, no value of which was in the rest of a vector loop."""
    arrays = operands.weights, operands.gradients, operands.exp_avg, operands.exp_avg_sq
    bounds, decays, results = (0, *operands.edges, len(arrays[0])), numbers.config.weight_decay, []
    for number, (start, end) in enumerate(pairwise(bounds)):
        padded = [torch.nn.functional.pad(x[start:end], (0, -(end - start) % VECTOR)).clone() for x in arrays]
        config = replace(numbers.config, weight_decay=0.0 if number % 2 else decays)
        update_by_pytorch(Operands(*padded), replace(numbers, config=config))
        results.append([padded[i][: end - start] for i in (0, 2, 3)])
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def assert_bits(found, want):
    if FUSES:
        assert torch.equal(found.isnan(), want.isnan())
        assert torch.equal(found.nan_to_num(7.0), want.nan_to_num(7.0))
    else:
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7, equal_nan=True)


@WAVES
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 900),
    shifts=st.lists(st.integers(0, 4), min_size=5, max_size=5) | st.just([0] * 5),
    cuts=st.lists(st.integers(0, 900), max_size=6),
    narrowed=st.sampled_from(NARROWED),
    config=configs(),
    number=st.sampled_from([1, 2, 7, 3000]),
    divisor=st.sampled_from([1.0, 2.5, 1024.0, 0.37]),
    bad=st.sampled_from([None, float("inf"), float("-inf"), float("nan")]),
    seed=st.integers(0, 2**32),
)
def test_bits_are_pytorchs_for_any_place_and_length(
    launcher, n, shifts, cuts, narrowed, config, number, divisor, bad, seed
):
    generator = torch.Generator().manual_seed(seed)
    drawings = [drawn(generator, n, shift) for shift in shifts[:4]]
    weights, gradients, mean, square = (values for values, _ in drawings)
    square.square_()
    if n and bad is not None:
        gradients[seed % n] = bad
    edges = tuple(sorted({min(cut, n) for cut in cuts}))
    operands, numbers = Operands(weights, gradients, mean, square, edges), Numbers(number, 1e-2, divisor, config)
    want, gradients_before = by_vectors(operands, numbers), gradients.clone()
    target, around = drawn(generator, n, shifts[4], narrowed or torch.float32)
    fused_adamw.update(launcher, operands, numbers, None if narrowed is None else target)
    for found, truth in zip((weights, mean, square), want, strict=True):
        assert_bits(found, truth)
    assert torch.equal(gradients.nan_to_num(7.0), gradients_before.nan_to_num(7.0))
    if narrowed is not None:
        assert_bits(target.float(), weights.to(narrowed).float())
    for edge in [*(edge for _, pair in drawings for edge in pair), *around]:
        assert bool((edge == UNTOUCHED).all())


def test_masters_are_rounded_to_nearest_and_ties_to_even():
    """Without gradients weights stay; each is between two of 16 bits, a quarter, half, or three quarters of the way."""
    step = 2.0**-7
    masters = torch.tensor([1 + step * (k + part) for k in range(4) for part in (0.25, 0.5, 0.75)])
    operands = Operands(masters.clone(), *(torch.zeros(12) for _ in range(3)))
    target = torch.zeros(12, dtype=torch.bfloat16)
    fused_adamw.update(EMULATOR, operands, Numbers(1, 1e-2, 1.0, OptimizerConfig(weight_decay=0.0)), target)
    even = [1 + step * k for k in (0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4)]
    assert target.tolist() == even


def test_a_norm_beyond_float32_leaves_no_gradient():
    operands = Operands(*(torch.ones(5) for _ in range(4)))
    fused_adamw.update(EMULATOR, operands, Numbers(1, 0.0, 1e39, OptimizerConfig(beta1=0.5, beta2=0.5)))
    assert operands.exp_avg.tolist() == [0.5] * 5
    assert operands.exp_avg_sq.tolist() == [0.5] * 5


class CountingUpdates(Counting):
    """Counts what PyTorch's fused AdamW writes, too; as a Launcher counts what ours reads and writes."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function._schema.name == "aten::_fused_adamw_":
            weights, gradients, mean, square = arguments[:4]
            scales = (options or {}).get("grad_scale") is not None
            self.moved_bytes += sum(x.nbytes for x in [*weights, *mean, *square, *gradients * scales])
        return super().__torch_dispatch__(function, types, arguments, options)

    def launch(self, program, kernel, groups, arguments):
        self.count([*arguments, *arguments[1:4]])  # moments and masters are written, too
        EMULATOR.launch(program, kernel, groups, arguments)


SIZES = {"w0": 4000, "n0": 60, "b0": 60, "w1": 3000, "n1": 60, "w2": 1012}


def counted(monkeypatch, launched, keeps_master, divisor, sizes):
    """(launches, bytes a value) of an update of a share."""
    buffer = FlatBuffer(tuple(sizes), tuple(sizes.values()), Traits(exact=False))
    spec = ShardSpec(buffer, False, 0, buffer.size, None, True, 1)
    model = torch.randn(buffer.size).to(torch.bfloat16 if keeps_master else torch.float32)
    share = make_share(
        spec, model, torch.randn(buffer.size), keeps_master, lambda name: name[0] == "w", OptimizerConfig()
    )
    counting = CountingUpdates()
    monkeypatch.setattr(adamw, "launcher_of", lambda _: (counting if launched else None, ""))
    with counting:
        if not share.update(1e-3, divisor, share.model) and keeps_master:
            share.model.copy_(share.master)
    assert not keeps_master or torch.equal(share.model, share.master.bfloat16())
    return counting.launches, round(counting.moved_bytes / buffer.size, 1)


@pytest.mark.parametrize("divisor", [1.0, 3.0])
@pytest.mark.parametrize("sizes", [{"w": 9000}, SIZES], ids=["matrices", "all"])
def test_an_update_is_one_launch_and_thirty_bytes_a_value(monkeypatch, divisor, sizes):
    assert counted(monkeypatch, True, True, divisor, sizes) == (1, 30.0)
    assert counted(monkeypatch, True, False, divisor, sizes) == (1, 28.0)


@pytest.mark.parametrize(("divisor", "moved", "launches"), [(1.0, 34.0, 3), (3.0, 38.0, 4)])
def test_by_pytorch_it_takes_more(monkeypatch, divisor, moved, launches):
    assert counted(monkeypatch, False, True, divisor, {"w": 9000}) == (launches, moved)
    assert counted(monkeypatch, False, False, divisor, {"w": 9000}) == (launches - 1, moved - 6)


@pytest.mark.parametrize("parts", [2, 3, 7, 50])
def test_a_share_has_the_bits_of_the_whole(monkeypatch, parts):
    """However a buffer is cut: unlike PyTorch's, our kernel rounds the last values of a stretch as all others."""
    buffer = FlatBuffer(tuple(SIZES), tuple(SIZES.values()), Traits(exact=False))
    monkeypatch.setattr(adamw, "launcher_of", lambda _: (EMULATOR, ""))
    generator = torch.Generator().manual_seed(parts)
    model, gradients = (torch.randn(buffer.size, generator=generator) for _ in range(2))
    results = []
    for cuts in (1, parts):
        weights, narrowed = model.clone(), torch.zeros(buffer.size, dtype=torch.bfloat16)
        for part in range(cuts):
            start, end = buffer.size * part // cuts, buffer.size * (part + 1) // cuts
            spec, sums = ShardSpec(buffer, True, start, end, None, True, 1), gradients[start:end]
            own = weights[start:end]
            share = make_share(spec, own, sums, True, lambda name: name[0] == "w", OptimizerConfig())
            for _ in range(3):
                assert share.update(1e-2, 1.7, narrowed[start:end])
            own.copy_(share.master)
        results.append((weights, narrowed))
    (whole, whole_narrowed), (cut, cut_narrowed) = results
    assert torch.equal(cut, whole)
    assert torch.equal(cut_narrowed, whole_narrowed)
    assert torch.equal(narrowed, cut.bfloat16())
    assert not torch.equal(cut, model)


UNDEFINED = """
import torch
from emulated import Emulator
from hpcllm.config.schema import OptimizerConfig
from hpcllm.optim.gpu import fused_adamw
from hpcllm.optim.gpu.fused_adamw import Numbers, Operands

checked = Emulator(32, ("-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all"))
for n in (1, 255, 256, 257, 1024):
    for odd in range(6):  # the array that does not begin at a multiple of 16 bytes, or none
        dtypes = [torch.float32] * 4 + [torch.bfloat16]
        arrays = [torch.ones(n + 1, dtype=dtype)[at == odd :][:n] for at, dtype in enumerate(dtypes)]
        numbers = Numbers(1, 1e-3, 2.0, OptimizerConfig())
        fused_adamw.update(checked, Operands(*arrays[:4], (1, 200, 256)), numbers, arrays[4])
print("defined")
"""


def test_the_kernel_does_nothing_that_c_leaves_undefined():
    """No four words at once where one of the arrays is not aligned; no place beyond an array."""
    here = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", UNDEFINED], cwd=here, capture_output=True, text=True, timeout=110)
    assert done.stdout == "defined\n", f"exit code {done.returncode}: {done.stderr[-2000:]}"
