"""Compiled blocks: the values of plain ones to rounding; refused before any work where that cannot be."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from hpcllm.checkpoint.huggingface.architectures import canonical
from hpcllm.config.schema import ModelConfig, from_tables
from hpcllm.errors import ConfigError
from hpcllm.model.compiled import check_compiler, compile_blocks
from hpcllm.model.initialisation import build
from hpcllm.model.shapes import split_layers

MODEL = ModelConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocabulary=61, max_sequence=12)


def loss_and_gradients(compiled: bool) -> list[torch.Tensor]:
    decoder = build(MODEL, split_layers(MODEL, 1)[0], seed=3)
    if compiled:
        compile_blocks([decoder])
    tokens = torch.randint(MODEL.vocabulary, (2, 11), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # gradients add up
        loss = decoder.nats(decoder.hidden_states(tokens[:, :-1]), tokens[:, 1:].contiguous()).sum()
        loss.backward()
    return [loss.detach(), *(p.grad for p in decoder.parameters())]


@pytest.mark.full(reason="compiles for most of a minute")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # of PyTorch about itself
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
@pytest.mark.skipif(" " in torch.__file__, reason="PyTorch's compiler takes no folder with a space")
def test_values_are_those_of_plain_blocks():
    check_compiler()
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["ok"]
    for found, want in zip(loss_and_gradients(compiled=True), loss_and_gradients(compiled=False), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert frames["ok"] == before + 1  # one graph serves both blocks


def test_without_a_compiler_it_is_refused_and_the_fix_is_said(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, and 'no-such-compiler' is not on PATH.*CXX.*false"):
        check_compiler()


def test_a_folder_that_the_compiler_cannot_take_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__file__", "/a folder/torch/__init__.py")
    monkeypatch.setenv("CXX", "sh")
    with pytest.raises(ConfigError, match=r"'/a folder/torch' has a space; make the environment elsewhere.*false"):
        check_compiler()


def test_what_the_compiler_says_is_said(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("backend 'inductor' raised:\nC++ error\nx.cpp:1:1: error: unknown type name 'x'\n1 error")

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr(torch, "__file__", "/torch/__init__.py")
    with pytest.raises(ConfigError, match=r"fails here: x\.cpp:1:1: error: unknown type name 'x'; or take"):
        check_compiler()


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("mesh", "tp", 2),
        ("pipeline", "schedule", "zb-h1"),
        ("pipeline", "recompute", "selective"),
        ("optimizer", "shard", "all"),
    ],
)
def test_what_takes_blocks_apart_is_refused_by_name(table, key, value):
    from_tables({table: {key: value}})
    with pytest.raises(ConfigError, match=rf"model\.compile = true with {table}\.{key} = .*valid: {table}\.{key} = "):
        from_tables({table: {key: value}, "model": {"compile": True}})


def test_it_is_no_other_model():
    """A run goes on from a checkpoint, and starts from a published model, with it and without."""
    compiled = dataclasses.replace(MODEL, compile=True)
    assert dataclasses.asdict(canonical(compiled)) == dataclasses.asdict(canonical(MODEL))
    assert compiled == MODEL
