"""A score is that of the request alone: whatever it is batched with, and whoever shares the work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from hpcllm.collectives import group_of
from hpcllm.config.schema import MeshConfig
from hpcllm.errors import DataError, NonFiniteError
from hpcllm.evaluation import scoring
from hpcllm.evaluation.batches import Request, batches_of_requests, check_lengths
from hpcllm.evaluation.scoring import Score, Scorer
from hpcllm.model.initialisation import build
from hpcllm.model.shapes import split_layers
from hpcllm.model.tensor_parallel import tensor_parallel
from hpcllm.mpi.mesh import open_mesh
from tests.model.variants import VARIANTS, whole

tokens = st.lists(st.integers(0, 40), min_size=1, max_size=30).map(tuple)
some_requests = st.lists(st.builds(Request, tokens, tokens), min_size=1, max_size=20)


def requests_for(model, count: int = 37, seed: int = 0) -> list[Request]:
    """Requests of many lengths, some longer than the model reads, some with the input of another."""
    draw = np.random.default_rng(seed)

    def text(most: int) -> tuple[int, ...]:
        return tuple(draw.integers(0, model.vocabulary, draw.integers(1, most)).tolist())

    found = [Request(text(2 * model.max_sequence), text(model.max_sequence)) for _ in range(count)]
    siblings = [Request(r.context, (*r.continuation[:-1], (r.continuation[-1] + 1) % model.vocabulary)) for r in found]
    return [each for pair in zip(found, siblings, strict=True) for each in pair]


def sharp(decoder):
    """Make logits differ by much, so that rounding decides nothing."""
    with torch.no_grad():
        for p in decoder.parameters():
            if p.dim() > 1:
                p *= 8
    return decoder


def alone(decoder, request: Request) -> Score:
    """Score by one pass over the text, straight from its logits."""
    most, n = decoder.model.max_sequence, len(request.continuation)
    inputs = torch.tensor([(request.context + request.continuation)[-(most + 1) : -1]])
    with torch.no_grad():
        logits = decoder(inputs)[0, -n:].double()
    targets = torch.tensor(request.continuation)
    nats = functional.cross_entropy(logits, targets, reduction="sum").item()
    return Score(nats, bool((logits.argmax(-1) == targets).all()))


def scores(scorer: Scorer, requests: list[Request], batch_tokens: int) -> list[Score]:
    batches = batches_of_requests(requests, scorer.model.max_sequence, batch_tokens)
    return scorer.scores(batches, len(requests))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch_tokens", [1, 50, 4096])
def test_a_batch_changes_no_score(variant, batch_tokens, monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 7 * VARIANTS[variant].vocabulary)
    decoder = sharp(build(VARIANTS[variant], whole(VARIANTS[variant]), seed=1))
    requests = requests_for(decoder.model)
    found = scores(Scorer([decoder]), requests, batch_tokens)
    wanted = [alone(decoder, request) for request in requests]
    np.testing.assert_allclose([s.nats for s in found], [s.nats for s in wanted], rtol=1e-4)
    assert [s.is_greedy for s in found] == [s.is_greedy for s in wanted]


def test_greedy_is_what_greedy_generation_writes():
    model = VARIANTS["llama"]
    decoder, draw = sharp(build(model, whole(model), seed=2)), np.random.default_rng(3)
    requests, wanted = [], []
    for _ in range(20):
        text = tuple(draw.integers(0, model.vocabulary, 4).tolist())
        made = list(text)
        for _ in range(5):
            with torch.no_grad():
                made.append(int(decoder(torch.tensor([made]))[0, -1].argmax()))
        wrong = int(draw.integers(0, 6))  # 5: nothing is wrong
        answer = [(t + (place == wrong)) % model.vocabulary for place, t in enumerate(made[4:])]
        requests.append(Request(text, tuple(answer)))
        wanted.append(wrong == 5)
    assert [score.is_greedy for score in scores(Scorer([decoder]), requests, 64)] == wanted
    assert True in wanted
    assert False in wanted


@given(some_requests, st.integers(1, 300), st.integers(30, 60))
@settings(max_examples=60)
def test_batches_hold_each_target_once_behind_the_tokens_before_it(requests, batch_tokens, max_sequence):
    seen: dict[int, list[tuple[int, int]]] = {}
    for batch in batches_of_requests(requests, max_sequence, batch_tokens):
        rows, longest = batch.inputs.shape
        assert rows == 1 or rows * longest <= batch_tokens
        assert longest <= max_sequence
        for place, target, owner in zip(batch.places, batch.targets, batch.owners, strict=True):
            seen.setdefault(int(owner), []).append((int(batch.inputs.ravel()[place]), int(target)))
    assert sorted(seen) == list(range(len(requests)))
    for number, (context, continuation) in enumerate(requests):
        before = (context + continuation)[-len(continuation) - 1 : -1]
        assert seen[number] == list(zip(before, continuation, strict=True))


@given(some_requests, st.integers(1, 300), st.randoms())
@settings(max_examples=30)
def test_rows_of_batches_do_not_depend_on_the_order_of_the_list(requests, batch_tokens, random):
    shuffled = random.sample(requests, len(requests))
    one, other = (batches_of_requests(each, 60, batch_tokens) for each in (requests, shuffled))
    assert [batch.inputs.tolist() for batch in one] == [batch.inputs.tolist() for batch in other]


def test_a_continuation_longer_than_the_model_reads_is_rejected():
    check_lengths([Request((1,), (2,) * 5)], 5)
    with pytest.raises(DataError, match="6 tokens; valid: up to 5"):
        check_lengths([Request((1,), (2,) * 6)], 5)


def part_of(model, mesh):
    """This rank's part of the weights that one process has."""
    return build(model, split_layers(model, mesh.pp.size)[mesh.pp.rank], 1, tensor_parallel(group_of(mesh.tp)))


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_scores_have_the_same_bits_on_any_number_of_replicas(comm, count):
    model = VARIANTS["qwen"]
    decoder, requests = build(model, whole(model), seed=1), requests_for(model)[:count]
    wanted = scores(Scorer([decoder]), requests, 64)
    with open_mesh(comm, MeshConfig(dp=comm.size)) as mesh:
        assert scores(Scorer([decoder], mesh), requests, 64) == wanted


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("variant", ["gpt2", "grouped, tied"])
def test_ranks_that_share_a_model_agree_to_rounding(comm, variant):
    model = VARIANTS[variant]
    requests = requests_for(model)
    wanted = scores(Scorer([build(model, whole(model), seed=1)]), requests, 64)
    for tp, pp in ((2, comm.size // 2), (1, 2), (2, 1)):
        with open_mesh(comm, MeshConfig(dp=comm.size // tp // pp, tp=tp, pp=pp)) as mesh:
            found = scores(Scorer([part_of(model, mesh)], mesh), requests, 64)
        np.testing.assert_allclose([s.nats for s in found], [s.nats for s in wanted], rtol=1e-6)
        assert [s.is_greedy for s in found] == [s.is_greedy for s in wanted]


@pytest.mark.parallel([1, 3])
def test_weights_that_are_no_numbers_are_said_on_all_ranks(comm):
    model = VARIANTS["llama"]
    decoder = build(model, whole(model), seed=1)
    with torch.no_grad():
        decoder.head.weight[3, 0] = float("nan")
    with open_mesh(comm, MeshConfig(dp=comm.size)) as mesh, pytest.raises(NonFiniteError, match="not finite"):
        scores(Scorer([decoder], mesh), requests_for(model)[:2], 64)
