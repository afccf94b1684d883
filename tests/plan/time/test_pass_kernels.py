"""Kernels of a pass: their products are the model's own FLOPs in any layout; what they move follows the layout."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from hpcllm.model.shapes import flops_per_token, parameter_shapes
from hpcllm.plan.layouts import parse_layout
from hpcllm.plan.models import Model, read_model
from hpcllm.plan.time import kernels
from hpcllm.plan.time.kernels import Kernels, Microbatch, Stream, microbatch_of

MODELS = (
    "layers=4,hidden=512,heads=8,ffn=2048,vocab=4096,sequence=256",
    "layers=3,hidden=1024,heads=16,kv_heads=4,ffn=2816,vocab=32000,sequence=512,gated=true",
    "layers=2,hidden=768,heads=12,ffn=3072,vocab=50304,sequence=128,positions=rotary,parallel_residual=true",
    "layers=5,hidden=640,heads=10,ffn=2560,vocab=1024,sequence=1024,tied=false,biases=none",
)
LAYOUTS = [
    f"tp={tp},micro_batch={samples},attention={attention},trainer={trainer}"
    for tp, samples, attention, trainer in itertools.product(
        (1, 2), (1, 3), ("flash", "flash1", "materialized", "unfused"), ("megatron", "hpcllm")
    )
]


def of(model: str, layout: str) -> tuple[Model, Microbatch]:
    made = read_model(model)
    return made, microbatch_of(made, parse_layout(layout))


def flops(kernels_of: Kernels) -> float:
    return sum(kernel.flops for kernel in kernels_of if not isinstance(kernel, Stream))


def moved(kernels_of: Kernels) -> float:
    return sum(kernel.moved_bytes for kernel in kernels_of)


@pytest.mark.parametrize("model", MODELS)
def test_products_are_the_flops_of_the_model(model: str) -> None:
    for layout in LAYOUTS:
        _check_flops(*of(model, layout))


def _check_flops(made: Model, b: Microbatch) -> None:
    block, head = kernels.block(b), kernels.head(b)
    parts = [flops(getattr(block, way)) for way in ("forward", "backward", "weight")]
    ends = [flops(getattr(head, way)) for way in ("forward", "backward", "weight")]
    all_of_it = b.tp * (made.shape.layers * sum(parts) + sum(ends))
    assert all_of_it == pytest.approx(b.tokens * flops_per_token(made.shape, made.sequence))
    assert parts[1] + parts[2] == pytest.approx(2 * parts[0])


@pytest.mark.parametrize("model", MODELS)
def test_recomputation_repeats_the_forward_pass_or_attention_and_never_the_head(model: str) -> None:
    for layout in LAYOUTS:
        _check_recompute(*of(model, layout))


def _check_recompute(made: Model, b: Microbatch) -> None:
    none, selective, full = (dataclasses.replace(b, recompute=level) for level in ("none", "selective", "full"))
    attention = 4.0 * b.tokens * made.sequence * made.shape.heads * made.shape.head_dim / b.tp
    assert kernels.block(none).recompute == ()
    assert flops(kernels.block(selective).recompute) == pytest.approx(attention)
    assert kernels.block(full).recompute == kernels.block(full).forward == kernels.block(none).forward
    assert kernels.head(full).recompute == kernels.embedding(full).recompute == ()


@pytest.mark.parametrize("model", MODELS)
def test_scores_in_memory_are_moved_and_more_so_by_separate_operations(model: str) -> None:
    def core(attention: str) -> float:
        piece = kernels.core(of(model, f"attention={attention}")[1])
        return moved(piece.forward + piece.backward)

    assert core("flash") == core("flash1") < core("materialized") < core("unfused")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("trainer", ["megatron", "hpcllm"])
def test_sequence_parallel_spares_streams_alone(model: str, trainer: str) -> None:
    plain, split = (
        kernels.block(of(model, f"tp=2,trainer={trainer},sequence_parallel={sp}")[1]) for sp in ("false", "true")
    )
    assert flops(plain.forward) == flops(split.forward)
    assert moved(split.forward) < moved(plain.forward)
    assert moved(split.backward) < moved(plain.backward)
    assert moved(split.weight) == moved(plain.weight)


def test_a_norm_of_many_kernels_moves_more_than_a_fused_one() -> None:
    fused, apart = (kernels.norm(of(MODELS[1], f"norm={kind}")[1]) for kind in ("fused", "unfused"))
    assert moved(apart.forward + apart.backward) > 5 * moved(fused.forward + fused.backward)


@pytest.mark.parametrize(("precision", "kept"), [("bf16", 0), ("bf16", 2), ("fp16", 0), ("fp16", 4), ("fp32", 0)])
def test_gradients_are_added_in_the_width_that_they_are_kept_in(precision: str, kept: int) -> None:
    b = of(MODELS[0], f"precision={precision},gradient_bytes={kept},trainer=megatron")[1]
    (added,) = [k for k in kernels.linear(b, 8.0, 16.0, 32.0).weight if isinstance(k, Stream)]
    wide = precision == "fp32" or kept == 4 or (precision == "bf16" and kept == 0)
    assert added.values == 16 * 32
    assert added.value_bytes == b.item_bytes + 2 * (4 if wide else b.item_bytes)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", MODELS)
def test_our_products_add_to_sums_and_to_one_another_by_themselves(model: str, precision: str) -> None:
    """Each result is read and written once where it is added: the sum of a weight as float32, an input as an item."""
    made, b = of(model, f"precision={precision},trainer=hpcllm")
    block = kernels.block(b)
    assert all(isinstance(kernel, kernels.Product) for kernel in block.weight)
    results = sum(moved([kernel]) - b.item_bytes * kernel.k * (kernel.m + kernel.n) for kernel in block.weight)
    matrices = {
        name: shape for name, shape in parameter_shapes(made.shape).items() if ".0." in name and len(shape) == 2
    }
    assert results == 8 * sum(math.prod(shape) for shape in matrices.values())
    added = [k for k in block.backward if isinstance(k, kernels.Product) and k.sum_bytes == 2 * b.item_bytes]
    assert len(added) == (3 if made.shape.activation == "swiglu" else 2)  # key, value and up
    assert all(moved([k]) == b.item_bytes * (k.k * (k.m + k.n) + 2 * k.m * k.n) for k in added)
