"""Laws of the pass of one more token: the logits of a whole pass, for any model, type, number of texts and threads."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from hpcllm.codecs.kernels import array_of, kernel
from hpcllm.config.schema import AdapterConfig
from hpcllm.model import token_pass
from hpcllm.model.few_rows import add_product
from hpcllm.model.initialisation import allocate, build
from hpcllm.model.paged_cache import BlockPool, PagedCache, blocks_for, side_by_side
from hpcllm.model.shapes import UnshardHooks, split_layers
from hpcllm.model.token_kernels import X_BYTES
from hpcllm.model.token_pass import TokenPass, suits
from tests.model.variants import VARIANTS, random_tokens, stirred, whole

pytestmark = pytest.mark.timeout(600)  # the first test of a kind waits for its kernels to be compiled
FINENESS = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def passes(decoders, tokens):
    """Results (B, T, V) of rows of tokens that go through the stages one token at a time; blocks by turns."""
    rows, pool = len(tokens), BlockPool(len(tokens) * blocks_for(tokens.shape[1]))
    stages = []
    for decoder in decoders:
        model = decoder.model
        shape = pool.blocks, model.key_value_heads, model.head_dim
        cache = PagedCache(map(int, decoder.blocks), *shape, torch.empty(0, dtype=decoder.dtype))
        stages.append(TokenPass(decoder, cache))
    tables: list[list[int]] = [[] for _ in range(rows)]
    found = []
    for place in range(tokens.shape[1]):
        assert all(pool.grow(table, place + 1) for table in tables)
        x = tokens[:, place]
        for stage in stages:
            x = stage.run(x, side_by_side(tables), np.full(rows, place))
        found.append(x)
    return torch.stack(found, 1)


def assert_same(got, want):
    bound = FINENESS[want.dtype]
    close = {"rtol": bound, "atol": bound * float(want.abs().max())}
    torch.testing.assert_close(got, want.float(), **close)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("texts", [1, 6])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_a_whole_pass(name, texts):
    model = VARIANTS[name]
    decoder = stirred(build(model, whole(model), seed=2))
    tokens = random_tokens(model, texts, model.max_sequence)
    with torch.no_grad():
        assert_same(passes([decoder], tokens), decoder(tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_numbers_of_16_bit_are_widened(dtype):
    model = VARIANTS["qwen"]
    decoder = stirred(build(model, whole(model), seed=2, dtype=dtype))
    tokens = random_tokens(model, 2, model.max_sequence)
    with torch.no_grad():
        assert_same(passes([decoder], tokens), decoder(tokens))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_hand_on_hidden_states(stages):
    model = VARIANTS["gpt2"]
    parts = [stirred(build(model, span, seed=2)) for span in split_layers(model, stages)]
    tokens = random_tokens(model, 5, 9)
    with torch.no_grad():
        assert_same(passes(parts, tokens), stirred(build(model, whole(model), seed=2))(tokens))


def test_weights_may_change_between_passes():
    model = VARIANTS["llama"]
    decoder, tokens = build(model, whole(model), seed=2), random_tokens(model, 2, 1)
    cache = PagedCache(range(4), 2, model.key_value_heads, model.head_dim, torch.empty(0))
    made = TokenPass(decoder, cache)
    with torch.no_grad():
        for factor in (1, 3):
            for weight in decoder.parameters():
                weight.mul_(factor)
            assert_same(made.run(tokens[:, 0], np.array([[0], [1]], np.int32), np.zeros(2, int)), decoder(tokens)[:, 0])


def test_what_it_cannot_do_is_left_to_the_decoder():
    model, class_of_others = VARIANTS["llama"], type("Gathers", (UnshardHooks,), {})
    plain = build(model, whole(model), seed=2)
    assert suits(plain)
    assert not suits(allocate(model, whole(model), adapter=AdapterConfig(rank=2)))
    assert not suits(allocate(model, whole(model), device=torch.device("meta")))
    plain.unshard_hooks = class_of_others()
    assert not suits(plain)


def test_an_interruption_leaves_no_thread_waiting(monkeypatch):
    """One thread never begins; the others must not wait for it, and the next pass goes well."""
    model = VARIANTS["llama"]
    decoder, tokens = stirred(build(model, whole(model), seed=2)), random_tokens(model, 2, 3)
    before, run_layers = torch.get_num_threads(), token_pass.run_layers

    def interrupted(thread, *rest):
        if thread == 0:
            raise KeyboardInterrupt
        run_layers(thread, *rest)

    torch.set_num_threads(2)
    monkeypatch.setattr(token_pass, "run_layers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        passes([decoder], tokens)
    monkeypatch.undo()
    with torch.no_grad():
        assert_same(passes([decoder], tokens), decoder(tokens))
    torch.set_num_threads(before)


@kernel
def multiplied(x, weight, scales, bias, first, end, adds, y):
    add_product(x, weight, scales, bias, first, end, adds, y)


KINDS = ["float32", "bf16", "fp16", "int8", "int4"]


def matrix(kind, outputs, inputs, made):
    """A weight as kernels take it, its scales, its bias, and its values in float64."""
    if kind in ("float32", "bf16", "fp16"):
        dtype = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
        values, bias = (torch.from_numpy(made.normal(size=size)).to(dtype) for size in ((outputs, inputs), outputs))
        no_scales = np.empty((outputs, 0), "f4")
        return array_of(values), no_scales, array_of(bias), values.double().numpy(), bias.double().numpy()
    codes, groups = made.integers(-7, 8, (outputs, inputs)), 1 if kind == "int8" else inputs // 64
    scales, bias = made.random((outputs, groups), dtype="f4"), made.normal(size=outputs).astype("f4")
    weight = codes.astype("i1") if kind == "int8" else (codes[:, ::2] + 8 | codes[:, 1::2] + 8 << 4).astype("u1")
    return weight, scales, bias, codes * scales.repeat(inputs // groups, 1).astype(float), bias


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 7, 64), (3, 4, 128), (4, 9, 192), (11, 13, 64), (2, 6, 40), (6, 10, 100)]
)
def test_products_of_few_rows(rows, outputs, inputs, kind):
    """Written or added, of all outputs or a stretch of them; what lies beside it is left alone."""
    if kind == "int4" and inputs % 64:
        pytest.skip("packed rows end with a group")
    made = np.random.default_rng(rows)
    x = torch.from_numpy(made.normal(size=(rows, inputs))).to(torch.bfloat16 if kind == "bf16" else torch.float32)
    x = x.float().numpy()  # what bf16 holds is not rounded
    weight, scales, bias, values, shift = matrix(kind, outputs, inputs, made)
    product = x.astype(float) @ values.T + shift
    for adds in (False, True):
        for first, end in ((0, outputs), (4, outputs), (0, 0)):
            y = made.normal(size=(rows, outputs)).astype("f4")
            want = y.astype(float)
            want[:, first:end] = product[:, first:end] + adds * want[:, first:end]
            multiplied(x, weight, scales, bias, first, end, adds, y)
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("inputs", [64, 100, 512])
def test_a_row_has_the_same_product_whatever_stands_beside_it(inputs, kind):
    made = np.random.default_rng(inputs)
    weight, scales, bias, _, _ = matrix(kind, 14, inputs, made)
    x = made.normal(size=(9, inputs)).astype("f4")
    alone = np.empty((9, 14), "f4")
    for n in range(9):
        multiplied(x[n : n + 1], weight, scales, bias, 0, 14, False, alone[n : n + 1])
    for rows in range(2, 10):
        for first in range(10 - rows):
            together = np.empty((rows, 14), "f4")
            multiplied(x[first : first + rows], weight, scales, bias, 0, 14, False, together)
            np.testing.assert_array_equal(together, alone[first : first + rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_text_has_the_same_logits_whatever_texts_stand_beside_it(dtype):
    model = VARIANTS["qwen"]
    decoder = stirred(build(model, whole(model), seed=2, dtype=dtype))
    tokens = random_tokens(model, 6, 9)
    together = passes([decoder], tokens)
    for row in range(6):
        assert torch.equal(passes([decoder], tokens[row : row + 1])[0], together[row])


def test_rows_that_no_cache_holds_are_multiplied_in_parts():
    """More texts than X_BYTES hold: the same logits as a few at a time."""
    model = VARIANTS["llama"]
    texts = X_BYTES // (4 * model.ffn) + 5
    decoder = stirred(build(model, whole(model), seed=2))
    tokens = random_tokens(model, texts, 2)
    together = passes([decoder], tokens)
    assert torch.equal(passes([decoder], tokens[-3:]), together[-3:])
    with torch.no_grad():
        assert_same(together, decoder(tokens))


@pytest.mark.full(reason="compiles for half a minute each")
@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512"])
def test_older_processors(processor):
    """Numba compiles for an older processor, in a process of its own; the products' law holds there."""
    law = f"{__file__}::{test_products_of_few_rows.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", law, "-k", "bf16"]
    done = subprocess.run(command, env=os.environ | {"NUMBA_CPU_NAME": processor}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
