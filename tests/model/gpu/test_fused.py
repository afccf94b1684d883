"""Fused kernels compute what PyTorch's operations do, forward and backward, to rounding: their own text on the CPU.

Truth is float64: a fused result may be as far from it as one rounding to the type of the values, and a little for sums.
"""

from __future__ import annotations

import pytest
import torch
from emulated import EMULATOR, WAVEFRONTS, on_the_cpu, why_not
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from hpcllm.model.attention import apply_rotary, rotary_table
from hpcllm.model.gpu import fused
from hpcllm.model.loss import IGNORED, cross_entropy, cross_entropy_in_pieces, cross_entropy_sum

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

EPSILON = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one rounding, and a little
every_dtype = pytest.mark.parametrize("dtype", EPSILON, ids=lambda dtype: str(dtype)[6:])
few = settings(max_examples=8, deadline=None)


def over(**sizes):
    """Draw sizes, a seed, and how far behind a multiple of 16 bytes values begin."""
    return given(seed=st.integers(0, 2**32), shift=st.integers(0, 3), **sizes)


@pytest.fixture(autouse=True, params=[EMULATOR, WAVEFRONTS], ids=["warps", "wavefronts"])
def kernels_on_the_cpu(request):
    with on_the_cpu(request.param):
        yield


def values(generator, shape, dtype, shift=0, size=1.0):
    """Random ones, which begin `shift` values behind a multiple of 16 bytes: not where quads do."""
    memory = torch.empty(torch.Size(shape).numel() + shift, dtype=dtype)
    return memory[shift:].view(shape).copy_(size * torch.randn(shape, generator=generator)).requires_grad_()


def assert_near(found, truth, sums=1):
    """sums: how many roundings of float32 a value may have in front of its own, of numbers up to 1 or the greatest."""
    scale = truth.abs().max().clamp(min=1).item()
    bound = EPSILON[found.dtype] * truth.abs() + sums * 2.0**-22 * scale
    assert ((found.double() - truth).abs() <= bound).all(), (found.double() - truth).abs().max()


def assert_same_passes(ours, plain, inputs, seed, sums=1):
    """Compare the results of both functions, and the gradients of the inputs for a random one of each result."""
    generator = torch.Generator().manual_seed(seed)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, truth = ours(*inputs), plain(*wide)
    upstream = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in found]
    for y, want in zip(found, truth, strict=True):
        assert_near(y, want, sums)
    gradients = torch.autograd.grad(found, inputs, upstream)
    wanted = torch.autograd.grad(truth, wide, [g.double() for g in upstream])
    for gradient, want in zip(gradients, wanted, strict=True):
        assert_near(gradient, want, sums)


@every_dtype
@few
@over(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_swiglu(dtype, shape, seed, shift):
    generator = torch.Generator().manual_seed(seed)
    gate, up = values(generator, shape, dtype, shift, 4.0), values(generator, shape, dtype)
    assert_same_passes(
        lambda gate, up: [fused.swiglu(gate, up)], lambda gate, up: [functional.silu(gate) * up], [gate, up], seed, 4
    )


def test_swiglu_far_from_zero_is_zero_or_the_product():
    gate = torch.tensor([-1000.0, -100.0, 0.0, 100.0, 1000.0], requires_grad=True)
    up = torch.full((5,), 2.0)
    out = fused.swiglu(gate, up)
    assert out.tolist() == [0, 0, 0, 200, 2000]
    out.sum().backward()
    assert gate.grad.tolist() == [0, 0, 1, 2, 2]


class Shape:
    """What rotary_table needs of a model."""

    def __init__(self, rotated, length):
        self.turned_channels, self.max_sequence, self.rope_theta, self.rope_scaling = rotated, length, 1e4, "none"


@every_dtype
@pytest.mark.parametrize(("channels", "rotated"), [(16, 16), (8, 4), (32, 8), (6, 2), (12, 12)])
@few
@over(sizes=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3)))
def test_rotary(dtype, channels, rotated, sizes, seed, shift):
    batch, sequence, queries, keys = sizes
    generator, table = torch.Generator().manual_seed(seed), rotary_table(Shape(rotated, 20))[:, 5 : 5 + sequence]
    q = values(generator, (batch, sequence, queries, channels), dtype, shift)
    k = values(generator, (batch, sequence, keys, channels), dtype)
    assert_same_passes(
        lambda q, k: fused.rotate(q, k, table), lambda q, k: [apply_rotary(x, table.double()) for x in (q, k)],
        [q, k], seed, 2,
    )  # fmt: skip


@every_dtype
@pytest.mark.parametrize(("channels", "rotated"), [(16, 16), (32, 8), (6, 2)])
@few
@over(sizes=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3)))
def test_rotary_of_packed_documents(dtype, channels, rotated, sizes, seed, shift):
    """Each token by the angles of its own position, as if its document began the row: also of one token, and of all."""
    batch, sequence, queries, keys = sizes
    generator, table = torch.Generator().manual_seed(seed), rotary_table(Shape(rotated, 20))
    positions = torch.randint(20, (batch, sequence), generator=generator)
    q = values(generator, (batch, sequence, queries, channels), dtype, shift)
    k = values(generator, (batch, sequence, keys, channels), dtype)
    own = table[:, positions].double()
    assert_same_passes(
        lambda q, k: fused.rotate(q, k, table, positions), lambda q, k: [apply_rotary(x, own) for x in (q, k)],
        [q, k], seed, 2,
    )  # fmt: skip
    alone = [fused.rotate(q[:, t : t + 1], k[:, t : t + 1], table[:, p : p + 1])
             for t, p in enumerate(positions[0].tolist())]  # fmt: skip
    for found, each in zip(fused.rotate(q, k, table, positions), zip(*alone, strict=True), strict=True):
        assert torch.equal(found[:1], torch.cat([x[:1] for x in each], dim=1))  # the bits of one token's kernel


