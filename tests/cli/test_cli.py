"""The commands: quick help, exit codes, and one line for a mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpcllm
from hpcllm.cli.main import main

ROOT = Path(__file__).parents[2]
COMMANDS = ["prepare", "preflight", "train", "plan", "generate", "checkpoint", "schedule"]
HEAVY = {"torch", "mpi4py", "h5py", "numpy", "tokenizers", "zstandard"}


def run(*arguments: str, cwd: Path = ROOT, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *python, "-m", "hpcllm", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
    )


def test_help_answers_in_under_half_a_second():
    """The best of five, in time of a core: what the command takes, not what else the machine does."""
    times_s = []
    for _ in range(5):
        start = os.times()
        answer = run("--help")
        end = os.times()
        times_s.append(end.children_user + end.children_system - start.children_user - start.children_system)
        assert answer.returncode == 0
        if times_s[-1] < 0.5:
            break
    assert min(times_s) < 0.5
    assert all(command in answer.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["train", "--help"], ["checkpoint", "verify", "--help"]]
)
def test_help_imports_nothing_heavy(arguments):
    answer = run(*arguments, python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in answer.stderr.splitlines()}
    assert "argparse" in imported  # the list is one of imports
    assert imported & HEAVY == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: hpcllm {command}" in capsys.readouterr().out


def test_the_version_is_the_package_s(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"hpcllm {hpcllm.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian", "run.toml"],
        ["train"],
        ["train", "run.toml", "--sett", "a.b=1"],
        ["generate", "file"],
        ["prepare"],
        ["prepare", "", "--output", "x.h5"],
    ],
)
def test_a_command_line_that_is_none_has_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    assert "hpcllm: error: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "no such.toml"], "no such.toml"),
        (["train", "empty.toml"], "data.store is missing"),
        (["train", "empty.toml", "--set", "mesh.dpp=3"], "unknown key mesh.dpp"),
        (["train", "empty.toml", "--set", "mesh"], "table.key=value"),
        (["train", "empty.toml", "--set", "data.store=no such.h5"], "no such.h5"),
        (["train", "empty.toml", "--set", "mesh.pp=3"], "mpirun -n 3"),
        (["train", "broken.toml"], "broken.toml"),
        (["generate", "no such.h5", "--prompt", "x"], "no such.h5"),
        (["checkpoint", "inspect", "no such.h5"], "no such.h5"),
        (["checkpoint", "verify", "no such.h5", "--json"], "no such.h5"),
        (["prepare", "no such folder", "--output", "out.h5"], "no such folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_with_exit_code_2_and_leaves_nothing(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("empty.toml").write_text("")
    Path("broken.toml").write_text("[run\n")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("hpcllm: error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert captured.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.toml", "empty.toml"]


def test_a_process_of_its_own_ends_the_same_way(tmp_path):
    answer = run("train", "no such.toml", cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.startswith("hpcllm: error: cannot read the run file 'no such.toml'")
    assert answer.stderr.count("\n") == 1
    assert answer.stdout == ""


@pytest.mark.parametrize(
    "module",
    [
        "hpcllm.inference.generate",
        "hpcllm.checkpoint.inspect",
        "hpcllm.config.schema",
        "hpcllm.cli.dry_run",
        "hpcllm.plan.report",
    ],
)
def test_what_runs_on_a_login_node_does_not_start_mpi(module):
    """There, MPI libraries of some machines end a process that was not started by the batch system."""
    code = f"import sys, {module}; sys.exit('mpi4py.MPI' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=100, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">/dev/full", 1, "hpcllm: error: cannot write the output: No space left on device\n"),
        (">&-", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_is_no_riddle(redirected, code, said):
    """The exit code is the command's own, and nothing but one line is said."""
    command = (
        f"set -o pipefail; '{sys.executable}' -m hpcllm schedule --compare --stages 4 --microbatches 8 {redirected}"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, cwd=ROOT, env=env)
    assert (ended.returncode, ended.stderr) == (code, said)
