"""Answers that a model writes: the same on any ranks, those of greedy generation, and mistakes before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_models import ENCODER, checkpoint_of

from hpcllm.cli import evaluate as command
from hpcllm.cli.main import main
from hpcllm.config.schema import MeshConfig, ModelConfig
from hpcllm.evaluation import generating
from hpcllm.evaluation.generating import Prompts, make_texts
from hpcllm.evaluation.scoring import Scorer
from hpcllm.inference.complete import BatchSettings
from hpcllm.inference.generate import Place, TextSettings, complete, load_model
from hpcllm.model.sampling import Sampling
from hpcllm.mpi.mesh import open_mesh

MODEL = ModelConfig(layers=4, hidden=24, heads=4, kv_heads=2, ffn=16, vocabulary=ENCODER.vocabulary, max_sequence=48)
PROMPTS = [f"{i} and {'so ' * (i % 9)}on" for i in range(20)]


def sharp(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Weights whose logits lie so far apart that rounding decides nothing."""
    for p in parameters.values():
        if p.dim() == 2:
            p *= 20


@pytest.fixture
def path(comm, shared_path) -> Path:
    if comm.rank == 0:
        checkpoint_of(shared_path, MODEL, sharp).rename(shared_path / "a model.h5")
    comm.Barrier()
    return shared_path / "a model.h5"


