"""Laws of making many texts at once: each is what it would be alone, whatever else is made, where, and in what room."""

from __future__ import annotations

import pytest
import torch

from hpcllm.collectives import group_of
from hpcllm.config.schema import MeshConfig, ModelConfig
from hpcllm.errors import ConfigError, NonFiniteError, UserError
from hpcllm.inference import complete
from hpcllm.inference.batch import Request, in_order
from hpcllm.inference.cached_model import block_bytes
from hpcllm.inference.complete import BatchSettings, generate_batch, make_batch
from hpcllm.model.initialisation import build
from hpcllm.model.paged_cache import blocks_for
from hpcllm.model.sampling import Sampling, seed_of
from hpcllm.model.shapes import split_layers
from hpcllm.model.tensor_parallel import tensor_parallel
from hpcllm.mpi.mesh import open_mesh
from tests.model.variants import VARIANTS, cached_logits, random_tokens, whole

GREEDY, DRAWN = Sampling(temperature=0.0), Sampling(temperature=1.5, top_k=20)
LONG = ModelConfig(
    layers=2, hidden=24, heads=4, kv_heads=2, ffn=32, vocabulary=61, max_sequence=96, positions="rotary",
    norm="rmsnorm", activation="swiglu", biases="none", tied=False,
)  # fmt: skip


def sharp(model: ModelConfig, span=None, tp=None):
    """A model whose answers depend on the context, and whose logits lie so far apart that rounding decides nothing."""
    decoder = build(model, span or whole(model), seed=2, **({"tp": tp} if tp else {}))
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.dim() == 2:
                weight *= 20
    return decoder


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def decoder(request):
    return sharp(request.param)


def requests(count: int, longest: int, vocabulary: int = 61) -> list[Request]:
    """Prompts of unequal lengths, 1 to longest tokens."""
    generator = torch.Generator().manual_seed(9)
    lengths = [1 + (7 * index + index * index) % longest for index in range(count)]
    return [
        Request(torch.randint(vocabulary, (length,), generator=generator).tolist(), seed_of(0, index))
        for index, length in enumerate(lengths)
    ]


def made(decoder, asked, sampling=DRAWN, tokens=12, mesh=None, is_over=lambda _: False, **settings):
    texts = generate_batch(decoder, asked, sampling, BatchSettings(tokens, **settings), 61, mesh, is_over)
    return [(text.tokens, text.reason) for text in in_order(texts)]


def alone(decoder, asked, **more):
    return [made(decoder, [one], **more)[0] for one in asked]


def contexts(prompt, tokens, window):
    """What each token is drawn from: all that was read since the cache was last full."""
    start = max(0, len(prompt) - window)
    for end in range(len(prompt), len(prompt) + len(tokens)):
        if end - start > window:
            start = end - max(window // 2, 1)
        yield [*prompt, *tokens][start:end]


def test_cached_logits_are_those_of_a_whole_pass(decoder):
    """However the tokens are cut: each new piece sees those before it, and nothing else has changed."""
    model = decoder.model
    tokens = random_tokens(model, 3, model.max_sequence, seed=3)
    with torch.no_grad():
        want = decoder(tokens)
    for lengths in ([1] * model.max_sequence, [5, 1, 1, 3, 7], [16, 1], [1, 16], [17]):
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        cuts = list(zip([0, *ends[:-1]], ends, strict=True))
        close = {"rtol": 1e-5, "atol": 1e-5 * float(want.abs().max())}
        torch.testing.assert_close(cached_logits(decoder, tokens, cuts), want, **close)


@pytest.mark.parametrize("longest", [5, 40], ids=["short", "longer than the window"])
def test_temperature_zero_is_the_argmax_of_what_was_read(decoder, longest):
    asked = requests(5, longest)
    for request, (tokens, _) in zip(asked, made(decoder, asked, GREEDY, tokens=40), strict=True):
        assert len(tokens) == 40 > 2 * decoder.model.max_sequence  # the window is full more than once
        for token, context in zip(tokens, contexts(request.prompt, tokens, decoder.model.max_sequence), strict=True):
            with torch.no_grad():
                assert token == decoder(torch.tensor([context]))[0, -1, :61].argmax()


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, Sampling(1.0, 0, 0.9, 0.01, 1.2)], ids=["greedy", "k", "p"])
@pytest.mark.parametrize("texts", [1, 3, 50])
def test_a_text_does_not_depend_on_those_beside_it(sampling, texts):
    decoder, asked = sharp(LONG), requests(12, 60)
    assert made(decoder, asked, sampling, texts=texts) == alone(decoder, asked, sampling=sampling)


