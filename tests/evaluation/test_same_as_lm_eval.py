"""Figures are those of lm-evaluation-harness: same file, same weights, by its own model and by ours inside it.

Where lm-eval is not installed, these are skipped: pip install -e '.[peers]'. Its own model needs accelerate as well.
"""

from __future__ import annotations

import json
import random
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
from small_models import TOKENIZER

from hpcllm.cli.main import main
from hpcllm.data import tokenizer as bpe
from hpcllm.system.output import write_whole

FIGURES = ("acc", "acc_norm", "acc_bytes")
SENTENCES = ("the sum of ranks is a ring", "where each one waits for its neighbour,", "é and 中 too")
WORDS = " ".join(SENTENCES).split()
TASK = """
task: ours
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
  - {metric: acc_bytes, aggregation: mean, higher_is_better: true}
"""


def write_examples(path: Path, count: int) -> None:
    """Contexts with and without a space at the end, empty ones, some longer than the model reads."""
    draw = random.Random(5)
    rows = []
    for i in range(count):
        context = " ".join(draw.choices(WORDS, k=draw.choice([0, 1, 3, 9, 60]))) + " " * (i % 5 == 0)
        choices = [" ".join(draw.choices(WORDS, k=draw.randint(1, 5))) for _ in range(4)]
        rows.append({"context": context if context.strip() else "", "choices": choices, "answer": draw.randrange(4)})
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_folder(folder: Path) -> None:
    """A random model in Hugging Face's format, with a tokenizer of words."""
    import torch
    import transformers

    text = bpe.train([" ".join(WORDS)] * 30, 300)
    assert text != TOKENIZER
    torch.manual_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=bpe.Encoder(text).vocabulary, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.3, bos_token_id=None,
        eos_token_id=bpe.Encoder(text).end_of_text,
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    write_whole(folder / "tokenizer.json", text)
    end = bpe.end_of_text_of(text)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": 64}
    write_whole(folder / "tokenizer_config.json", json.dumps(settings))


class Asked(NamedTuple):
    """A request of lm_eval, as its models see it."""

    args: tuple[str, dict]


def of_lm_eval(lm_eval, model, folder: Path) -> dict[str, float]:
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=["ours"], task_manager=tasks, bootstrap_iters=10)
    return found["results"]["ours"]


GENERATED = """
task: ours
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: generate_until
test_split: test
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["Question:", "</s>", "<|im_end|>"], do_sample: false, temperature: 0.0, max_gen_toks: 24}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]
filter_list:
  - name: strict-match
    filter: [{function: regex, regex_pattern: "#### (\\\\-?[0-9\\\\.\\\\,]+)"}, {function: take_first}]
  - name: flexible-extract
    filter:
      - {function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{2,})|(-?[0-9]+)"}
      - {function: take_first}
"""


def test_written_answers_are_those_of_lm_eval_to_the_last_digit(tmp_path, monkeypatch, capfd):
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `peers`")
    pytest.importorskip("accelerate", reason="lm-eval's own model needs accelerate")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    draw = random.Random(7)
    questions = [" ".join(draw.choices(WORDS, k=draw.choice([1, 3, 9, 40]))) for _ in range(80)]
    write_folder(tmp_path / "weights")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.models.huggingface import HFLM

        from hpcllm.evaluation.lm_eval_model import HpcllmModel

        ours = HpcllmModel(tmp_path / "weights")
        asked = [Asked((f"Question: {question}\nAnswer:", {"max_gen_toks": 24})) for question in questions]
        numbers = [(re.findall(r"[0-9]+", text) or ["7"])[-1] for text in ours.generate_until(asked)]
        rows = [{"question": q, "answer": f"so\n#### {n}"} for q, n in zip(questions, numbers, strict=True)]
        write_whole(tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "ours.yaml").write_text(GENERATED.replace("FILE", str(tmp_path / "rows.jsonl")))
        other = HFLM(pretrained=str(tmp_path / "weights"), dtype="float32", device="cpu", batch_size=8)
        stopping = [Asked((each.args[0], {"until": ["e", " is"], "max_gen_toks": 24})) for each in asked]
        assert other.generate_until(stopping) == ours.generate_until(stopping)
        theirs, inside = of_lm_eval(lm_eval, other, tmp_path), of_lm_eval(lm_eval, ours, tmp_path)
    capfd.readouterr()
    words = ["evaluate", str(tmp_path / "weights"), "--task", f"gsm8k={tmp_path / 'rows.jsonl'}", "--tokens", "24"]
    assert main([*words, "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)["tasks"][0]["figures"]
    assert 0 < figures["flexible_match"]["value"] < 1
    for name, theirs_name in (("exact_match", "strict-match"), ("flexible_match", "flexible-extract")):
        key = f"exact_match,{theirs_name}"
        assert theirs[key] == inside[key] == pytest.approx(figures[name]["value"], rel=1e-12)
        stderr = f"exact_match_stderr,{theirs_name}"
        assert theirs[stderr] == inside[stderr] == pytest.approx(figures[name]["stderr"], rel=1e-9)


def test_shares_and_errors_are_those_of_lm_eval_to_the_last_digit(tmp_path, monkeypatch, capfd):
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `peers`")
    pytest.importorskip("accelerate", reason="lm-eval's own model needs accelerate")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    write_examples(tmp_path / "rows.jsonl", 150)
    write_folder(tmp_path / "weights")
    (tmp_path / "ours.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.models.huggingface import HFLM

        from hpcllm.evaluation.lm_eval_model import HpcllmModel

        theirs = of_lm_eval(
            lm_eval, HFLM(pretrained=str(tmp_path / "weights"), dtype="float32", device="cpu", batch_size=8), tmp_path
        )
        inside = of_lm_eval(lm_eval, HpcllmModel(tmp_path / "weights"), tmp_path)
    capfd.readouterr()
    assert main(["evaluate", str(tmp_path / "weights"), "--task", str(tmp_path / "rows.jsonl"), "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)["tasks"][0]["figures"]
    assert len({theirs[f"{name},none"] for name in FIGURES}) > 1
    for name in FIGURES:
        assert theirs[f"{name},none"] == inside[f"{name},none"] == pytest.approx(figures[name]["value"], rel=1e-12)
        stderr = theirs[f"{name}_stderr,none"]
        assert stderr == inside[f"{name}_stderr,none"] == pytest.approx(figures[name]["stderr"], rel=1e-9)
