"""Text from a checkpoint: whole characters, the same for the same seed, and mistakes said before the first word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcllm.checkpoint.state import RunState, save
from hpcllm.config import ModelConfig, from_tables, to_tables
from hpcllm.data import tokenizer as bpe
from hpcllm.errors import CheckpointError, ConfigError, DataError
from hpcllm.generate import continue_prompt
from hpcllm.model.initialisation import build
from hpcllm.model.shapes import split_layers

TOKENIZER = bpe.train(["abc"], 257)  # every byte is a token of its own, so a character takes up to four
ENCODER = bpe.Encoder(TOKENIZER)
CYCLE = "é🚀中a"  # no two of its bytes are equal, so each byte has one successor


def checkpoint_of(folder: Path, model: ModelConfig, weights=None, tokenizer: str = TOKENIZER) -> Path:
    """A checkpoint written by this process alone; `weights` changes the decoder's parameters in place."""
    decoder = build(model, split_layers(model, 1)[0], seed=4)
    if weights:
        with torch.no_grad():
            weights(dict(decoder.named_parameters()))
    parameters = {name: p.detach() for name, p in decoder.named_parameters()}
    zeros = {name: torch.zeros_like(p) for name, p in parameters.items()}
    tables = to_tables(from_tables({"data": {"sequence_length": 8}}))
    state = RunState(
        step=1,
        position=0,
        config=tables | {"model": {k: getattr(model, k) for k in tables["model"]}},
        parameters=parameters,
        exp_avg=zeros,
        exp_avg_sq=zeros,
        owned=frozenset(parameters),
        tokenizer_json=tokenizer,
        mesh={"dp": 1, "pp": 1, "tp": 1},
    )
    return save(folder, state, MPI.COMM_SELF, 0, 1).path


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> Path:
    model = ModelConfig(layers=1, hidden=8, heads=2, ffn=8, vocabulary=300, max_sequence=16)
    return checkpoint_of(tmp_path_factory.mktemp("a model"), model)


@pytest.fixture(scope="module")
def cycling_model(tmp_path_factory) -> Path:
    """A decoder whose likeliest next token is the next byte of CYCLE: layers that add nothing, a head that looks up."""
    size = ENCODER.vocabulary
    model = ModelConfig(
        layers=1, hidden=2 * size, heads=1, ffn=4, vocabulary=size, max_sequence=8, tied=False, biases="none",
        norm="rmsnorm", positions="rotary", activation="gelu",
    )  # fmt: skip
    ids = ENCODER.encode([CYCLE])[0].tolist()[:-1]

    def look_up(parameters) -> None:
        for p in parameters.values():
            if p.dim() > 1:
                p.zero_()
        parameters["embedding.weight"][:, :size] = torch.eye(size)
        for token, following in zip(ids, [*ids[1:], ids[0]], strict=True):
            parameters["head.weight"][following, token] = 1.0

    return checkpoint_of(tmp_path_factory.mktemp("cycle"), model, look_up)


def text(path: Path, prompt: str = "a", tokens: int = 20, temperature=1.0, top_k=0, seed=0) -> str:
    return "".join(continue_prompt(path, prompt, tokens, temperature, top_k, seed))


def test_characters_of_many_tokens_come_out_whole(cycling_model):
    endless = (CYCLE * 3).encode()
    for tokens in range(25):
        pieces = list(continue_prompt(cycling_model, "a", tokens, 0.0, 0, 0))
        assert "".join(pieces) == endless[:tokens].decode(errors="replace")
        assert "\ufffd" not in "".join(pieces[:-1])  # only the end can cut a character


def test_same_seed_same_text_and_another_seed_another(random_model):
    texts = [text(random_model, tokens=40, seed=seed) for seed in (0, 1, 2)]
    assert [text(random_model, tokens=40, seed=seed) for seed in (0, 1, 2)] == texts
    assert len(set(texts)) == 3


def test_temperature_0_knows_no_seed(random_model):
    assert len({text(random_model, temperature=0.0, seed=seed) for seed in range(4)}) == 1


def test_no_draw_falls_outside_the_tokenizer(random_model):
    """The model has 300 rows, the tokenizer fewer: 40 seeds of 40 tokens would meet the rest for certain."""
    assert ENCODER.vocabulary < 300
    for seed in range(40):
        assert isinstance(text(random_model, tokens=40, temperature=100.0, seed=seed), str)


def test_an_empty_prompt_begins_a_new_text(cycling_model):
    assert isinstance(text(cycling_model, prompt="", tokens=3), str)


def test_a_prompt_longer_than_the_window_is_continued(cycling_model):
    assert text(cycling_model, prompt=CYCLE * 10, tokens=10, temperature=0.0) == CYCLE


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"temperature": -1.0}, "temperature"), ({"temperature": np.nan}, "temperature"), ({"top_k": -1}, "top_k")],
)
def test_settings_out_of_range_are_refused(random_model, settings, said):
    with pytest.raises(ConfigError, match=said):
        text(random_model, **settings)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_out_of_range_is_refused(random_model, seed):
    with pytest.raises(ConfigError, match="seed"):
        continue_prompt(random_model, "a", 1, 1.0, 0, seed)


def test_a_prompt_that_is_not_utf8_is_refused(random_model):
    with pytest.raises(DataError, match="UTF-8"):
        continue_prompt(random_model, b"ab\xff".decode("utf-8", "surrogateescape"), 1, 1.0, 0, 0)


def test_mistakes_are_said_before_the_first_piece_is_asked_for(tmp_path, random_model):
    missing = tmp_path / "no such.h5"
    with pytest.raises(DataError, match="no such"):
        continue_prompt(missing, "a", 1, 1.0, 0, 0)
    damaged = tmp_path / "damaged.h5"
    content = bytearray(random_model.read_bytes())
    content[100] ^= 1  # in the block that guards all tables
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        continue_prompt(damaged, "a", 1, 1.0, 0, 0)


def test_a_checkpoint_without_a_tokenizer_cannot_be_asked(tmp_path):
    model = ModelConfig(layers=1, hidden=8, heads=2, ffn=8, vocabulary=50, max_sequence=16)
    path = checkpoint_of(tmp_path, model, tokenizer="")
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        continue_prompt(path, "a", 1, 1.0, 0, 0)