def logits_of(decoder, asked, tokens=12, **settings):
    """Logits that each token of each text was chosen from, and the tokens: (text, place) -> ..."""
    logits, chosen = {}, {}

    def observe(found, texts, drawn):
        for row, text, token in zip(found, texts, drawn, strict=True):
            logits[text.index, len(text.tokens)], chosen[text.index, len(text.tokens)] = row.clone(), token

    batch = make_batch(decoder, asked, GREEDY, BatchSettings(tokens, **settings), 61, observe=observe)
    while not batch.is_done:
        batch.step()
    return logits, chosen


@pytest.mark.parametrize("texts", [2, 3, 16, 33])
def test_logits_of_a_batch_are_those_of_each_text_alone(decoder, texts):
    """To 2e-5 of the largest; the likeliest tokens are the same wherever the two likeliest ones lie further apart."""
    asked = requests(texts, 20)
    logits, chosen = logits_of(decoder, asked, texts=texts)
    compared = 0
    for index, request in enumerate(asked):
        single, token = logits_of(decoder, [request])
        for place in range(12):
            here, there = logits[index, place], single[0, place]
            most = 2e-5 * float(there.abs().max())
            assert (here - there).abs().max() <= most
            first, second = there[:61].topk(2).values
            compared += 1
            if first - second > 2 * most:
                assert chosen[index, place] == token[0, place]
            elif chosen[index, place] != token[0, place]:
                break  # from here on they have read different texts
    assert compared > 10 * texts


def test_logits_of_a_batch_are_as_near_as_1e_5_for_weights_as_they_begin():
    """The sharp weights above are 20 times as large, which rounding feels."""
    decoder, asked = build(LONG, whole(LONG), seed=2), requests(16, 20)
    logits, _ = logits_of(decoder, asked, texts=16)
    for index, request in enumerate(asked):
        single, _ = logits_of(decoder, [request])
        there = single[0, 0]
        assert (logits[index, 0] - there).abs().max() <= 1e-5 * float(there.abs().max())


@pytest.mark.parametrize("spare_blocks", [0, 2, 9])
def test_little_room_changes_no_text_and_is_never_exceeded(spare_blocks):
    """The youngest texts give way and are read again: here there is room for one and a little."""
    decoder, asked = sharp(LONG), requests(12, 60)
    least = blocks_for(max(len(one.prompt) for one in asked) + 30)
    room = (least + spare_blocks) * block_bytes(decoder)
    assert made(decoder, asked, tokens=30, cache_bytes=room) == alone(decoder, asked, tokens=30)
    batch = make_batch(decoder, asked, DRAWN, BatchSettings(30, cache_bytes=room), 61)
    while not batch.is_done:
        batch.step()
    assert batch.pool.most_used <= batch.pool.blocks == least + spare_blocks
    assert batch.pool.free == batch.pool.blocks  # all of them came back


def test_a_cache_without_room_for_the_longest_text_is_rejected_with_what_would_do():
    decoder = sharp(LONG)
    with pytest.raises(ConfigError, match=r"has room for 16 tokens .* the longest text can have 42; valid: 1 MiB"):
        made(decoder, [Request([1] * 30, 0)], cache_bytes=block_bytes(decoder))


