"""`hpcllm evaluate`: the same figures on any ranks, those of validation for a store, and mistakes before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpi4py import MPI
from small_models import ENCODER, checkpoint_of
from small_runs import make_store, tiny

from hpcllm.cli import evaluate as command
from hpcllm.cli.main import main
from hpcllm.config.schema import ModelConfig, to_tables
from hpcllm.data.store import TokenStore
from hpcllm.evaluation.held_out import validate
from hpcllm.training.setup import open_run

MODEL = ModelConfig(layers=4, hidden=24, heads=4, kv_heads=2, ffn=16, vocabulary=ENCODER.vocabulary, max_sequence=48)
ROWS = [
    {"context": f"{i} and", "choices": [f"{i}", f"{2 * i} é", "none"], "answer": i % 3, "group": "ab"[i % 2]}
    for i in range(20)
]


@pytest.fixture
def files(comm, shared_path) -> tuple[Path, Path]:
    """A model and a file of examples."""
    if comm.rank == 0:
        checkpoint_of(shared_path, MODEL).rename(shared_path / "a model.h5")
        (shared_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    comm.Barrier()
    return shared_path / "a model.h5", shared_path / "rows.jsonl"


def tasks_of(capfd, *words) -> list[dict]:
    """The tasks of the report; [] where a rank prints nothing."""
    code = main(["evaluate", *map(str, words), "--json"])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    return json.loads(out)["tasks"] if out else []


@pytest.mark.parallel([1, 2, 3, 4])
def test_figures_are_the_same_on_any_ranks(comm, files, capfd, monkeypatch):
    path, rows = files
    words = (path, "--task", rows, "--task", "sort:2", "--problems", 9, "--batch-tokens", 100)
    on_replicas = tasks_of(capfd, *words)
    axis = "--tp" if comm.size in (2, 4) else "--pp"
    shared = tasks_of(capfd, *words, axis, min(comm.size, 3) if axis == "--pp" else 2)
    assert bool(on_replicas) == bool(shared) == (comm.rank == 0)
    if comm.rank:
        return
    monkeypatch.setattr(command, "launched_ranks", lambda: 1)
    alone = tasks_of(capfd, *words)
    assert on_replicas == alone
    assert [(task["examples"], list(task.get("groups", {}))) for task in alone] == [(20, ["a", "b"]), (9, [])]
    for task, other in zip(alone, shared, strict=True):
        for name, figure in task["figures"].items():
            assert other["figures"][name]["value"] == pytest.approx(figure["value"], rel=1e-6), name
    halves = [task["figures"]["acc"]["value"] for task in alone[0]["groups"].values()]
    assert sum(halves) / 2 == pytest.approx(alone[0]["figures"]["acc"]["value"])


@pytest.mark.parallel([1, 2, 3])
def test_contexts_that_lose_their_beginning_are_counted(comm, files, shared_path, capfd):
    longest = MODEL.max_sequence
    if comm.rank == 0:
        contexts = ["x" * length for length in (3, longest - 2, longest + 50, longest * 3)]
        choices = [{"context": text, "choices": ["a", "b"], "answer": 0, "delimiter": ""} for text in contexts]
        (shared_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in choices))
        written = [{"prompt": text, "answer": "a"} for text in contexts]
        (shared_path / "made.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    comm.Barrier()
    words = ("--task", shared_path / "some.jsonl", "--task", f"generate={shared_path / 'made.jsonl'}", "--tokens", 2)
    for task in tasks_of(capfd, files[0], *words):
        assert task["cut"] == 2, task["task"]
    for task in tasks_of(capfd, files[0], "--task", "sort:2", "--problems", 9):
        assert "cut" not in task


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_a_store_has_the_loss_that_training_validates(tmp_path, capfd, packing):
    path = make_store(tmp_path, MPI.COMM_SELF)
    config = tiny(data={"store": str(path), "packing": packing, "validation_sequences": 10**6})
    with open_run(config, MPI.COMM_SELF) as run:
        wanted, model = validate(run.config, run.mesh, run.store, run.engine, run.control), run.config.model
        values = {name: p.detach().clone() for name, p in run.parameters.items()}
    assert wanted is not None

    def same(parameters) -> None:
        for name, p in parameters.items():
            p.copy_(values[name])

    tokenizer = TokenStore.open(path).tokenizer_json
    data = {key: to_tables(config)["data"][key] for key in ("sequence_length", "packing", "document_mask")}
    checkpoint = checkpoint_of(tmp_path, model, same, tokenizer, data=data)
    (task,) = tasks_of(capfd, checkpoint, "--task", path, "--batch-tokens", 50)
    assert task["examples"] == wanted.samples
    assert task["figures"]["loss"]["value"] == pytest.approx(wanted.loss, rel=1e-6)
    assert task["figures"]["bits_per_byte"]["value"] == pytest.approx(wanted.bits_per_byte, rel=1e-6)
    (task,) = tasks_of(capfd, checkpoint, "--task", path, "--limit", 2)
    assert task["examples"] == 2


def test_each_checkpoint_of_a_run_has_a_line(tmp_path, capfd):
    folder = tmp_path / "a run" / "checkpoints"
    folder.mkdir(parents=True)
    for step in (20, 3):
        checkpoint_of(folder, MODEL, step=step)
    words = ["evaluate", str(tmp_path / "a run"), "--task", "copy:2", "--problems", "4", "--all-checkpoints"]
    assert main(words) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint", "step_00000003", "step_00000020"]
    assert main([*words, "--json"]) == 0
    assert [report["step"] for report in json.loads(capfd.readouterr().out)] == [3, 20]
    picture = tmp_path / "a picture.svg"
    assert main([*words, "--plot", str(picture)]) == 0
    text = picture.read_text()
    assert "copy:2" in text
    assert "share that is right" in text
    assert main([*words[:-1], "--plot", str(picture)]) == 2


@pytest.mark.parallel([1, 3])
def test_checkpoints_are_compared_and_drawn_on_any_ranks(comm, shared_path, capfd):
    folder, picture = shared_path / "a run" / "checkpoints", shared_path / "a picture.svg"
    if comm.rank == 0:
        folder.mkdir(parents=True)
        for step in (20, 3):
            checkpoint_of(folder, MODEL, step=step)
    comm.Barrier()
    words = ["--task", "copy:2", "--task", "generate=copy:2", "--problems", "5", "--all-checkpoints"]
    assert main(["evaluate", str(shared_path / "a run"), *words, "--json", "--plot", str(picture)]) == 0
    out = capfd.readouterr().out
    assert bool(out) == (comm.rank == 0)
    if comm.rank == 0:
        reports = json.loads(out)
        assert [(report["step"], len(report["tasks"])) for report in reports] == [(3, 2), (20, 2)]
        text = picture.read_text()
        wanted = ("generate=copy:2", "share of written answers that is right", "loss, nats")
        assert all(label in text for label in wanted)


MISTAKES = {
    "no task": (["none"], "'none' is no task; valid: a token store"),
    "a family, mistyped": (["sotr:4"], "did you mean sort:4? valid"),
    "a family, mistyped, to be written": (["generate=sotr:4"], "did you mean generate=sort:4? valid"),
    "no number": (["sort:x"], "did you mean sort:5? valid"),
    "a format, mistyped": (["gsm9k=gone.jsonl"], "did you mean gsm8k=gone.jsonl? valid"),
    "size": (["sort:0"], "sort:0: problems of this family have sizes from 1"),
    "no file": (["gone.jsonl"], "gone.jsonl"),
    "format": (["arc=rows.jsonl"], "valid as arc: question, choices, answerKey"),
    "a store of other tokens": (["other.h5"], "other.h5 has 290 tokens, the model 257"),
    "no store": (["a model.h5"], "no token store"),
    "many": (["sort"] * 101, "101 tasks"),
    "limit": (["sort", "--limit", "0"], "valid: 1 to"),
    "ranks": (["sort", "--tp", "2"], "--tp 2 times --pp 1 is 2, which does not divide the 1 rank"),
}


@pytest.mark.parametrize("wrong", MISTAKES)
def test_mistakes_are_said_before_the_weights_are_read(tmp_path, capfd, monkeypatch, wrong):
    tasks, said = MISTAKES[wrong]
    monkeypatch.chdir(tmp_path)
    checkpoint_of(tmp_path, MODEL).rename(tmp_path / "a model.h5")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    if tasks == ["other.h5"]:
        make_store(tmp_path, MPI.COMM_SELF).rename(tmp_path / "other.h5")
    monkeypatch.setattr("hpcllm.evaluation.evaluate.load_model", None)
    options = [part for task in tasks for part in ([task] if task[0] in "-0123456789" else ["--task", task])]
    assert main(["evaluate", "a model.h5", *options]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in " ".join(err.split())