def rows_of(answers: list[str], **more) -> str:
    """Questions whose answers are right for the even ones alone."""
    rows = [
        {"prompt": prompt, "answer": answer if i % 2 == 0 else "other", "group": "ab"[i % 2], "stop": [], **more}
        for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def tasks_of(capfd, *words) -> list[dict]:
    """The tasks of the report; [] where a rank prints nothing."""
    code = main(["evaluate", *map(str, words), "--json"])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    return json.loads(out)["tasks"] if out else []


@pytest.mark.parallel([1, 2, 3, 4])
def test_texts_are_those_of_greedy_generation_on_any_ranks(comm, path, capfd, monkeypatch):
    monkeypatch.setattr(generating, "GROUP_TEXTS", 3)
    settings = TextSettings(Sampling(temperature=0.0), BatchSettings(9))
    texts = {each.prompt: each.text for each in complete(path, PROMPTS, settings, Place())}
    rows = path.with_name("rows.jsonl")
    if comm.rank == 0:
        rows.write_text(rows_of([texts[i] for i in range(len(PROMPTS))]))
    comm.Barrier()
    words = (path, "--task", f"generate={rows}", "--task", "generate=sort:2", "--problems", 9, "--tokens", 9)
    on_replicas = tasks_of(capfd, *words)
    axis = ("--tp", 2) if comm.size in (2, 4) else ("--pp", comm.size)
    assert on_replicas == tasks_of(capfd, *words, *axis)
    if comm.rank:
        return
    monkeypatch.setattr(command, "launched_ranks", lambda: 1)
    assert on_replicas == tasks_of(capfd, *words)
    (task, made) = on_replicas
    assert (task["examples"], task["kind"], made["examples"]) == (20, "generate", 9)
    assert {name: group["figures"]["exact_match"]["value"] for name, group in task["groups"].items()} == {
        "a": 1,
        "b": 0,
    }
    assert task["figures"]["exact_match"]["value"] == 0.5


@pytest.mark.parallel([2, 3])
def test_replicas_that_share_weights_make_as_many_passes(comm, path, monkeypatch):
    """As ZeRO-3 needs it: whoever has no text left reads on beside, and the texts are those of one process."""
    monkeypatch.setattr(generating, "GROUP_TEXTS", 2)
    tokens = [tuple(ENCODER.encode([prompt])[0][:-1].tolist()) for prompt in PROMPTS]
    alone = Scorer([load_model(path, False, torch.float32, torch.device("cpu"), None)])
    long = make_texts(alone, Prompts(tokens, [()], [0] * len(tokens), 12), ENCODER)

    early = [next((letter for letter in text if letter != "\ufffd"), "never") for text in long]
    stops = [(letter,) for letter in dict.fromkeys(["never", *early])]
    chosen = [stops.index((letter,)) if i % 4 < 2 else 0 for i, letter in enumerate(early)]
    prompts = Prompts(tokens, stops, chosen, 12)
    with open_mesh(comm, MeshConfig(dp=comm.size)) as mesh:
        decoder, passes = load_model(path, False, torch.float32, torch.device("cpu"), mesh), []
        run = decoder.hidden_states
        monkeypatch.setattr(decoder, "hidden_states", lambda *words, **named: passes.append(1) or run(*words, **named))
        texts = make_texts(Scorer([decoder], mesh), prompts, ENCODER)
        assert len(set(comm.allgather(len(passes)))) > 1
        passes.clear()
        assert make_texts(Scorer([decoder], mesh, shares_weights=True), prompts, ENCODER) == texts
        assert len(set(comm.allgather(len(passes)))) == 1
    assert make_texts(alone, prompts, ENCODER) == texts
    assert texts != long


def test_a_prompt_that_is_too_long_loses_its_beginning(path):
    decoder = load_model(path, False, torch.float32, torch.device("cpu"), None)
    long = tuple(ENCODER.encode(["so " * 60])[0][:-1].tolist())
    for most in (1, 7, MODEL.max_sequence - 1):
        cut = long[-(MODEL.max_sequence - most) :]
        one, other = make_texts(Scorer([decoder]), Prompts([long, cut], [()], [0, 0], most), ENCODER)
        assert one == other


def test_written_answers_are_right_where_each_token_is_the_likeliest(path, capfd):
    """Both ways to ask for a fixed answer agree; one token a byte, so a text has one way to be written."""
    settings = TextSettings(Sampling(temperature=0.0), BatchSettings(4))
    asked = [{"prompt": prompt, "stop": []} for prompt in PROMPTS]
    texts = {each.prompt: each.text for each in complete(path, PROMPTS, settings, Place())}
    files = {"written": [], "scored": []}
    for i, row in enumerate(asked):
        answer = texts[i] if i % 3 else "no."
        if answer.strip() and "\ufffd" not in answer:
            files["written"].append(row | {"answer": answer})
            files["scored"].append({"context": row["prompt"], "answer": answer, "delimiter": ""})
    for name, rows in files.items():
        path.with_name(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written, scored = path.with_name("written.jsonl"), path.with_name("scored.jsonl")
    one, other = tasks_of(capfd, path, "--task", f"generate={written}", "--task", scored, "--tokens", 4)
    assert 0 < one["figures"]["exact_match"]["value"] < 1
    assert one["figures"]["exact_match"] == other["figures"]["acc"]


MISTAKES = {
    "no file": (["generate=gone.jsonl"], "gone.jsonl"),
    "size": (["generate=sort:0"], "sort:0: problems of this family have sizes from 1"),
    "format": (["gsm8k=rows.jsonl"], "valid as gsm8k: question, answer"),
    "no room": (["generate=rows.jsonl", "--tokens", "48"], "--tokens 48: the model reads 48 with the prompt"),
    "long answers": (["generate=sort:60"], "an answer has 121 tokens, but the model reads 48 with the prompt"),
    "tokens": (["generate=rows.jsonl", "--tokens", "0"], "valid: a whole number"),
    "nothing": (["generate="], "'generate=' is no task"),
}


@pytest.mark.parametrize("wrong", MISTAKES)
def test_mistakes_are_said_before_the_weights_are_read(tmp_path, capfd, monkeypatch, wrong):
    tasks, said = MISTAKES[wrong]
    monkeypatch.chdir(tmp_path)
    checkpoint_of(tmp_path, MODEL).rename(tmp_path / "a model.h5")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    monkeypatch.setattr("hpcllm.evaluation.evaluate.load_model", None)
    assert main(["evaluate", "a model.h5", "--task", *tasks]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in " ".join(err.split())
