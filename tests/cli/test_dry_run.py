"""`train --dry-run`: refuses what train refuses, in its words; starts and writes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from mpi4py import MPI
from small_runs import store, tiny

from hpcllm.cli.main import main
from hpcllm.config.schema import load, to_tables
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.data.store import TokenStore
from hpcllm.errors import ConfigError, UserError
from hpcllm.system.job import StopSignals
from hpcllm.training.loop import train
from hpcllm.training.run_lock import RunLock
from hpcllm.training.setup import open_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_file(tmp_path) -> Path:
    """Of a run that has everything."""
    tables = to_tables(tiny(run={"folder": str(tmp_path / "all runs")}, pipeline={"microbatches": 3}))
    path = tmp_path / "a run.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def refused(capsys, *arguments: str) -> str:
    """What train says to a run file, and --dry-run, too."""
    assert main(["train", "--dry-run", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    return told.err


def everything(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("ranks", ["1", "2", "4"])
def test_a_run_is_accepted_and_nothing_is_written(capsys, tmp_path, run_file, ranks):
    before = everything(tmp_path)
    shape = ["--set", "mesh.pp=2"] if ranks == "4" else []
    assert main(["train", "--dry-run", str(run_file), "--ranks", ranks, *shape, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["accepted"], facts["ranks"], facts["goes_on_from"]) == (True, int(ranks), None)
    assert facts["tokens_in_store"] > 0
    assert main(["train", "--dry-run", str(run_file), "--ranks", ranks, *shape]) == 0
    assert "accepted; nothing was started or written" in capsys.readouterr().out
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.pp=3"],
        ["mesh.tp=3"],
        ["mesh.dp=5"],
        ["pipeline.microbatches=5"],
        ["pipeline.recompute=full,none,none"],
        ["mesh.pp=2", "pipeline.layers=[1]"],
        ["data.store=none.h5"],
        ["data.sequence_length=1000000000", "model.max_sequence=1000000000"],
        ["model.vocabulary=3"],
        ["communication.tuning=none.toml"],
        ["pipeline.schedule=custom", "pipeline.file=none.txt"],
        ["optimizer.shard=all", "mesh.pp=2"],
        ["checkpoint.writer=mpio"],
    ],
    ids=" ".join,
)
def test_what_train_refuses_is_refused_in_its_words(capsys, run_file, overrides):
    arguments = [part for override in overrides for part in ("--set", override)]
    told = refused(capsys, str(run_file), *arguments)
    if "mesh." in "".join(overrides):  # for more ranks than this process is
        assert told.startswith("hpcllm: error: ")
        return
    with pytest.raises(UserError) as error, open_run(load(run_file, overrides), MPI.COMM_WORLD):
        pass
    assert told == f"hpcllm: error: {error.value}\n"


def test_a_machine_gives_a_step_and_its_memory(capsys, run_file):
    assert main(["train", "--dry-run", str(run_file), "--set", "run.machine=lumi-g", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["iteration_time_s"] > 0
    assert facts["fits"] is True
    assert "lumy" in refused(capsys, str(run_file), "--set", "run.machine=lumy")
    mixed = ["--set", "pipeline.recompute=full,none", "--set", "mesh.pp=2", "--set", "run.machine=lumi-g"]
    assert main(["train", "--dry-run", str(run_file), *mixed]) == 0
    assert "not predicted: the planner has no word for" in capsys.readouterr().out


LARGE = ["--set", 'data.store=""', "--set", "model.vocabulary=128256", "--set", "run.device=cpu"]


def test_a_rank_that_no_host_can_hold_is_refused_with_figures_and_what_would_fit(capsys, run_file):
    """Two trillion parameters on one rank: more than the memory of any host that runs this test."""
    keys = ("model.layers=128", "model.hidden=32768", "model.heads=256", "model.ffn=131072", "model.kv_heads=256")
    told = refused(capsys, str(run_file), *LARGE, *(word for key in keys for word in ("--set", key)))
    assert re.search(r"the largest rank needs [\d.]+ TB of tensors \(predicted: parameters [\d.]+ TB", told)
    assert "but this host" in told


def test_a_rank_that_a_device_of_the_machine_cannot_hold_is_refused(capsys, tmp_path):
    """GPT of 6.7 billion parameters in fp32 takes 107 GB of states; on four times the ranks it fits."""
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nfolder = {json.dumps(str(tmp_path))}\nmachine = "frontier"\n')
    keys = ("layers=32", "hidden=4096", "heads=32", "ffn=16384", "vocabulary=50304", "activation=gelu_tanh")
    arguments = [str(path), *(f"--set=model.{key}" for key in keys), "--set=data.global_batch=1"]
    told = refused(capsys, *arguments)
    assert "a device of run.machine = 'frontier' has 68.7 GB" in told
    key, value = re.search(r"(mesh\.\w+) = (\d+) would fit", told).groups()
    assert main(["train", "--dry-run", *arguments, f"--set={key}={value}"]) == 0


def test_a_run_without_a_store_is_accepted_if_its_vocabulary_is_known(capsys, run_file):
    arguments = ["--set", 'data.store=""', "--set", "model.vocabulary=300"]
    assert main(["train", "--dry-run", str(run_file), *arguments]) == 0
    assert "data.store is not given yet" in capsys.readouterr().out
    assert "model.vocabulary = 0" in refused(capsys, str(run_file), *arguments[:2])


def test_a_folder_that_another_job_holds_is_refused(capsys, tmp_path, run_file):
    folder = tmp_path / "all runs" / "r"
    lock = RunLock(folder)
    lock.take(restart=False)
    assert "another job (" in refused(capsys, str(run_file))
    lock.check()
    lock.release()
    assert main(["train", "--dry-run", str(run_file)]) == 0
    capsys.readouterr()


def test_a_folder_that_cannot_be_is_refused(capsys, tmp_path, run_file):
    (tmp_path / "all runs").write_text("in the way")
    assert "it is no folder" in refused(capsys, str(run_file))


def test_a_run_that_would_go_on_must_be_the_same(capsys, run_file):
    """The newest checkpoint is named; one of another model is refused as train does."""
    with StopSignals() as signals:
        train(load(run_file, ["run.steps=1"]), MPI.COMM_WORLD, signals)
    capsys.readouterr()
    assert main(["train", "--dry-run", str(run_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["goes_on_from"].endswith("step_00000001.h5")
    changed = [str(run_file), "--set", "model.ffn=48"]
    assert "was trained otherwise: model.ffn = 48, was 44" in refused(capsys, *changed)
    assert main(["train", "--dry-run", *changed, "--restart"]) == 0


def test_a_run_over_other_tokens_is_refused_by_fingerprint(capsys, tmp_path, run_file):
    """The tokenizer is the same, so no other check would see it."""
    with StopSignals() as signals:
        train(load(run_file, ["run.steps=1"]), MPI.COMM_WORLD, signals)
    (tmp_path / "text.txt").write_text("alpha gamma ranks " * 400)
    options = PrepareOptions(
        inputs=(tmp_path / "text.txt",), output=tmp_path / "b.h5", tokenizer=store(), validation_fraction=0.0
    )
    prepare(options, MPI.COMM_WORLD)
    prints = [TokenStore.open(path).fingerprint for path in (store(), options.output)]
    capsys.readouterr()
    changed = [str(run_file), "--set", f"data.store={options.output}"]
    told = refused(capsys, *changed)
    assert all(text in told for text in (*prints, "run.start_from", "--restart"))
    with pytest.raises(ConfigError, match=f"{prints[1]}.*{prints[0]}"), StopSignals() as signals:
        train(load(run_file, ["run.steps=2", *changed[2:]]), MPI.COMM_WORLD, signals)


@pytest.mark.parametrize(("steps", "warned"), [(1, False), (10_000_000, True)])
def test_many_epochs_are_warned_of(capsys, run_file, steps, warned):
    assert main(["train", "--dry-run", str(run_file), "--set", f"run.steps={steps}"]) == 0
    assert ("they teach ever less" in capsys.readouterr().out) == warned


def test_ranks_are_for_a_dry_run(capsys, run_file):
    assert main(["train", str(run_file), "--ranks", "2"]) == 2
    assert "--ranks is for --dry-run" in capsys.readouterr().err


def test_of_a_launched_job_one_rank_speaks(run_file):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = ["mpirun", "-n", "2", sys.executable, "-m", "hpcllm", "train", "--dry-run", str(run_file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    assert json.loads(done.stdout)["ranks"] == 2


def test_neither_torch_nor_mpi_is_loaded(run_file):
    program = (
        "import sys; from hpcllm.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules) + 2 * ('mpi4py' in sys.modules))"
    )
    command = [sys.executable, "-c", program, "train", "--dry-run", str(run_file), "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
    assert store().exists()
