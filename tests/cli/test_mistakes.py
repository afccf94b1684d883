"""Mistakes that people make: what was typed, the exit code, and the words of the answer that name the fix.

Each row runs in this process, in an empty folder with the files of `folder`; those that need a shell, a pipe or a
terminal are below the table. A traceback, an empty answer and an answer without the fix are all failures.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from mpi4py import MPI
from small_runs import make_store

from hpcllm.cli.main import main

ROOT = Path(__file__).parents[2]
GPT = ("--machine", "frontier", "--model", "gpt3-175b")
SHAPE = ("--stages", "4", "--microbatches", "8")

MISTAKES = [  # command line, words of the answer; the exit code is 2
    # a word that is none
    ("", "required: COMMAND"),
    ("trian run.toml", "did you mean train?"),
    ("prepair x", "did you mean prepare?"),
    ("Plan", "did you mean plan?"),
    ("checkpoint", "required: COMMAND"),
    ("checkpoint inspct x.h5", "did you mean inspect?"),
    ("checkpoint verfy x.h5", "did you mean verify?"),
    ("perf allredcue", "did you mean allreduce?"),
    ("perf", "usage: hpcllm perf"),
    ("completion fish", "valid: bash, zsh, tcsh"),
    # an option that is none, or that another command has
    ("train run.toml --steps 10", "--set run.steps=10"),
    ("train run.toml --steps=10", "--set run.steps=10"),
    ("train run.toml --lr 1e-3", "--set optimizer.learning_rate=1e-3"),
    ("train run.toml --batch-size 8", "--set data.global_batch=8"),
    ("train run.toml --sett run.steps=1", "did you mean --set?"),
    ("train run.toml --pp 2", "--set mesh.pp=2"),
    ("train run.toml --dryrun", "did you mean --dry-run?"),
    ("memory run.toml --np 4", "did you mean --ranks?"),
    ("plan --rank 3", "did you mean --row?"),
    ("schedule 1f1b --draw x.png", "did you mean --plot?"),
    ("perf allreduce --szies 1K", "did you mean --sizes?"),
    ("perf p2p --check", "usage: hpcllm perf p2p"),
    ("prepare text.txt", "required: --output"),
    ("generate run.toml", "one of the arguments --prompt --prompts is required"),
    # a name that is near to a valid one
    ("plan --machine frontir --model gpt3-175b --devices 64 --global-batch 64", "did you mean frontier?"),
    ("plan --machine frontier --model gpt3-175 --devices 64 --global-batch 64", "did you mean gpt3-175b?"),
    ("schedule 1fb1 --stages 4 --microbatches 8", "1f1b"),
    ("perf codec --codecs int9", "did you mean int8?"),
    ("perf codec --dtype float64", "did you mean float16?"),
    ("keys optimiser", "did you mean optimizer?"),
    ("keys frobnicate", "tables: run, model"),
    # a key of the run file
    ("memory run.toml --set optimizer.lr=1", "did you mean optimizer.learning_rate?"),
    ("memory run.toml --set lr=1", "optimizer.learning_rate=1"),
    ("memory run.toml --set mesh.dpp=2", "did you mean mesh."),
    ("memory run.toml --set modle.layers=2", "did you mean model"),
    ("memory run.toml --set model.preset=tinny", "did you mean tiny?"),
    ("memory run.toml --set pipeline.schedule=1fb1", "did you mean '1f1b'?"),
    ("memory run.toml --set communication.gradients=int9", "did you mean int8?"),
    ("memory run.toml --set run.steps", "should read table.key=value"),
    ("memory run.toml --set run.steps=many", "should be a whole number"),
    ("memory run.toml --set run.steps=0", "valid: 1 to 1e9"),
    # files
    ("train missing.toml --dry-run", "cannot read the run file 'missing.toml'"),
    ("memory .", "cannot read the run file"),
    ("memory broken.toml", "not valid TOML"),
    ("memory store.h5", "cannot read the run file"),
    ("train run.toml --dry-run --set data.store=missing.h5", "missing.h5"),
    ("train run.toml --dry-run --set data.store=text.txt", "text.txt"),
    ("checkpoint inspect missing.h5", "there is no checkpoint 'missing.h5'"),
    ("checkpoint inspect text.txt", "is no checkpoint"),
    ("checkpoint inspect store.h5", "is no checkpoint"),
    ("checkpoint inspect empty", "a run folder has some in checkpoints/"),
    ("checkpoint diff text.txt store.h5", "is no checkpoint"),
    ("checkpoint compress text.txt new.h5", "is no checkpoint"),
    ("checkpoint convert text.txt new", "is no checkpoint"),
    ("checkpoint verify missing.h5", "there is no checkpoint 'missing.h5'"),
    ("generate text.txt --prompt x", "is no checkpoint"),
    ("generate empty --prompt x", "checkpoint"),
    ("report empty", "empty"),
    ("report missing", "missing"),
    ("init run.toml", "is there already; valid: the name of a new file"),
    ("init missing/run.toml", "cannot be written"),
    ("perf plot missing.json --plot x.png", "cannot read records from 'missing.json'"),
    ("perf plot text.txt --plot x.png", "cannot read records from 'text.txt'"),
    ("perf plot text.txt", "--plot PICTURE.png"),
    # problems and tasks
    ("problems sotr:4", "did you mean sort?"),
    ("problems sort:x", "'x' is out of range; valid: a whole number"),
    ("problems sort:4 --size 5", "sort:4 with --size 5; valid: one of both"),
    ("evaluate store.h5 --task sotr:4", "did you mean sort:4?"),
    ("evaluate store.h5 --task gsm9k=rows.jsonl", "did you mean gsm8k=rows.jsonl?"),
    ("judge text.txt --memory-mib 1", "--memory-mib: '1' is out of range; valid: a whole number, 64 to"),
    # output
    ("schedule 1f1b --stages 4 --microbatches 8 --plot x.pdf", "valid: a name that ends in .png or .svg"),
    ("schedule 1f1b --stages 4 --microbatches 8 --plot missing/x.svg", "cannot be written"),
    ("schedule 1f1b --stages 4 --microbatches 8 --json missing/x.json", "is not there or not writable"),
    ("memory run.toml --json=empty", "it is a folder"),
    ("schedule 1f1b --stages 4 --microbatches 8 --json answer", "a file for --json ends in .json"),
    ("prepare text.txt --output missing/x.h5", "missing"),
    # numbers and ranks
    ("memory run.toml --ranks 0", "--ranks: '0' is no count; valid: 1 to"),
    ("memory run.toml --ranks four", "--ranks: 'four' is no count"),
    ("memory run.toml --ranks 6 --set mesh.pp=4", "does not divide the 6 ranks"),
    ("memory run.toml --ranks 2 --set mesh.tp=3", "mesh.tp = 3"),
    ("layout run.toml --ranks 8", "Give --ranks-per-node"),
    ("train run.toml --ranks 4", "--ranks is for --dry-run"),
    ("generate text.txt --prompt x --tp 0", "--tp: '0' is no count"),
    ("schedule 1f1b", "needs --stages, --microbatches"),
    ("schedule 1f1b --stages four --microbatches 8", "'four' is no count"),
    ("plan", "plan needs --machine"),
    ("perf allreduce --sizes 1Q", "valid: 4, 64K, 16M, 1G"),
    ("perf allreduce --iterations x", "valid: a whole number"),
    ("perf step --calibrate", "--json FILE"),
    ("checkpoint compress text.txt new.h5 --level 30", "a whole number, 1 to 19"),
    ("prepare  --output x.h5 missing", "missing"),
    # what was copied from elsewhere
    ("train run.toml —steps 10", "no hyphen, as on some web pages; did you mean --set run.steps=10?"),
    ("train run.toml –set run.steps=10", "did you mean --set?"),  # noqa: RUF001
    ("train run.toml --dry-run —-report", "did you mean --report?"),
    ("memory quotes.toml", "line 2 has “, write a straight quotation mark"),
    ("memory run.json", "not valid TOML"),
    ("memory steps.toml", "did you mean run.steps?"),
    # a word in another's place
    ("run.toml", "did you mean train run.toml?"),
    ("help", "did you mean --help?"),
    ("version", "did you mean --version?"),
    ("--verison", "did you mean --version?"),
    ("-n 4 train run.toml", "the command comes first"),
    ("perf --sizes 1K allreduce", "the command comes first"),
    ("plan run.toml", "this command reads no run file"),
    ("memory run.toml run.toml", "unrecognized arguments: run.toml"),
    ("generate empty --prompt x --steps 5", "did you mean --tokens?"),
    ("generate empty --prompt", "(--prompt PROMPT | --prompts FILE) [OPTIONS]"),
    ("checkpoint inspect empty --ranks 4", "those that mpirun -n N or srun starts"),
    ("preflight run.toml --np 4", "those that mpirun -n N or srun starts"),
    # values: spaces, units, exponents
    ("train run.toml --set", "--set: expected one argument"),
    ("train run.toml --set run.steps = 10", "write --set run.steps=VALUE without spaces"),
    ("memory run.toml --set run.steps=1e6", "should be a whole number; write 1000000"),
    ("memory run.toml --set communication.bucket_mib=8MB", "'8MB' should be a number"),
    ("memory run.toml --set data.global_batch=4k", "'4k' should be a whole number"),
    ("memory run.toml --ranks 1e3", "--ranks: '1e3' is no count"),
    ("perf allreduce --sizes 1M:1K", "the first is above the last"),
    ("schedule 1f1b --stages 4 --microbatches 8 --bytes 4XB", "valid: 4194304, 512KiB, 4MiB"),
    # files of another kind
    ("train store.h5 --dry-run", "an HDF5 file: byte"),
    ("memory empty", "it is a folder"),
    ("report run.toml", "is no folder of a run"),
    ("prepare store.h5 --output x.h5", "unknown suffix '.h5'"),
    ("prepare text.txt --output x.h5 --template llama3", "give --chat as well"),
    ("prepare text.txt --output x.h5 --chat --field text", "--field is of texts"),
    ("prepare text.txt --output x.h5 --chat", "file that holds no rows"),
    ("prepare text.txt --output x.h5 --chat --template alpaca", "chatml"),
    ("prepare text.txt --output x.h5 --chat --template tokenizer", "needs --tokenizer"),
    ("prepare --chat --output x.h5", "chats need inputs"),
    ("store", "required: COMMAND"),
    ("store smaple store.h5", "did you mean sample?"),
    ("store info missing.h5", "there is no token store 'missing.h5'"),
    ("store sample text.txt", "text.txt"),
    ("prepare text.txt --output text.txt", "exists and is not a token store"),
    ("schedule run.toml --stages 4 --microbatches 8", "there is no schedule 'run.toml'"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a run file, a broken one, a text, an HDF5 file that is no checkpoint, and an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("run.toml").write_text('[run]\nname = "mine"\n[model]\nvocabulary = 512\n')
    Path("broken.toml").write_text("[run\n")
    Path("quotes.toml").write_text("[run]\nname = “mine”\n")
    Path("run.json").write_text('{"run": {"steps": 10}}\n')
    Path("steps.toml").write_text("steps = 10\n")
    Path("text.txt").write_text("once upon a time\n" * 40)
    Path("empty").mkdir()
    with h5py.File("store.h5", "w") as file:
        file["anything"] = [1.0, 2.0]
    return tmp_path


def test_the_table_is_long_and_says_each_thing_once():
    assert len(MISTAKES) >= 90
    assert len({command for command, _ in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize(("command", "fix"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_answered_with_its_fix_and_exit_code_2(folder, capsys, command, fix):
    before = sorted(path.name for path in folder.rglob("*"))
    assert main(command.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    *usage, last = said.err.splitlines()
    assert last.startswith("hpcllm: error: ")
    assert fix in said.err
    if usage:  # of the command that was called
        words = [word for word in command.split() if not word.startswith("-")]
        name = "hpcllm" if words[:1] and f"'{words[0]}' is unknown" in last else " ".join(["hpcllm", *words[:1]])
        assert usage[0].startswith(f"usage: {name}")
        assert len(usage) <= 3
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_json_before_the_run_file_does_not_write_into_it(capsys):
    """argparse alone would take the run file as the FILE of --json."""
    text = Path("run.toml").read_text()
    assert main(["memory", "--json", "run.toml"]) == 0
    assert capsys.readouterr().out.startswith("{")
    assert Path("run.toml").read_text() == text


@pytest.mark.parametrize("name", ["x.json", "a folder/x.json"])
def test_json_goes_into_a_file_beside_the_text(capsys, name):
    Path("a folder").mkdir()
    assert main(["memory", "run.toml", "--json", name]) == 0
    assert "ranks together" in capsys.readouterr().out
    assert Path(name).read_text().startswith("{")
    assert [path.name for path in Path(name).parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "command",
    [
        "schedule 1F1B --stages 2 --microbatches 2",
        "memory run.toml --set communication.gradients=INT8 --set model.preset=Tiny",
        "plan --machine Frontier --model GPT3-175B --layout tp=8,pp=8,dp=2 --global-batch 64",
        "layout run.toml --ranks 8 --set run.machine=LUMI-G",
    ],
)
def test_names_are_taken_in_any_case(capsys, command):
    assert main(command.split()) == 0
    assert capsys.readouterr().out


def run(command: str, **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, env=env)


def test_a_log_level_that_is_none_is_a_mistake():
    answer = run(f"'{sys.executable}' -m hpcllm presets", HPCLLM_LOG="loud")
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
    assert "valid: debug, info, warning" in answer.stderr


def test_a_closed_pipe_is_no_mistake():
    answer = run(f"set -o pipefail; '{sys.executable}' -m hpcllm keys | head -1")
    assert (answer.returncode, answer.stderr, answer.stdout) == (0, "", "[run]\n")


def test_narrow_terminals_and_no_home_folder_change_no_answer():
    usual = run(f"'{sys.executable}' -m hpcllm train run.toml --steps 10")
    narrow = run(f"'{sys.executable}' -m hpcllm train run.toml --steps 10", COLUMNS="40", HOME="")
    assert (narrow.returncode, usual.returncode) == (2, 2)
    assert narrow.stderr.splitlines()[-1] == usual.stderr.splitlines()[-1]
    homeless = run(f"env -u HOME '{sys.executable}' -m hpcllm presets")
    assert (homeless.returncode, homeless.stderr) == (0, "")


def test_a_token_store_is_told_from_a_checkpoint(folder, capsys):
    make_store(folder / "empty", MPI.COMM_SELF)
    for words in (["generate", "empty/store.h5", "--prompt", "x"], ["checkpoint", "convert", "empty/store.h5", "new"]):
        assert main(words) == 2
        assert "is a token store, no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "coloured"), [({"TERM": "xterm"}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_errors_have_colour_on_a_terminal_alone(settings, coloured):
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {"TERM": "xterm"}
    env |= {"PYTHONPATH": str(ROOT)} | settings
    ended = subprocess.run([sys.executable, "-m", "hpcllm", "trian"], stderr=theirs, env=env, timeout=100)
    os.close(theirs)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert ended.returncode == 2
    assert ("\x1b[" in said) == coloured
    assert max(map(len, said.replace("\x1b[1;31m", "").replace("\x1b[0m", "").splitlines())) <= 80