def plain_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


@every_dtype
@few
@over(rows=st.integers(1, 150), width=st.integers(4, 300))
def test_rms_norm(dtype, rows, width, seed, shift):
    generator = torch.Generator().manual_seed(seed)
    x, weight = values(generator, (rows, width), dtype, shift, 3.0), values(generator, (width,), dtype)
    assert_same_passes(
        lambda x, weight: [fused.rms_norm(x, weight, 1e-5)], lambda x, weight: [plain_norm(x, weight)],
        [x, weight], seed, rows + width,
    )  # fmt: skip


def norm_gradients(launcher, x, branch, weight, upstream):
    """Gradients of all three, by the kernels of waves of 32 or 64 lanes."""
    with on_the_cpu(launcher):
        results = fused.added_rms_norm(x, branch, weight, 1e-5)
        return torch.autograd.grad(results, [x, branch, weight], upstream)


@every_dtype
@few
@over(rows=st.integers(1, 300), width=st.integers(1, 300))
def test_rows_that_are_too_long_for_one_pass_have_the_same_gradients(dtype, rows, width, seed, shift):
    """To rounding; those of the residual path to the bit, and everything on wavefronts as on warps."""
    generator = torch.Generator().manual_seed(seed)
    x, branch = (values(generator, (rows, width), dtype, at) for at in (shift, 0))
    weight = values(generator, (width,), dtype)
    upstream = [torch.randn(rows, width, generator=generator).to(dtype) for _ in range(2)]
    once, on_waves = (norm_gradients(of, x, branch, weight, upstream) for of in (EMULATOR, WAVEFRONTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "MOST_COLUMNS", 0)
        twice, too = (norm_gradients(of, x, branch, weight, upstream) for of in (EMULATOR, WAVEFRONTS))
    for found, want in ((once, on_waves), (twice, too), (once[:2], twice[:2])):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    scale = max(1.0, float(twice[2].abs().max()))  # either may be rounded the other way
    torch.testing.assert_close(once[2], twice[2], rtol=2.5 * EPSILON[dtype], atol=rows * 2.0**-22 * scale)


@every_dtype
@few
@over(rows=st.integers(1, 80), width=st.integers(1, 70))
def test_rms_norm_of_a_sum(dtype, rows, width, seed, shift):
    """The norm is that of the rounded sum, as the residual stream has it."""
    generator = torch.Generator().manual_seed(seed)
    x, branch = (values(generator, (rows, 4 * width), dtype, at) for at in (shift, 0))
    weight = values(generator, (4 * width,), dtype)
    rounding = (x.detach() + branch.detach()).double() - (x.detach().double() + branch.detach().double())

    def plain(x, branch, weight):
        total = x + branch + rounding
        return total, plain_norm(total, weight)

    assert_same_passes(
        lambda *inputs: fused.added_rms_norm(*inputs, 1e-5), plain, [x, branch, weight], seed, rows + 4 * width
    )


@every_dtype
@few
@over(tokens=st.integers(1, 9), size=st.integers(1, 1300), scale=st.sampled_from([1.0, 30.0, 0.01]))
def test_cross_entropy(dtype, tokens, size, scale, seed, shift):
    generator = torch.Generator().manual_seed(seed)
    logits = values(generator, (tokens, size), dtype, shift, scale)
    targets = torch.randint(size, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < 0.2] = IGNORED
    weights = 0.5 * torch.rand(tokens, generator=generator)
    wide = logits.detach().double().requires_grad_()
    truth = functional.cross_entropy(wide, targets, reduction="none", ignore_index=IGNORED)
    found = cross_entropy(logits, targets)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5 * scale)
    (gradient,) = torch.autograd.grad((weights * found).sum(), logits)
    (want,) = torch.autograd.grad((weights * truth).sum(), wide)
    assert_near(gradient, want, 8 + 4 * scale)
    assert gradient.data_ptr() == logits.data_ptr()


@every_dtype
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_cross_entropy_in_pieces_is_that_of_pytorch(dtype, piece):
    generator = torch.Generator().manual_seed(piece)
    x, weight = values(generator, (2, 4, 24), dtype), values(generator, (50, 24), dtype, size=0.3)
    targets = torch.randint(50, (2, 4), generator=generator)
    targets[0, 1] = IGNORED
    found = cross_entropy_in_pieces(x, weight, targets, piece).sum()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = functional.cross_entropy((wide[0] @ wide[1].t()).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(found.double(), truth, rtol=4 * EPSILON[dtype], atol=1e-5)
    for gradient, want in zip(torch.autograd.grad(found, [x, weight]), torch.autograd.grad(truth, wide), strict=True):
        torch.testing.assert_close(gradient.double(), want, rtol=8 * EPSILON[dtype], atol=8 * EPSILON[dtype])


def test_a_second_backward_pass_through_the_loss_is_rejected():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.zeros(2, 3, dtype=torch.int64))
    torch.autograd.grad(loss, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(loss, logits)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_makes_the_loss_one_that_is_none(bad):
    logits = torch.zeros(1, 40)
    logits[0, 33] = bad
    assert not torch.isfinite(cross_entropy_sum(logits, torch.zeros(1, dtype=torch.int64)))
