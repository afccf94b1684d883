"""What the planner lists for a block is what a device is asked for: launches, and the bytes that they move.

Counted on the CPU with emulated kernels, as the difference of models of three and of two blocks, in the second of two
microbatches: gradients are added to sums by then. Fused attention is left out: the CPU's is another than a device's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from emulated import EMULATOR, why_not

from hpcllm.codecs.gpu.launch import LAUNCHERS, launcher_of
from hpcllm.model.initialisation import build
from hpcllm.plan.layouts import parse_layout
from hpcllm.plan.models import Model, read_model
from hpcllm.plan.time import kernels
from hpcllm.plan.time.kernels import Flash, Kernel, Product, microbatch_of
from tests.model.counting import Counting
from tests.model.variants import random_tokens, whole

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
BASE = "hidden=64,heads=4,kv_heads=2,ffn=96,vocab=128,sequence=32,gated=true,tied=false,biases=none"
PRODUCTS = ("mm", "addmm_")
SMALL = 0.03  # share of what is read besides: weights of norms, angles, a number a token


class ByName(Counting):
    """A Launcher too; counts by names of operators and kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.named: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._name = ""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self._name = function._schema.name.removeprefix("aten::")
        return super().__torch_dispatch__(function, types, arguments, options)

    def launch(self, program, kernel, groups, arguments):
        self._name = f"{program.names[-1]} {kernel}"
        self.count(arguments)
        EMULATOR.launch(program, kernel, groups, arguments)

    def count(self, values) -> None:
        before = self.moved_bytes
        super().count(values)
        self.named[self._name] += 1
        self.bytes[self._name] += self.moved_bytes - before


class Sums:
    """GradientSums without hooks."""

    def __init__(self) -> None:
        self.totals: dict[torch.Tensor, torch.Tensor] = {}

    def total(self, parameter):
        begun = parameter in self.totals
        return self.totals.setdefault(parameter, torch.empty(parameter.shape)), begun

    def added(self, parameter) -> None:
        pass


@pytest.fixture(autouse=True)
def forget_launchers():
    yield
    launcher_of.cache_clear()


def counted(layers: int, keys: str, recompute: str, monkeypatch) -> ByName:
    """Count the second microbatch of a model: kernels and operators of both passes."""
    made = model_of(layers, keys)
    decoder = build(made.shape, whole(made.shape), seed=0)
    decoder.recompute = recompute
    decoder.gradient_sums = Sums()
    tokens = random_tokens(made.shape, 2, made.sequence + 1)
    for _ in range(2):
        counting = ByName()
        monkeypatch.setitem(LAUNCHERS, "cpu", lambda found=counting: found)
        launcher_of.cache_clear()
        for parameter in decoder.parameters():  # norms, whose gradients autograd brings
            parameter.grad = None
        with counting:
            decoder.nats(decoder.hidden_states(tokens[:, :-1]), tokens[:, 1:]).sum().backward()
    return counting


def model_of(layers: int, keys: str) -> Model:
    return read_model(f"layers={layers},{BASE}{keys}")


def listed(keys: str, recompute: str) -> list[Kernel]:
    layout = parse_layout(f"micro_batch=2,trainer=hpcllm,precision=fp32,recompute={recompute}")
    piece = kernels.block(microbatch_of(model_of(3, keys), layout))
    every = (*piece.forward, *piece.backward, *piece.weight, *piece.recompute)
    return [kernel for kernel in every if kernel.moved_bytes and not isinstance(kernel, Flash)]


def total(found: Sequence[Kernel]) -> tuple[int, float]:
    return sum(getattr(kernel, "launches", 1) for kernel in found), sum(kernel.moved_bytes for kernel in found)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("keys", ["", ",parallel_residual=true"])
def test_a_block_is_listed_as_it_is_launched(keys, recompute, monkeypatch):
    two, three = (counted(layers, keys, recompute, monkeypatch) for layers in (2, 3))
    named, moved = three.named - two.named, three.bytes - two.bytes
    of_products = {name for name in named if name in PRODUCTS}
    others = {name for name in named if name not in of_products and "attention" not in name}
    all_listed = listed(keys, recompute)
    for names, kind in ((of_products, True), (others, False)):
        launches, bytes_ = total([kernel for kernel in all_listed if isinstance(kernel, Product) == kind])
        assert sum(named[name] for name in names) == launches, named
        assert 1 - 1e-9 <= sum(moved[name] for name in names) / bytes_ <= 1 + SMALL, moved
