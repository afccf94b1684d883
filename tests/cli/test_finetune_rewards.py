"""`finetune` on rewards of a Python file: what is rejected before it begins, what ends it, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w
from reward_runs import grpo

from hpcllm.cli.main import main
from hpcllm.config.schema import to_tables
from hpcllm.finetuning.rollouts import MOST_TEXTS
from hpcllm.model.paged_cache import BLOCK_TOKENS
from hpcllm.plan.memory import predict as memory
from hpcllm.plan.resolve import resolve


@pytest.fixture
def run_file(tmp_path) -> Path:
    """A run of two steps whose function is beside it."""
    (tmp_path / "my reward.py").write_text("def reward(prompt, text, answer):\n    return len(text) % 2\n")
    config = grpo(
        run={"steps": 2, "name": "own", "folder": str(tmp_path / "all runs")},
        finetuning={"reward": {"file": str(tmp_path / "my reward.py")}},
    )
    path = tmp_path / "a run.toml"
    path.write_text(tomli_w.dumps(to_tables(config)))
    return path


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry-run"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("finetuning.reward.file=no such.py", "failed with FileNotFoundError"),
        ("finetuning.reward.function=score", "there is no function 'score'; valid: reward"),
        ("finetuning.reward.prompts=no such.jsonl", "finetuning.reward.prompts = 'no such.jsonl'"),
        ("finetuning.reward.prompts=copy:2.5", "finetuning.reward.prompts = 'copy:2.5'"),
        ("finetuning.reward.problems=9999", "copy:2 has no 9,999 problems"),
        ("finetuning.reward.tokens=27", "valid: prompts of up to 2 tokens"),
        ("mesh.pp=0", "mesh.pp = 0"),
    ],
)
def test_what_cannot_be_rewarded_is_rejected_before_it_begins(capsys, run_file, override, words, dry):
    assert main(["finetune", *dry, str(run_file), "--set", override]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hpcllm: error: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert not list(run_file.parent.glob("all runs/own/checkpoints/*.h5"))


def test_a_run_logs_its_rewards_and_the_page_shows_them(capsys, monkeypatch, run_file):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["finetune", str(run_file), "--dry-run"]) == 0
    assert "would fine-tune (grpo) own" in capsys.readouterr().out
    assert main(["finetune", str(run_file), "--wide", "--report"]) == 0
    said = capsys.readouterr().out
    assert "rewarded by reward of " in said
    assert "held-out reward" in said
    folder = run_file.parent / "all runs" / "own"
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert 0 < record["reward"] < 1
        assert record["sampler_difference_most"] <= 1e-5
        assert all(text["reward"] == len(text["text"]) % 2 for text in record["texts"])
    assert "Rewards" in (folder / "report" / "index.html").read_text(encoding="utf-8")


def test_a_function_that_fails_ends_the_run_and_is_named(capsys, run_file):
    function = run_file.parent / "my reward.py"
    function.write_text("def reward(prompt, text, answer):\n    return {}[prompt]\n")
    assert main(["finetune", str(run_file)]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hpcllm: error: ")]
    assert len(errors) == 1
    assert f"reward of {str(function)!r} failed with KeyError" in errors[0]
    assert "for the prompt 'copy: " in errors[0]


def test_memory_counts_the_cache_of_texts_and_the_reference():
    assert (memory.BLOCK_TOKENS, memory.MOST_TEXTS) == (BLOCK_TOKENS, MOST_TEXTS)
    shape = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 44, "max_sequence": 4096, "vocabulary": 290}

    def predicted(length: int, **reward):
        data = {"global_batch": 64, "sequence_length": length}
        resolved = resolve(
            grpo(model=shape, data=data, finetuning={"reward": reward}, pipeline={"microbatches": 64}), 1
        )
        return memory.predict(resolved.config, resolved.schedule, 0)

    free, dear = predicted(100), predicted(100, kl=0.1)
    assert dear.parameters == 2 * free.parameters
    cache_bytes = 64 * 4000 * 2 * 2 * 2 * 6 * 4  # texts, tokens, keys and values, layers, heads, channels, bytes
    assert predicted(3999).activations >= cache_bytes
    assert predicted(3999).activations < 2 * cache_bytes
