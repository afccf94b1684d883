"""HumanEval from a model: what it writes is judged as `judge` judges it, the same on any ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from small_models import ENCODER, checkpoint_of

from hpcllm.cli.main import main
from hpcllm.config.schema import ModelConfig
from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.evaluation.judge_process import JudgeProcess, open_judge
from hpcllm.evaluation.sandbox import Limits, check_sandbox, run_all

MODEL = ModelConfig(layers=1, hidden=320, heads=1, ffn=8, vocabulary=ENCODER.vocabulary, max_sequence=64, tied=False)
WRITES = "x=1\n"  # what the model below writes, again and again, after whatever
CHECK = "def check(candidate):\n    assert "
PROBLEMS = [
    {"task_id": "t/0", "prompt": "", "entry_point": "x", "test": f"{CHECK}candidate == 1"},
    {"task_id": "t/1", "prompt": "y=2\n", "entry_point": "y", "test": f"{CHECK}x == candidate"},
    {"task_id": "t/2", "prompt": "x=", "entry_point": "x", "test": f"{CHECK}candidate == 1"},
    {"task_id": "t/3", "prompt": "while True: ", "entry_point": "x", "test": CHECK + "True"},
    {"task_id": "t/4", "prompt": "z", "entry_point": "y", "test": CHECK + "True"},
]


def cycle(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Weights by which the last token alone decides the next one: that behind it in WRITES, for others its first."""
    for p in parameters.values():
        p.zero_()
    ids = ENCODER.encode([WRITES])[0][:-1].tolist()
    after = {token: ids[(place + 1) % len(ids)] for place, token in enumerate(ids)}
    table, head = parameters["embedding.weight"], parameters["head.weight"]
    for token in range(MODEL.vocabulary):
        table[token, token] = 1.0
        head[after.get(token, ids[0]), token] = 1.0
    for name, p in parameters.items():
        if "norm" in name and name.endswith("weight"):
            p.fill_(1.0)


@pytest.fixture(scope="module", autouse=True)
def allowed():
    try:
        check_sandbox()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def files(comm, shared_path) -> tuple[Path, Path]:
    """A model and a file of problems."""
    if comm.rank == 0:
        checkpoint_of(shared_path, MODEL, cycle).rename(shared_path / "a model.h5")
        (shared_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    comm.Barrier()
    return shared_path / "a model.h5", shared_path / "problems.jsonl"


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(
    "more", [[], ["--samples", "3", "--k", "1", "--k", "3", "--temperature", "0.1"]], ids=["likeliest", "drawn"]
)
def test_programs_are_written_and_judged_on_any_ranks(comm, files, capfd, more):
    path, problems = files
    words = ["evaluate", str(path), "--task", f"humaneval={problems}", "--tokens", "9", "--time-s", "1", "--json"]
    code = main([*words, *more])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert bool(out) == (comm.rank == 0)
    if comm.rank:
        return
    (task,) = json.loads(out)["tasks"]
    samples = 3 if more else 1
    assert {name: figure["value"] for name, figure in task["figures"].items()} == dict.fromkeys(
        ["pass@1", "pass@3"] if more else ["pass@1"], 0.4
    )
    wanted = {"passed": 2, "wrong answer": 1, "raised NameError": 1, "out of time": 1}
    assert task["outcomes"] == {name: number * samples for name, number in wanted.items()}


def test_the_process_gives_the_outcomes_of_the_sandbox_in_order():
    programs = ["pass", "assert 0, 'é'", "1 / 0", "import os\nos._exit(3)"]
    limits = Limits(2.0)
    with open_judge(["sort", "humaneval"]) as judge:
        assert judge is not None
        assert judge.run(programs, limits, 2) == run_all(programs, limits, 2)
        assert judge.run([], limits, 2) == []
    with open_judge(["sort", "humanevals.jsonl"]) as none:
        assert none is None


def test_faults_of_the_sandbox_keep_their_kind_and_a_lost_process_is_said(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib\nfrom hpcllm.evaluation import sandbox\n"
        "sandbox.CHILD = pathlib.Path(__file__).with_name('child.py')\n"
    )
    (tmp_path / "child.py").write_text('print(\'{"impossible": "unshare: not permitted"}\')')
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with JudgeProcess() as judge, pytest.raises(ConfigError, match="cannot be run safely here: unshare: not permitted"):
        judge.check()
    with JudgeProcess() as judge:
        judge._process.kill()
        judge._process.wait()
        with pytest.raises(HpcllmError, match="has ended"):
            judge.check()


MISTAKES = {
    "k": (["humaneval=problems.jsonl", "--k", "2"], "pass@2 needs as many samples of each problem, not 1: --samples"),
    "no file": (["humaneval=gone.jsonl"], "gone.jsonl"),
    "no problems": (["humaneval=empty.jsonl"], "empty.jsonl"),
    "no room": (["humaneval=problems.jsonl", "--tokens", "64"], "the model reads 64 with the prompt"),
    "time": (["humaneval=problems.jsonl", "--time-s", "0"], "--time-s"),
}


@pytest.mark.parametrize("wrong", MISTAKES)
def test_mistakes_are_said_before_the_weights_are_read(files, capfd, monkeypatch, wrong):
    path, problems = files
    tasks, said = MISTAKES[wrong]
    monkeypatch.chdir(path.parent)
    problems.with_name("empty.jsonl").write_text("")
    monkeypatch.setattr("hpcllm.evaluation.evaluate.load_model", None)
    assert main(["evaluate", "a model.h5", "--task", *tasks]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in " ".join(err.split())
