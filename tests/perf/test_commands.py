"""`python -m hpcllm.perf`: quick help, exit codes, one line for a mistake, JSON alone on standard output."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_jobs import environment

from hpcllm.perf.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "mpi4py", "numpy", "matplotlib", "numba", "tqdm"}
LIMIT_S = 100.0


def run(*words: str, cwd: Path = ROOT, python: tuple[str, ...] = (), launcher: tuple[str, ...] = ()):
    return subprocess.run(
        [*launcher, sys.executable, *python, "-m", "hpcllm.perf", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
    )


def two_ranks() -> tuple[str, ...]:
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun on this machine")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=LIMIT_S).stdout
    spread = ("--map-by", ":OVERSUBSCRIBE") if "Open MPI" in version or "prte" in version.lower() else ()
    return (mpirun, *spread, "-n", "2")


@pytest.mark.parametrize("words", [["--help"], ["allreduce", "--help"], ["codec", "--help"], ["plot", "--help"]])
def test_help_imports_nothing_heavy(words):
    answer = run(*words, python=("-X", "importtime"))
    assert answer.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in answer.stderr.splitlines()}
    assert "argparse" in imported  # the list is one of imports
    assert imported & HEAVY == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m hpcllm.perf {command}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["allredcue"], ["allreduce", "--szies", "1K"], ["p2p", "--check"], ["plot"]])
def test_a_command_line_that_is_none_has_exit_code_2(words, capsys):
    assert main(words) == 2
    usage, *_, said = capsys.readouterr().err.splitlines()
    command = words[0] if words[:1] and words[0] in COMMANDS else ""
    assert usage.startswith(f"usage: python -m hpcllm.perf {command}")
    assert said.startswith("hpcllm: error: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["allreduce", "--sizes", "1Q"], "--sizes '1Q'"),
        (["allreduce", "--codecs", "int3"], "codec 'int3' is unknown"),
        (["allreduce", "--algorithms", "rnig"], "'rnig' is unknown; valid for allreduce"),
        (["allreduce", "--plot", "x.jpg"], "'x.jpg' cannot be drawn"),
        (["allreduce", "--json", "no folder/x.json"], "cannot write 'no folder/x.json'"),
        (["allreduce", "--json=."], "it is a folder"),
        (["allreduce", "--tuning", "no such.toml"], "no such.toml"),
        (["codec", "--dtype", "int8"], "--dtype 'int8' is unknown; valid: bfloat16, float16, float32"),
        (["p2p"], "p2p needs two ranks"),
        (["plot", "no such.json", "--plot", "x.png"], "cannot read records from 'no such.json'"),
        (["plot", "no such.json", "--plot", "x.pdf"], "'x.pdf' cannot be drawn"),
        (["plot", "no such.json"], "nothing to do"),
        (["plot", "no such.json", "--json", "--markdown"], "both print"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_with_exit_code_2_and_leaves_nothing(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("hpcllm: error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_of_all_ranks_is_said_once():
    answer = run("allreduce", "--sizes", "1Q", launcher=two_ranks())
    assert answer.returncode == 2
    assert answer.stderr.count("hpcllm: error: --sizes '1Q' is no size") == 1


@pytest.mark.full(reason="two jobs; a sixth of a minute")
def test_two_ranks_give_json_alone_on_standard_output_and_a_picture(tmp_path):
    words = ["allreduce", "--sizes", "1K:4K", "--algorithms", "mpi,ring", "--codecs", "raw,bf16", "--check"]
    folder = tmp_path / "a folder"
    folder.mkdir()
    answer = run(*words, "--iterations", "2", "--json", "-", "--plot", "x.png", cwd=folder, launcher=two_ranks())
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(answer.stdout)
    assert {row["bytes"] for row in rows} == {1024, 2048, 4096}
    assert {row["ranks"] for row in rows} == {2}
    assert {(row["algorithm"], row["codec"]) for row in rows} == {("mpi", "raw"), ("ring", "raw"), ("ring", "bf16")}
    assert "mpi bf16 left out" in answer.stderr
    assert all(row["library"].split()[0] in ("Open", "MPICH") for row in rows)
    assert "# allreduce, float32, 2 ranks on 1 node" in answer.stderr
    assert (folder / "x.png").read_bytes().startswith(b"\x89PNG")


def test_saved_records_become_one_picture_and_one_table(tmp_path, capsys):
    for name in ("a", "b"):
        path = str(tmp_path / f"{name}.json")
        assert main(["broadcast", "--sizes", "4,8", "--iterations", "1", "--algorithms", "mpi", "--json", path]) == 0
    capsys.readouterr()
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(["plot", *files, "--plot", str(tmp_path / "both.svg"), "--markdown"]) == 0
    assert capsys.readouterr().out.count("| mpi | raw |") == 4
    assert b"<svg" in (tmp_path / "both.svg").read_bytes()
    each = [json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json")]
    assert main(["plot", *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == each[0] + each[1]
    assert main(["plot", *files, "--json", str(tmp_path / "both.json"), "--markdown"]) == 0
    assert capsys.readouterr().out.count("| mpi | raw |") == 4
    assert main(["plot", str(tmp_path / "both.json"), "--json"]) == 0  # what it writes it reads
    assert json.loads(capsys.readouterr().out) == each[0] + each[1]


def test_what_was_measured_before_ctrl_c_is_kept(tmp_path):
    """In one process; with many, the launcher passes the signal on, or ends the job after the file is already there."""
    path = tmp_path / "x.json"
    words = ["codec", "--sizes", "64K:64M", "--codecs", "bf16", "--iterations", "40", "--json", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcllm.perf", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    deadline = time.monotonic() + LIMIT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert "stopped by SIGINT" in err
    rows = json.loads(path.read_text())
    assert 0 < len({row["bytes"] for row in rows}) < 11
    assert len([line for line in out.splitlines() if line and not line.startswith("#")]) == len(rows) + 1
