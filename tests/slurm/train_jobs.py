"""The job scripts of jobscripts/slurm, submitted to a real Slurm on two made-up nodes. Started by run.sh.

sbatch train.sbatch ---> preflight ---> train on 2 nodes x 2 tasks ---> exit code, checkpoint ---> sbatch again: goes on

From folders with spaces: of the repository, of the run, and of the Python environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from slurm_commands import environment, is_over, slurm, until

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(ROOT.glob("jobscripts/*/*.sbatch"))
LIMIT_S = 300.0
OF_OURS = ("HPCLLM_", "MPI4PY_")  # the job scripts set them
TASKS = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=30")
RUN_FILE = """
[run]
name = "a run"
steps = 20
[model]
layers = 2
hidden = 32
heads = 4
ffn = 48
[data]
store = "store.h5"
sequence_length = 32
global_batch = 8
[mesh]
pp = 2
[log]
every_steps = 1
trackers = []
"""


@dataclass(frozen=True)
class Place:
    """A repository, and the folder that its jobs are submitted from."""

    repository: Path
    here: Path

    def submit(self, script: str, *words: str, options: tuple[str, ...] = TASKS, **variables: str) -> Submitted:
        """Submit a script of jobscripts/."""
        command = ["sbatch", "--parsable", *options, str(self.repository / "jobscripts" / script), *words]
        env = environment(without=OF_OURS, **{"HPCLLM_ENV": sys.prefix, **variables})
        return Submitted(slurm(*command, cwd=self.here, env=env), self.here)

    def sbatch(self, script: str, *words: str, **keywords: Any) -> Submitted:
        """Submit, and wait for the end."""
        return self.submit(script, *words, **keywords).ended()

    @property
    def run(self) -> Path:
        return self.here / "runs" / "a run"

    def steps(self) -> list[int]:
        records = map(json.loads, (self.run / "log.jsonl").read_text().splitlines())
        return [record["step"] for record in records if "loss" in record]


@dataclass(frozen=True)
class Submitted:
    id: str
    folder: Path

    def until(self, what: Callable[[], bool]) -> None:
        until(what, LIMIT_S, lambda: self.text)

    def ended(self) -> Submitted:
        self.until(lambda: is_over(self.id))
        return self

    @property
    def code(self) -> int:
        return int(re.search(r"ExitCode=(\d+):", slurm("scontrol", "show", "job", self.id))[1])

    @property
    def text(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.id}.out"))

    def well(self) -> str:
        assert self.code == 0, self.text
        return self.text


@pytest.fixture(scope="module")
def place() -> Place:
    folder = Path(os.environ["HPCLLM_SLURM"])
    repository, here = folder / "the repository", folder / "my runs"
    here.mkdir()
    for part in ("hpcllm", "jobscripts"):
        shutil.copytree(ROOT / part, repository / part, ignore=shutil.ignore_patterns("__pycache__"))
    (here / "my run.toml").write_text(RUN_FILE)
    prepare = [sys.executable, "-m", "hpcllm", "prepare", ROOT / "hpcllm" / "pipeline", "--output", here / "store.h5"]
    subprocess.run([*prepare, "--vocabulary", "300"], check=True, timeout=LIMIT_S)
    return Place(repository, here)


def test_a_job_trains_and_the_next_one_goes_on(place):
    text = place.sbatch("slurm/train.sbatch", "my run.toml", PREFLIGHT="quick").well()
    assert text.index("-m hpcllm preflight 'my run.toml'") < text.index("-m hpcllm train 'my run.toml'")
    ranks = (place.run / "ranks.txt").read_text()
    assert [len(re.findall(rf"\b{node}\b", ranks)) for node in ("n1", "n2")] == [2, 2], ranks
    assert (place.run / "checkpoints" / "step_00000020.h5").exists()
    assert place.steps() == list(range(1, 21))

    text = place.sbatch("slurm/train.sbatch", "my run.toml", "--set", "run.steps=30", PREFLIGHT="0").well()
    assert "preflight" not in text
    assert re.search(r"^goes on from .*step_00000020\.h5", text, re.MULTILINE), text
    assert place.steps() == list(range(1, 31))
    assert (place.run / "checkpoints" / "step_00000030.h5").exists()


def test_a_run_that_stops_early_ends_the_job_with_its_exit_code(place):
    """All ranks end with 75, and not at one moment: none may be killed meanwhile."""
    sets = ("--set", "run.name=stopped", "--set", "run.steps=1000000", "--set", "run.requeue=false")
    log = place.here / "runs" / "stopped" / "log.jsonl"
    job = place.submit("slurm/train.sbatch", "my run.toml", *sets, PREFLIGHT="0")
    job.until(lambda: log.exists() or is_over(job.id))
    slurm("scancel", "--signal=USR1", job.id)
    assert job.ended().code == 75, job.text
    assert "stopped by SIGUSR1" in job.text
    assert "exit code 75: stopped with a checkpoint" in job.text


def test_the_allocation_is_looked_at_and_measured(place):
    assert "4 ranks" in place.sbatch("slurm/preflight.sbatch", "my run.toml", "--quick").text
    words = ("allreduce", "--sizes", "1K", "--codecs", "raw", "--json", "measured.json")
    place.sbatch("slurm/perf.sbatch", *words).well()
    assert json.loads((place.here / "measured.json").read_text())


def test_what_preflight_refuses_is_not_trained(place):
    job = place.sbatch("slurm/train.sbatch", "my run.toml", "--set", "mesh.pq=2", "--set", "run.name=refused")
    assert job.code == 2, job.text
    assert "nothing is trained on these nodes" in job.text
    assert not (place.here / "runs" / "refused").exists()


def test_python_starts_from_the_disk_of_each_node(place, tmp_path):
    """A small environment that finds all packages in this one; /dev/shm is each made-up node's own."""
    small = tmp_path / "an environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", small], check=True, timeout=LIMIT_S)
    (site,) = small.glob("lib/python*/site-packages")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "all.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    for library in Path(sys.prefix, "lib").glob("*mpi*"):  # the MPI that came as a wheel
        (small / "lib" / library.name).symlink_to(library)
    pack = f'. "{place.repository}/jobscripts/common/install.sh"; hpcllm_inside=() HPCLLM_VENV="{small}"; hpcllm_pack'
    subprocess.run(["bash", "-euc", pack], check=True, timeout=LIMIT_S)
    variables = {"HPCLLM_ENV": str(small), "HPCLLM_NEAR": "/dev/shm", "PREFLIGHT": "0"}
    text = place.sbatch(
        "slurm/train.sbatch", "my run.toml", "--set", "run.name=near", "--set", "run.steps=3", **variables
    ).well()
    assert re.search(r"/dev/shm/hpcllm-\d+/environment/bin/python -m hpcllm train", text)
    assert (place.here / "runs" / "near" / "checkpoints" / "step_00000003.h5").exists()
    assert not list(Path("/dev/shm").glob("hpcllm-*"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: "-".join(path.parts[-2:]))
def test_slurm_takes_the_head_of_every_script(script):
    command = ["sbatch", "--test-only", script]
    done = subprocess.run(command, env=environment(without=OF_OURS), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "on nodes n[1-2]" in done.stderr
