"""A run is finished when its own record says so: written last, void as soon as steps are missing, never guessed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from pytest_mpi import parallel_assert  # type: ignore[import-untyped]
from small_runs import tiny

from hpcllm.cli.main import main
from hpcllm.system.job import StopSignals
from hpcllm.training.finished import NAME, read_progress, remove_finished, write_finished
from hpcllm.training.loop import train

ROOT = Path(__file__).parents[2]
JOB = """. jobscripts/common/job.sh
HPCLLM_VENV=$1; shift
hpcllm_end_of_training "$@" && echo "code 0" || echo "code $?"
"""


@given(step=st.integers(0, 10**9), steps=st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_a_record_counts_for_as_many_steps_as_it_names(tmp_path_factory, step, steps):
    folder = tmp_path_factory.getbasetemp()
    write_finished(folder, step, Path("checkpoints/step_00000001.h5"))
    assert read_progress(folder, steps).is_finished == (step >= steps)
    remove_finished(folder)
    assert not read_progress(folder, steps).is_finished


@example(b"3")  # JSON, but no table
@example(b"[7]")
@example(b"[" * 4000)  # nested deeper than Python reads
@given(st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)))
@settings(max_examples=60, deadline=None)
def test_a_damaged_record_counts_as_none(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp()
    data = content if isinstance(content, bytes) else json.dumps({"step": content}).encode()
    (folder / NAME).write_bytes(data)
    assert not read_progress(folder, 1).is_finished


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.write_bytes(b"[" * 100_000)])
def test_what_is_no_record_is_not_opened_for_one(tmp_path, make):
    make(tmp_path / NAME)
    assert read_progress(tmp_path, 1).step is None


def test_cutting_a_record_short_never_finishes_a_run(tmp_path):
    write_finished(tmp_path, 120, None)
    whole = (tmp_path / NAME).read_bytes()
    for length in range(len(whole) - 2):
        (tmp_path / NAME).write_bytes(whole[:length])
        assert read_progress(tmp_path, 1).step is None


@pytest.mark.parallel([1, 2])
def test_train_records_its_end_and_nothing_else_does(tmp_path_factory):
    world = MPI.COMM_WORLD
    folder = world.bcast(str(tmp_path_factory.mktemp("a space")) if world.rank == 0 else None)

    def ends(steps: int, stop_at_once: bool = False) -> bool:
        """Train with so many steps; is it finished afterwards?"""
        shape = {"run": {"name": "r", "folder": folder, "steps": steps}, "mesh": {"dp": world.size}}
        config = tiny(**shape, data={"global_batch": 6}, log={"validation_every_steps": 0})
        if stop_at_once and world.rank == 0:
            (Path(folder) / "r" / "STOP").touch()
        world.Barrier()
        with StopSignals() as signals:
            train(config, world, signals)
        return read_progress(Path(folder) / "r", steps).is_finished

    parallel_assert(ends(2))
    parallel_assert(not read_progress(Path(folder) / "r", 4).is_finished)  # run.steps raised
    parallel_assert(not ends(4, stop_at_once=True))  # and it stopped early
    parallel_assert(not (Path(folder) / "r" / NAME).exists())
    parallel_assert(ends(1))  # the checkpoint is further


@pytest.fixture
def run_file(tmp_path) -> Path:
    path = tmp_path / "a run.toml"
    path.write_text(f'[run]\nname = "r"\nfolder = "{tmp_path}"\nsteps = 5\n[data]\nstore = "none"\n')
    (tmp_path / "r").mkdir()
    return path


def test_the_command_tells_by_its_exit_code_and_loads_nothing_heavy(capsys, tmp_path, run_file):
    ask = ["train", str(run_file), "--is-finished"]
    assert main(ask) == 1
    assert "no record of a last step" in capsys.readouterr().out
    write_finished(tmp_path / "r", 5, None)
    assert main([*ask, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished_step"] == 5
    assert main([*ask, "--set", "run.steps=6"]) == 1
    assert "is of step 5, and run.steps is 6" in capsys.readouterr().out
    assert main([*ask, "--dry-run"]) == 2
    code = (
        f"import sys; from hpcllm.cli.main import main; code = main({ask!r})\n"
        "sys.exit(code or ('torch' in sys.modules) + 2 * ('mpi4py' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_job_script_believes_the_record_and_no_exit_code(tmp_path, run_file):
    def ended(code: int, *arguments: str) -> tuple[str, str]:
        words = ["bash", "-c", JOB, "job", sys.prefix, str(code), str(run_file), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment, check=True)
        return done.stdout.strip(), done.stderr

    def end(code: int, *arguments: str) -> str:
        return ended(code, *arguments)[0]

    for code in (1, 2, 75):
        assert ended(code) == (f"code {code}", "")
    for code in (9, 137, 139, 255):  # of launchers, where a rank was killed or a host is gone
        answer, said = ended(code)
        assert answer == f"code {code}"
        assert "lost a rank or a node" in said
    assert end(0) == "code 1"  # the launcher lost a host, and said 0
    write_finished(tmp_path / "r", 5, None)
    assert end(0) == "code 0"
    assert end(0, "--set", "run.steps=6") == "code 1"


@pytest.mark.parametrize(
    ("machine", "begin"),
    [
        ("lumi", ["singularity", "exec", "/images/torch.sif"]),
        ("alps", ["uenv", "run", "--view=default", "pytorch/v2.9.1", "--"]),
    ],
)
def test_where_python_is_in_an_image_the_record_is_asked_for_there(tmp_path, run_file, machine, begin):
    """On the node alone the environment's Python leads nowhere; and who cannot ask believes the launcher."""
    program = tmp_path / "bin" / begin[0]
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@" >>"$SAID"; exit "$ANSWER"\n')
    program.chmod(0o755)
    script = """. jobscripts/common/job.sh
        hpcllm_machine=$1 hpcllm_start=() hpcllm_each=() hpcllm_near=""
        . "jobscripts/$1/env.sh"
        hpcllm_variables
        hpcllm_end_of_training 0 "$2" || echo "code $?"
    """
    for answer, said in ((0, ""), (1, "code 1"), (127, "")):
        environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "HPCLLM_ENV": "/env"}
        environment |= {"HPCLLM_CONTAINER": "/images/torch.sif", "SAID": str(tmp_path / "said"), "ANSWER": str(answer)}
        words = ["bash", "-c", script, "job", machine, str(run_file)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment, check=True)
        assert done.stdout.strip() == said, done.stderr
    asked = (tmp_path / "said").read_text().splitlines()[: len(begin) + 1]
    assert [Path(asked[0]).name, *asked[1:]] == [*begin, "/env/bin/python"]