def test_a_thousand_prompts_take_the_memory_of_a_few():
    """A cache of 40 blocks serves prompts of 1 to 80 tokens; a text that ends makes room for the next at once."""
    decoder, asked = sharp(LONG), requests(1000, 80)
    batch = make_batch(decoder, asked, GREEDY, BatchSettings(4, texts=8, cache_bytes=40 * block_bytes(decoder)), 61)
    memory = [layer.data_ptr() for layer in batch.model.cache.memory.values()]
    ended, at_once, passes = [], [], 0
    while not batch.is_done:
        stepped = batch.step()
        at_once.append(len(stepped))
        ended += [text.index for text in stepped if text.reason]
        passes += 1
    assert sorted(ended) == list(range(1000))
    assert max(at_once) == 8
    assert passes < 1000 * 4 / 3  # alone each would take four
    assert batch.pool.most_used <= 40
    assert memory == [layer.data_ptr() for layer in batch.model.cache.memory.values()]
    assert sum(layer.nbytes for layer in batch.model.cache.memory.values()) == 40 * block_bytes(decoder)


def test_stops_end_a_text_before_they_are_part_of_it():
    decoder, asked = sharp(LONG), requests(6, 20)
    free = [tokens for tokens, _ in made(decoder, asked, tokens=20)]
    stop = free[0][5]
    for tokens, (cut, reason) in zip(free, made(decoder, asked, tokens=20, stops=frozenset({stop})), strict=True):
        end = tokens.index(stop) if stop in tokens else 20
        assert (cut, reason) == (tokens[:end], "stop" if stop in tokens else "length")
    short = made(decoder, asked, tokens=20, is_over=lambda text: len(text.tokens) == 7)
    for tokens, (cut, reason) in zip(free, short, strict=True):
        assert (cut, reason) == (tokens[:7], "stop")


def test_nothing_to_make_and_nobody_to_make_it_for():
    decoder = sharp(LONG)
    assert made(decoder, requests(3, 9), tokens=0) == [([], "length")] * 3
    assert made(decoder, []) == []


def test_caller_keeps_its_prompt_and_gradients():
    prompt = [1, 2, 3]
    made(sharp(LONG), [Request(prompt, 0)])
    assert prompt == [1, 2, 3]
    assert torch.ones(1, requires_grad=True).exp().requires_grad


@pytest.mark.parametrize("wrong", [{"texts": 0}, {"tokens": -1}, {"prompt": []}, {"prompt": [61]}])
def test_mistakes_are_said_before_the_first_text(wrong):
    prompt = wrong.pop("prompt", [1])
    with pytest.raises(UserError):
        generate_batch(sharp(LONG), [Request(prompt, 0)], GREEDY, BatchSettings(**wrong), 61)


def part_of(model: ModelConfig, mesh):
    span = split_layers(model, mesh.pp.size)[mesh.pp.rank]
    return sharp(model, span, tensor_parallel(group_of(mesh.tp)))


LAYOUTS = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 3: [(3, 1, 1)], 4: [(2, 2, 1), (2, 1, 2), (1, 2, 2)]}


@pytest.mark.parallel([1, 2, 3, 4])
def test_every_layout_makes_the_same_texts(comm, monkeypatch):
    monkeypatch.setattr(complete, "ROUND_PASSES", 5)
    asked = requests(7, 60)
    want = made(sharp(LONG), asked)
    for dp, pp, tp in LAYOUTS[comm.size]:
        with open_mesh(comm, MeshConfig(dp=dp, pp=pp, tp=tp)) as mesh:
            decoder = part_of(LONG, mesh)
            assert made(decoder, asked, mesh=mesh) == want, (dp, pp, tp)
            room = 7 * block_bytes(decoder)
            assert made(decoder, asked, mesh=mesh, cache_bytes=room) == want, (dp, pp, tp)


@pytest.mark.parallel([2])
def test_logits_that_are_no_numbers_are_said_on_all_ranks(comm):
    for pp, tp in ((2, 1), (1, 2)):
        with open_mesh(comm, MeshConfig(dp=1, pp=pp, tp=tp)) as mesh:
            decoder = part_of(LONG, mesh)
            with torch.no_grad():
                next(decoder.parameters()).fill_(float("nan"))
            with pytest.raises(NonFiniteError, match="not finite"):
                made(decoder, requests(3, 9), mesh=mesh)
