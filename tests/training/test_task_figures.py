"""Tasks in training: any layout measures what `hpcllm evaluate` measures of its checkpoint, and no step changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w
from mpi4py import MPI
from small_runs import dividing, store, tiny, with_tables

from hpcllm.cli import evaluate as command
from hpcllm.cli.main import main
from hpcllm.config.schema import from_tables, to_tables
from hpcllm.errors import ConfigError, UserError
from hpcllm.report.run_folder import read_runs
from hpcllm.system.job import StopSignals
from hpcllm.training.loop import train

LAYOUTS = [
    {},
    {"optimizer": {"shard": "all"}},
    {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2, "schedule": "zb-v"}, "model": {"layers": 4}},
    {"mesh": {"tp": 2, "sequence_parallel": True}},
    {"mesh": {"pp": 2}, "pipeline": {"microbatches": 3}},
]


def settings(folder: Path, name: str, tables: dict, tasks: tuple[str, ...] = (), every_steps: int = 0):
    base = {
        "run": {"name": name, "folder": str(folder), "steps": 4},
        "model": {"max_sequence": 40},
        "evaluation": {"tasks": tasks, "every_steps": every_steps, "examples": 9},
        "checkpoint": {"every_steps": 0},
    }
    made = to_tables(tiny(**{key: base.get(key, {}) | tables.get(key, {}) for key in {**base, **tables}}))
    return from_tables(made)


def trained(config, comm) -> Path:
    with StopSignals() as signals:
        train(config, comm, signals)
    comm.Barrier()
    return Path(config.run.folder) / config.run.name


def questions(comm, folder: Path) -> Path:
    """Questions that nearly every text answers, right or wrong: is the last of some letters in it this one?"""
    path = folder / "questions.jsonl"
    if comm.rank == 0:
        rows = [{"prompt": f"{i} the", "answer": list("aelmpr"), "pattern": "[a-z]"} for i in range(9)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    comm.Barrier()
    return path


def figures_of(records: list[dict]) -> dict[str, float]:
    return {key: value for record in records for key, value in record.items() if key.startswith("evaluation/")}


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("tables", LAYOUTS, ids=str)
def test_a_run_measures_what_evaluate_measures_of_its_checkpoint(comm, shared_path, tables, capfd, monkeypatch):
    tables = dividing(tables, comm.size)
    tasks = (str(store()), "sort:2", f"generate={questions(comm, shared_path)}")
    folder = trained(settings(shared_path, "r", tables, tasks, every_steps=2), comm)
    if comm.rank:
        return
    records = read_runs([folder])[0].history.tasks
    assert [record["step"] for record in records] == [2] * 3 + [4] * 3
    found = figures_of(records[3:])
    monkeypatch.setattr(command, "launched_ranks", lambda: 1)
    capfd.readouterr()
    words = [part for task in tasks for part in ("--task", task)]
    assert main(["evaluate", str(folder), *words, "--problems", "9", "--limit", "9", "--json"]) == 0
    for task in json.loads(capfd.readouterr().out)["tasks"]:
        for name, figure in task["figures"].items():
            assert found[f"evaluation/{task['task']}/{name}"] == pytest.approx(figure["value"], rel=1e-5), name
    assert main(["report", str(folder)]) == 0
    page = (folder / "report" / "index.html").read_text()
    assert "Tasks" in page
    assert "sort:2" in page


@pytest.mark.parallel([1, 2])
def test_measuring_changes_no_step(comm, shared_path):
    layout = {"mesh": {"pp": comm.size}, "pipeline": {"microbatches": 2}}
    one = trained(settings(shared_path, "with", layout, ("copy:2",), every_steps=1), comm)
    other = trained(settings(shared_path, "without", layout), comm)
    if comm.rank == 0:
        losses = [[r["loss"] for r in read_runs([folder])[0].history.steps] for folder in (one, other)]
        assert losses[0] == losses[1]
        assert len(losses[0]) == 4


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ({"tasks": ["none"]}, "'none' is no task"),
        ({"tasks": ["gone.jsonl"]}, "gone.jsonl"),
        ({"tasks": ["sort:0"]}, "sizes from 1"),
    ],
)
def test_a_task_that_cannot_be_is_said_before_the_first_step_and_by_a_dry_run(tmp_path, evaluation, said, capsys):

    config = settings(tmp_path, "r", {})
    wrong = with_tables(to_tables(config), {"evaluation": evaluation})
    with pytest.raises(UserError, match=said):
        trained(wrong, MPI.COMM_SELF)
    run_file = tmp_path / "run.toml"
    run_file.write_text(tomli_w.dumps(to_tables(wrong)))
    capsys.readouterr()
    assert main(["train", str(run_file), "--dry-run"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "evaluation",
    [{"every_steps": 5}, {"tasks": ["sort"] * 2}, {"tasks": [""]}, {"tasks": ["a\0"]}, {"examples": 0},
     {"tasks": [f"sort:{i}" for i in range(1, 102)]}],
)  # fmt: skip
def test_keys_out_of_range_are_rejected(evaluation):
    with pytest.raises(ConfigError, match=r"evaluation\."):
        from_tables({"evaluation": evaluation})
