"""The command `finetune`: what it needs, in which words it says so; and an assistant from a base model, by commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_chats import write_rows

from hpcllm.cli.main import main

RUN = """
[run]
name = "base"
steps = 2
[model]
layers = 2
hidden = 32
heads = 4
ffn = 64
[data]
store = "text.h5"
sequence_length = 64
global_batch = 4
[optimizer]
learning_rate = 1e-2
warmup_steps = 2
[log]
trackers = []
"""
TUNE = """
[run]
name = "tuned"
start_from = "runs/base"
steps = 40
[data]
store = "chats.h5"
sequence_length = 64
global_batch = 4
packing = "best-fit"
[finetuning]
kind = "supervised"
[optimizer]
learning_rate = 1e-2
warmup_steps = 2
[log]
trackers = []
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a base model, and stores of text, chats, preferences, and of chats with another tokenizer."""
    folder = tmp_path_factory.mktemp("finetune")
    words = "two and two make four, user and assistant say so; "
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text").mkdir()
        for number in range(6):
            Path(f"text/{number}.txt").write_text(f"{number} {words * 20}")
        chats = [{"prompt": f"{a} and {b}?", "completion": "four, so"} for a in range(9) for b in range(9)]
        write_rows(Path("chats.jsonl"), chats)
        pairs = [{"prompt": f"{a}?", "chosen": "four", "rejected": f"{a}"} for a in range(60)]
        write_rows(Path("pairs.jsonl"), pairs)
        Path("run.toml").write_text(RUN)
        Path("tune.toml").write_text(TUNE)
        own = ["--vocabulary", "300"]
        same = ["--tokenizer", "text.h5", "--template", "plain"]
        assert main(["prepare", "text", "--output", "text.h5", *own]) == 0
        assert main(["prepare", "chats.jsonl", "--chat", "--output", "chats.h5", *same]) == 0
        assert main(["prepare", "pairs.jsonl", "--chat", "--output", "pairs.h5", *same]) == 0
        assert main(["prepare", "chats.jsonl", "--chat", "--output", "others.h5", *own]) == 0
        assert main(["train", "run.toml"]) == 0
    return folder


@pytest.fixture
def folder(made, monkeypatch) -> None:
    monkeypatch.chdir(made)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry-run"])
@pytest.mark.parametrize(
    ("command", "file", "key", "words"),
    [
        (
            "finetune",
            "run.toml",
            "",
            "finetuning.kind is 'none'; valid: 'supervised', on chats, 'dpo', on preferences, or 'grpo'",
        ),
        ("finetune", "tune.toml", "run.start_from=", "run.start_from is missing"),
        ("finetune", "tune.toml", "run.start_from=none", "run.start_from = 'none' is not there"),
        ("finetune", "tune.toml", "finetuning.kind=rlhf", "one of 'none', 'supervised', 'dpo'"),
        ("finetune", "tune.toml", "data.store=", "data.store is missing"),
        ("finetune", "tune.toml", "data.store=pairs.h5", "'pairs.h5' holds preferences"),
        ("finetune", "tune.toml", "finetuning.kind=dpo", "'chats.h5' holds chat"),
        ("finetune", "tune.toml", "data.store=others.h5", "prepare it with --tokenizer runs/base"),
        ("train", "tune.toml", "", "is for `hpcllm finetune`"),
    ],
)
def test_what_does_not_fit_is_said_with_what_would(capsys, command, file, key, words, dry):
    store_may_be_missing = key == "data.store=" and dry
    code = main([command, *dry, file, *(["--set", key] if key else []), "--set", "run.name=no such"])
    if store_may_be_missing:
        assert code == 0
        return
    assert code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hpcllm: error: ")]
    assert len(errors) == 1
    assert words in errors[0]


def test_help_names_the_options_of_train(capsys):
    options = {}
    for command in ("train", "finetune"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        options[command] = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[2:3] == "-"]
    assert options["train"] == options["finetune"]
    assert "--is-finished" in options["finetune"]


@pytest.mark.usefixtures("folder")
def test_a_base_model_becomes_an_assistant_that_ends_its_turn(capsys, monkeypatch):
    """From text to an answer by commands alone; it answers any question as it was shown, and stops there."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["finetune", "tune.toml", "--dry-run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["finetuning"] == "supervised"
    assert main(["finetune", "tune.toml", "--is-finished"]) == 1
    assert main(["finetune", "tune.toml", "--wide"]) == 0
    said = capsys.readouterr().out
    assert "supervised fine-tuning on chat: " in said
    assert " targets  lr " in said
    assert "generate" in said
    assert "--chat" in said
    assert main(["finetune", "tune.toml", "--is-finished"]) == 0
    capsys.readouterr()
    assert main(["generate", "runs/tuned", "--chat", "--prompt", "7 and 8?", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "four, so\n"
    assert main(["checkpoint", "convert", "runs/tuned", "folder"]) == 0
    capsys.readouterr()
    assert main(["generate", "folder", "--chat", "--prompt", "7 and 8?", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "four, so\n"
    assert main(["report", "runs/tuned"]) == 0
    page = Path("runs/tuned/report/index.html").read_text(encoding="utf-8")
    assert "supervised fine-tuning" in page
    assert "targets a step that count" in page


@pytest.mark.usefixtures("folder")
def test_a_chat_needs_a_model_that_was_trained_on_chats(capsys):
    assert main(["generate", "runs/base", "--chat", "--prompt", "x"]) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", ["memory --ranks 1", "layout --ranks 2 --ranks-per-node 2"])
def test_what_plans_takes_the_run_file_of_a_fine_tuning(capsys, command):
    name, *options = command.split()
    assert main([name, "tune.toml", *options]) == 0
    assert capsys.readouterr().out
