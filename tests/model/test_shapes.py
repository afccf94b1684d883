"""Stages make up the model, and what is counted is what the network holds and computes."""

from __future__ import annotations

import itertools
import math

import pytest
from torch.utils.flop_counter import FlopCounterMode

from hpcllm.config.schema import ModelConfig
from hpcllm.model.initialisation import allocate, build
from hpcllm.model.loss import cross_entropy_sum
from hpcllm.model.shapes import flops_per_token, head_in_blocks, parameter_count, parameter_shapes, split_layers
from tests.model.variants import VARIANTS, random_tokens, whole


def slowest(sizes: list[int], head: float) -> float:
    return max([*sizes[:-1], sizes[-1] + head])


@pytest.mark.parametrize("vocabulary", [16, 1000, 6000])
def test_stages_are_contiguous_and_no_other_cut_is_faster(vocabulary):
    for layers in range(1, 10):
        model = ModelConfig(layers=layers, hidden=64, ffn=96, vocabulary=vocabulary, max_sequence=8)
        for stages in range(1, layers + 1):
            spans = split_layers(model, stages)
            blocks = [block for span in spans for block in range(span.first_block, span.last_block)]
            assert blocks == list(range(layers))
            sizes = [span.last_block - span.first_block for span in spans]
            assert min(sizes) >= 1
            assert [span.has_embedding for span in spans] == [stage == 0 for stage in range(stages)]
            assert [span.has_head for span in spans] == [stage == stages - 1 for stage in range(stages)]
            cuts = itertools.combinations(range(1, layers), stages - 1)
            others = [[end - start for start, end in itertools.pairwise((0, *cut, layers))] for cut in cuts]
            head = head_in_blocks(model)
            assert slowest(sizes, head) == min(slowest(other, head) for other in others)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_hold_the_whole_model_once_but_for_a_tied_embedding(name, stages):
    model = VARIANTS[name]
    parts = [parameter_shapes(model, span) for span in split_layers(model, stages)]
    assert {key: shape for part in parts for key, shape in part.items()} == parameter_shapes(model)
    copies = [key for part in parts for key in part]
    twice = {key for key in copies if copies.count(key) > 1}
    assert twice == ({"embedding.weight"} if model.tied and stages > 1 else set())


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_counted_as_the_network_has_them(name):
    model = VARIANTS[name]
    assert parameter_count(model) == sum(p.numel() for p in allocate(model, whole(model)).parameters())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [5, 16])
def test_flops_of_matrices_are_those_that_pytorch_counts(name, length):
    """6 a weight; of attention the counter sees what the kernel in use declares, so it is left out on both sides."""
    model, batch = VARIANTS[name], 2
    decoder = build(model, whole(model), seed=0)
    tokens = random_tokens(model, batch, length)
    with FlopCounterMode(display=False) as counter:
        cross_entropy_sum(decoder(tokens), tokens).backward()
    products = {"aten.mm", "aten.addmm"}
    counted = sum(n for kind, n in counter.get_flop_counts()["Global"].items() if str(kind) in products)
    attention = 12.0 * model.layers * model.heads * model.head_dim * length
    assert flops_per_token(model, length) - attention == counted / (batch * length)


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_grows_with_the_length_and_nothing_else_does(name):
    model = VARIANTS[name]
    slope = 12 * model.layers * model.heads * model.head_dim
    for length in (1, 64, 4096):
        assert math.isclose(flops_per_token(model, length) - flops_per_token(model, 0), slope * length)
