"""Job scripts say where each line comes from, agree with the numbers of the machine, and show what they would do.

Without a batch system or modules: DRY_RUN=1. tests/slurm/train_jobs.py submits some of them to a real Slurm, .ci/run
checks them all by shellcheck.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from hpcllm.codecs.gpu.launch import PACKAGES
from hpcllm.config import machines

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "jobscripts"
MACHINE_OF = {  # of each folder, the file in hpcllm/config/machines
    "frontier": "frontier",
    "lumi": "lumi-g",
    "perlmutter": "perlmutter",
    "leonardo": "leonardo",
    "alps": "alps",
    "aurora": "aurora",
    "el-capitan": "el-capitan",
}
SUFFIXES = {"aurora": "pbs", "el-capitan": "flux"}  # of the batch system, where it is not Slurm
VERBS = ("train", "perf", "preflight", "run")
SCRIPTS = sorted(path for suffix in ("sbatch", "pbs", "flux") for path in FOLDERS.glob(f"*/*.{suffix}"))
RUN = "jobscripts/local/tiny.toml"
WORDS = {"train": [RUN], "perf": [], "preflight": [RUN], "run": ["prepare", "--output", "store.h5"]}


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR", "USER")}
    return subprocess.run(
        [str(word) for word in command],
        env={**kept, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        stdin=subprocess.DEVNULL,
    )


def dry_run(script: Path, *arguments: str, **environment: str) -> list[str]:
    done = run("bash", script, *arguments, DRY_RUN="1", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def script_of(folder: str, verb: str) -> Path:
    return FOLDERS / folder / f"{verb}.{SUFFIXES.get(folder, 'sbatch')}"


def options(script: Path) -> dict[str, str]:
    """What the head of a script asks for."""
    words = " ".join(re.findall(r"^#(?:SBATCH|PBS|flux:) (.*)", script.read_text(), re.MULTILINE)).split()
    return dict(word.partition("=")[::2] for word in words)


def started(lines: list[str]) -> list[list[str]]:
    """The commands by which ranks are started, as words."""
    launchers = ("srun ", "mpiexec ", "flux run ")
    return [shlex.split(line) for line in lines if line.startswith(launchers) and "ntasks-per-node" not in line]


def test_every_machine_has_every_script():
    assert {path.relative_to(FOLDERS).as_posix() for path in SCRIPTS} == {
        script_of(folder, verb).relative_to(FOLDERS).as_posix() for folder in ("slurm", *MACHINE_OF) for verb in VERBS
    }
    for folder in ("slurm", *MACHINE_OF):
        assert (FOLDERS / folder / "env.sh").exists()
        assert (FOLDERS / folder / "install.sh").exists()


@pytest.mark.parametrize("folder", ["slurm", *MACHINE_OF])
def test_scripts_of_a_machine_differ_in_what_they_ask_for_and_in_their_verb_alone(folder):
    bodies = set()
    for verb in VERBS:
        body = re.sub(r"^#.*\n", "", script_of(folder, verb).read_text(), flags=re.MULTILINE)
        assert f"hpcllm_job {folder} {verb} " in body
        bodies.add(body.replace(f" {folder} {verb} ", " MACHINE VERB "))
    assert len(bodies) == 1


@pytest.mark.parametrize("folder", MACHINE_OF)
def test_every_line_of_an_environment_has_a_reason_and_a_source(folder):
    """On its line, or in the comment above it: [1], as the head of the file lists them."""
    text = (FOLDERS / folder / "env.sh").read_text()
    head = text.split("\n\n")[0]
    known = set(re.findall(r"^#     (\[\d\])", head, re.MULTILINE))
    assert len(known) >= 3
    assert "Not run on this machine by us" in head
    lines = text.splitlines()
    checked = 0
    for number, line in enumerate(lines):
        if not re.match(r"\s+(export \w+=|hpcllm_load )", line):
            continue
        above = number
        while lines[above - 1].lstrip().startswith("#"):
            above -= 1
        comment = " ".join([*lines[above:number], line.partition(" #")[2]])
        assert set(re.findall(r"\[\d\]", re.sub(r"\[(\d),[^]]*\]", r"[\1]", comment))) & known, line
        assert len(re.sub(r"\[\d[^]]*\]|#", "", comment).split()) >= 2 or re.search(r"# \[\d\]$", line), (
            f"no reason: {line}"
        )
        checked += 1
    assert checked >= 5


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(FOLDERS).as_posix())
def test_the_head_says_that_it_was_not_run_there(script):
    assert script.parent.name == "slurm" or "Not run on this machine by us" in script.read_text()


def test_no_script_has_a_path_or_an_account_of_somebody():
    for path in [*SCRIPTS, *FOLDERS.glob("*/*.sh"), FOLDERS / "README.md"]:
        text = path.read_text()
        assert not re.search(r"/home/|/work/|/users/|--account=|-A [a-z]+\d", text), path
        assert not re.search(r"https?://", text), path  # documents by their names; no package index


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(FOLDERS).as_posix())
def test_a_dry_run_ends_with_the_command_of_all_ranks(script):
    lines = dry_run(script, *WORDS[script.stem])
    assert lines[0].startswith(("sbatch --nodes=2 ", "qsub -l select=2 ", "flux batch --nodes=2 "))
    commands = started(lines)
    ends = {
        "train": [["hpcllm", "preflight", RUN], ["hpcllm", "train", RUN]],
        "perf": [["hpcllm.perf", "tune", "--output", "tuning.toml"]],
        "preflight": [["hpcllm", "preflight", RUN]],
        "run": [["hpcllm", "prepare", "--output", "store.h5"]],
    }[script.stem]
    assert len(commands) == len(ends)
    for command, end in zip(commands, ends, strict=True):
        assert command[command.index("-m") + 1 :][: len(end)] == end
        assert any(word.startswith("OMP_NUM_THREADS=") for word in lines)


@pytest.mark.parametrize("folder", MACHINE_OF)
def test_each_device_of_a_node_gets_one_rank(folder):
    per_node = machines.load(MACHINE_OF[folder])["device"]["per_node"]
    for verb in VERBS:
        asked = options(script_of(folder, verb))
        (command, *_) = started(dry_run(script_of(folder, verb), *WORDS[verb]))
        if folder == "aurora":
            assert command[command.index("--ppn") + 1] == str(per_node)
        elif folder == "el-capitan":
            assert {"--nodes=2", f"--ntasks={2 * per_node}", "--gpus-per-task=1"} <= set(command)
        else:
            assert asked["--ntasks-per-node"] == asked["--gpus-per-node"] == str(per_node)
            assert f"--cpus-per-task={asked['--cpus-per-task']}" in command
        if any("one_device.sh" in word for word in command):
            devices = command[next(i for i, word in enumerate(command) if word.endswith("one_device.sh")) + 2]
            assert sorted(devices.split(","), key=int) == [str(device) for device in range(per_node)]


def cores_of(text: str) -> set[int]:
    first, last = map(int, text.split("-"))
    return set(range(first, last + 1))


def cores_of_ranks(folder: str) -> list[set[int]]:
    """The cores that the command line of a machine gives to each rank of a node, where it says them."""
    (option,) = [word for word in started(dry_run(script_of(folder, "preflight")))[0] if word.startswith("--cpu-bind")]
    if option.startswith("--cpu-bind=list:"):
        return [cores_of(text) for text in option.removeprefix("--cpu-bind=list:").split(":")]
    masks = [int(mask, 16) for mask in option.removeprefix("--cpu-bind=mask_cpu:").split(",")]
    return [{core for core in range(mask.bit_length()) if mask >> core & 1} for mask in masks]


@pytest.mark.parametrize("folder", ["frontier", "lumi", "perlmutter", "alps"])
def test_ranks_of_a_node_can_open_one_another_s_device_memory(folder):
    """All devices of a node are in one control group: srun hands none of them out, one_device.sh hides the others."""
    for verb in VERBS:
        for command in started(dry_run(script_of(folder, verb), *WORDS[verb])):
            options_of_gpus = [word for word in command if word.startswith(("--gpus-per-task", "--gpu-bind"))]
            assert set(options_of_gpus) <= {"--gpu-bind=none"}
            assert sum(word.endswith("one_device.sh") for word in command) == 1


@pytest.mark.parametrize("folder", ["frontier", "lumi", "aurora"])
def test_each_rank_runs_on_the_cores_beside_its_device_and_on_no_others(folder):
    """Rank i has device i there, so the lists are in the order of the devices."""
    machine = machines.load(MACHINE_OF[folder])
    near = [cores_of(text) for text in machine["device"]["near_cores"]]
    assert cores_of_ranks(folder) == near
    assert len(set().union(*near)) == sum(map(len, near)) <= machine["cpu"]["cores_per_node"]


def test_ranks_of_perlmutter_have_the_device_beside_their_cores():
    """Slurm hands out cores in order, 16 a rank: rank 0 has cores 0-15."""
    machine = machines.load("perlmutter")
    near = [cores_of(text) for text in machine["device"]["near_cores"]]
    command = started(dry_run(script_of("perlmutter", "preflight")))[0]
    devices = [int(device) for device in command[command.index("CUDA_VISIBLE_DEVICES") + 1].split(",")]
    cores = int(options(script_of("perlmutter", "train"))["--cpus-per-task"]) // 2  # two threads a core
    for rank, device in enumerate(devices):
        assert near[device] == set(range(rank * cores, (rank + 1) * cores))


@pytest.mark.parametrize("folder", ["frontier", "lumi"])
def test_threads_fill_the_cores_of_a_rank(folder):
    near = machines.load(MACHINE_OF[folder])["device"]["near_cores"]
    assert "OMP_NUM_THREADS=7" in [line.replace('"', "") for line in dry_run(script_of(folder, "train"), RUN)]
    assert {len(cores_of(text)) for text in near} == {7}
    assert options(script_of(folder, "train"))["--cpus-per-task"] == "7"


@pytest.mark.parametrize("folder", [folder for folder in ("slurm", *MACHINE_OF) if folder not in SUFFIXES])
def test_a_training_job_may_come_again_and_is_told_of_its_end(folder):
    asked = options(script_of(folder, "train"))
    assert "--requeue" in asked
    assert asked["--open-mode"] == "append"
    assert asked["--signal"].startswith("USR1@")  # to the ranks; B: would be the batch shell alone
    command = started(dry_run(script_of(folder, "train"), RUN, "--set", "run.requeue=false"))[-1]
    settings = [word for word in command if word.startswith("run.requeue=")]
    assert settings == ["run.requeue=true", "run.requeue=false"]  # the caller's is last, and wins
    assert "--kill-on-bad-exit=0" in command


def test_a_run_under_flux_is_told_how_long_it_may_go_on(tmp_path):
    """By what `flux job timeleft` says, 600 s here; without a limit a large number."""
    flux = tmp_path / "flux"
    flux.write_text("#!/bin/sh\necho 600\n")
    flux.chmod(0o755)
    words = (script_of("el-capitan", "train"), RUN, "--set", "limits.wall_s=9")
    command = started(dry_run(*words, PATH=f"{tmp_path}:{os.environ['PATH']}"))[-1]
    assert [word for word in command if word.startswith("limits.wall_s=")] == ["limits.wall_s=570", "limits.wall_s=9"]
    assert "limits.wall_s=570" not in started(dry_run(*words))[-1]  # without Flux


def test_a_packed_environment_goes_to_each_node_by_the_batch_system(tmp_path):
    archive = tmp_path / "my env.tar"
    archive.touch()
    copies = {
        "frontier": ["sbcast", "--force", str(archive)],
        "el-capitan": ["flux", "archive", "create", "--overwrite", "--mmap", f"--directory={tmp_path}", "my env.tar"],
    }
    for folder, copy in copies.items():
        lines = dry_run(script_of(folder, "run"), *WORDS["run"], HPCLLM_ENV=str(tmp_path / "my env"))
        assert any(shlex.split(line)[: len(copy)] == copy for line in lines if "my env.tar" in line), lines
        assert started(lines)[-1][-6].endswith("hpcllm-JOB/environment/bin/python")


@pytest.mark.parametrize("folder", ["slurm", "frontier", "perlmutter", "leonardo", "lumi", "alps"])
def test_many_nodes_start_python_from_one_file_without_being_asked(folder, tmp_path):
    """From 65 on the file is made and used; one that is there is used on few, unless that is switched off."""

    def python(lines: list[str]) -> str:
        return next(word for word in started(lines)[-1] if word.endswith("bin/python"))

    def command(**variables: str) -> list[str]:
        words = {"HPCLLM_ENV": str(tmp_path / "env"), "HPCLLM_CONTAINER": "/torch.sif"} | variables
        return dry_run(script_of(folder, "run"), *WORDS["run"], **words)

    def is_packed(lines: list[str]) -> bool:
        mounted = any("env.sqsh" in word for word in started(lines)[-1])
        return mounted or python(lines).endswith("/hpcllm-JOB/environment/bin/python")

    pack = f"bash jobscripts/{folder}/install.sh pack"
    many, few = command(SLURM_JOB_NUM_NODES="65"), command(SLURM_JOB_NUM_NODES="64")
    assert (pack in many, is_packed(many)) == (True, True)
    assert (pack in few, is_packed(few)) == (False, False)
    off, asked = command(SLURM_JOB_NUM_NODES="999", HPCLLM_PACKED="0"), command(HPCLLM_PACKED="1")
    assert (pack in off, is_packed(off)) == (False, False)
    assert (pack in asked, is_packed(asked)) == (True, True)
    for suffix in ("tar", "sqsh"):
        (tmp_path / f"env.{suffix}").touch()
    assert pack not in command(SLURM_JOB_NUM_NODES="65")
    assert is_packed(command(HPCLLM_NEAR="/scratch")) == (folder != "leonardo")
    os.utime(tmp_path / "env.tar", (1, 1))  # older than the source
    os.utime(tmp_path / "env.sqsh", (1, 1))
    assert pack in command(SLURM_JOB_NUM_NODES="65")


@pytest.mark.parametrize(("folder", "sign"), [("aurora", "launch_copper.sh"), ("el-capitan", "flux archive create")])
@pytest.mark.parametrize("nodes", [2, 64, 65, 9000])
def test_many_nodes_are_spared_the_small_files_under_other_batch_systems_too(tmp_path, folder, sign, nodes):
    """By Copper where ALCF has it, which needs no archive, and by Flux's own broadcast of one."""
    (tmp_path / "nodes").write_text("".join(f"node{number}\n" * 12 for number in range(nodes)))
    (tmp_path / "flux").write_text(f"#!/bin/sh\necho {nodes}\n")
    (tmp_path / "flux").chmod(0o755)

    def lines(**variables: str) -> list[str]:
        words = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PBS_NODEFILE": str(tmp_path / "nodes")} | variables
        return dry_run(script_of(folder, "run"), *WORDS["run"], HPCLLM_ENV=str(tmp_path / "env"), **words)

    def is_spared(**variables: str) -> bool:
        return any(line.startswith(sign) for line in lines(**variables))

    assert is_spared() == (nodes > 64)
    assert is_spared(HPCLLM_PACKED="1")
    assert not is_spared(HPCLLM_PACKED="0")
    if folder == "el-capitan":
        packed = [line.endswith("install.sh pack") for line in lines()]
        python = next(word for word in started(lines())[-1] if word.endswith("bin/python"))
        assert any(packed) == python.endswith("/hpcllm-JOB/environment/bin/python") == (nodes > 64)


def test_what_cannot_be_packed_or_copied_is_said_and_the_run_starts_all_the_same(tmp_path):
    (tmp_path / "env" / "bin").mkdir(parents=True)
    words = """
. "$0/common/job.sh"; . "$0/common/near.sh"
hpcllm_inside=() hpcllm_near=$1 hpcllm_machine=slurm HPCLLM_VENV=$1/env hpcllm_source=$HPCLLM_ROOT
hpcllm_nodes() { echo 65; }
hpcllm_job_id() { echo 7; }
hpcllm_on_nodes() { "$@"; }
hpcllm_copy() { [ "$breaks" != copy ] && cp "$1" "$2"; }
tar() { [ "$breaks" != pack ] && command tar "$@"; }
set -euo pipefail
hpcllm_spread
echo "$HPCLLM_VENV $hpcllm_source"
"""
    for breaks, says in {"copy": "could not copy", "pack": "could not pack", "": "copied to each node"}.items():
        for old in tmp_path.glob("env.*"):
            old.unlink()
        done = run("bash", "-c", words, FOLDERS, tmp_path, breaks=breaks)
        assert done.returncode == 0, done.stderr
        assert says in done.stdout + done.stderr
        place = tmp_path / "hpcllm-7"
        used = (place / "environment", place / "source") if not breaks else (tmp_path / "env", ROOT)
        assert done.stdout.splitlines()[-1] == " ".join(map(str, used))
        assert place.exists() == (not breaks)
        assert sorted(path.name for path in tmp_path.glob("env*")) == (
            ["env"] if breaks == "pack" else ["env", "env.tar"]
        )
    assert (place / "source" / "hpcllm" / "cli" / "main.py").exists()
    assert (
        "HPCLLM_PACKED=2; valid" in run("bash", script_of("slurm", "train"), RUN, DRY_RUN="1", HPCLLM_PACKED="2").stderr
    )


def test_arguments_with_spaces_stay_whole(tmp_path):
    path = tmp_path / "a run's file.toml"
    path.write_text("")
    for command in started(dry_run(script_of("frontier", "train"), str(path), "--set", "run.name=a b")):
        assert str(path) in command
        assert "run.name=a b" in command


def test_preflight_gets_the_settings_of_train_and_nothing_else():
    command, _ = started(dry_run(script_of("slurm", "train"), RUN, "--restart", "--set", "mesh.pp=2", "--json"))
    assert command[command.index("preflight") :] == ["preflight", RUN, "--set", "mesh.pp=2"]
    assert len(started(dry_run(script_of("slurm", "train"), RUN, PREFLIGHT="0"))) == 1


def test_a_job_that_comes_again_goes_on_even_if_it_was_told_to_begin_anew():
    words = (script_of("slurm", "train"), RUN, "--restart", "--set", "run.steps=9")
    assert "--restart" in started(dry_run(*words))[-1]
    again = started(dry_run(*words, SLURM_RESTART_COUNT="1"))[-1]
    assert "--restart" not in again
    assert again[-1] == "run.steps=9"


def test_a_setting_without_its_value_is_left_to_train():
    preflight, train = started(dry_run(script_of("slurm", "train"), RUN, "--set"))
    assert preflight[-1] == RUN
    assert train[-1] == "--set"


def test_what_the_caller_has_set_stays():
    lines = dry_run(script_of("frontier", "train"), RUN, FI_MR_CACHE_MONITOR="disabled", OMP_NUM_THREADS="3")
    assert not any(line.startswith(("FI_MR_CACHE_MONITOR", "OMP_NUM_THREADS")) for line in lines)


def test_a_container_stands_between_the_device_and_python(tmp_path):
    environment = tmp_path / "env"
    for packed in (False, True):
        if packed:
            environment.with_suffix(".sqsh").touch()
        lines = dry_run(
            script_of("lumi", "train"), RUN, HPCLLM_CONTAINER="/images/torch.sif", HPCLLM_ENV=str(environment)
        )
        command = started(lines)[-1]
        inside = command[command.index("singularity") : command.index("-m")]
        bound = ["-B", f"{environment}.sqsh:{environment}:image-src=/"] if packed else []
        assert inside == ["singularity", "exec", *bound, "/images/torch.sif", f"{environment}/bin/python"]
        assert command.index("singularity") > command.index("ROCR_VISIBLE_DEVICES")


def test_lumi_takes_its_own_container_unless_told_otherwise():
    """Its MPICH is met through PMI 2, and is no Cray MPICH, whose variables it would not know."""
    lines = dry_run(script_of("lumi", "train"), RUN)
    assert lines[1:4] == [
        "module purge",
        "module use /appl/local/laifs/modules",
        "module load lumi-aif-singularity-bindings",
    ]
    images = [word for word in started(lines)[-1] if word.endswith(".sif")]
    assert len(images) == 1
    assert images[0].startswith("/appl/local/laifs/containers/lumi-multitorch-")
    assert 'SLURM_MPI_TYPE="pmi2"' in lines
    assert not any(line.startswith("MPICH_") for line in lines)
    bare = dry_run(script_of("lumi", "train"), RUN, HPCLLM_CONTAINER="none")
    assert bare[1] == "module purge"
    assert "module load rocm/6.3.4" in bare
    assert 'MPICH_GPU_SUPPORT_ENABLED="1"' in bare
    assert not any(line.startswith("SLURM_MPI_TYPE") for line in bare)
    assert "singularity" not in started(bare)[-1]


def test_an_image_that_is_not_there_is_named_with_where_to_look(tmp_path):
    modules = tmp_path / "modules"  # a login shell's command, which the script only needs to find
    modules.write_text("module() { :; }\n")
    done = run("bash", FOLDERS / "lumi" / "install.sh", BASH_ENV=str(modules), HPCLLM_CONTAINER="/no such/image.sif")
    assert done.returncode == 2
    assert "no container image '/no such/image.sif'. ls /appl/local/laifs/containers shows" in done.stderr
    there = tmp_path / "an image.sif"
    there.touch()
    done = run(
        "bash",
        FOLDERS / "lumi" / "install.sh",
        BASH_ENV=str(modules),
        HPCLLM_CONTAINER=str(there),
        HPCLLM_ENV=str(tmp_path / "env"),
    )
    assert f"container: {there}\n" in done.stderr
    assert done.returncode == 1  # without singularity here
    assert "environment: failed" in done.stderr


def test_an_environment_made_in_an_image_sees_the_packages_of_the_image(tmp_path):
    """Where those are in a virtual environment, as this test's are; pip counts them as installed."""
    new = tmp_path / "new env"
    made = run(sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", new)
    assert made.returncode == 0, made.stderr
    look = "import importlib.metadata as m; print(m.version('torch'), m.version('pytest'))"
    assert run(new / "bin/python", "-c", look).returncode != 0  # why the step is needed
    seen = run(sys.executable, FOLDERS / "common" / "packages_beside.py", new)
    assert seen.returncode == 0, seen.stderr
    done = run(new / "bin/python", "-c", look)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run(sys.executable, "-c", look).stdout


def test_an_environment_whose_torch_is_made_for_something_else_is_refused():
    """This one's is made for CPUs, or for the devices of one vendor."""
    build = "cuda" if "rocm" in importlib.metadata.version("torch") else "hip"
    start = f"""
        . "{FOLDERS}/common/install.sh"; hpcllm_inside=() hpcllm_build={build}
        hpcllm_python() {{ "$0" "$@"; }}
        hpcllm_starts
    """
    done = run("bash", "-c", start, sys.executable, PYTHONPATH=str(ROOT))
    assert done.returncode == 1, done.stderr
    assert f"is not made for {build}, so it sees no device of this machine" in done.stderr


def test_a_packed_environment_of_conda_starts_in_another_place(tmp_path):
    """An environment with what conda-pack takes for conda's marks; its files name the folder it was made in."""
    made = tmp_path / "made here"
    assert run(sys.executable, "-m", "venv", "--without-pip", made).returncode == 0
    (made / "conda-meta").mkdir()
    (made / "conda-meta/history").touch()
    (made / "bin/conda-pack").symlink_to(Path(sys.executable).with_name("conda-pack"))
    pack = f'. "{FOLDERS}/common/install.sh"; hpcllm_inside=() hpcllm_conda=yes HPCLLM_VENV=$0; hpcllm_pack'
    done = run("bash", "-euc", pack, made)
    assert done.returncode == 0, done.stderr
    there = tmp_path / "there"
    with tarfile.open(f"{made}.tar") as archive:
        names = archive.getnames()
    there.mkdir()
    assert run("tar", "-xf", f"{made}.tar", "-C", there).returncode == 0
    assert "source/hpcllm/__init__.py" in names
    assert {name.partition("/")[0] for name in names} == {"environment", "source"}
    assert (there / "environment/bin/conda-unpack").exists()
    done = run(there / "environment/bin/python", there / "environment/bin/conda-unpack")
    assert done.returncode == 0, done.stderr
    start = "import sys; sys.path[:0] = sys.argv[1:]; import hpcllm; print(sys.prefix, hpcllm.__file__)"
    done = run(there / "environment/bin/python", "-c", start, there / "source")
    assert done.stdout.split() == [f"{there}/environment", f"{there}/source/hpcllm/__init__.py"], done.stderr


@pytest.mark.parametrize("folder", ["slurm", *MACHINE_OF])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the run file is missing"),
        (["no such.toml"], "no run file 'no such.toml'"),
        ([RUN], "this is no job"),
    ],
)
def test_what_cannot_be_is_refused_with_the_command_that_can(folder, arguments, says):
    done = run("bash", script_of(folder, "train"), *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert f"jobscripts/{folder}/train." in done.stderr
    assert done.stdout == ""


def test_a_script_that_cannot_find_its_repository_says_what_to_set(tmp_path):
    lost = tmp_path / "slurm_script"
    shutil.copy(script_of("slurm", "train"), lost)
    done = run("bash", lost, RUN)
    assert done.returncode == 2
    assert "export HPCLLM_ROOT=" in done.stderr
    assert "this is no job" in run("bash", lost, RUN, HPCLLM_ROOT=str(ROOT)).stderr


@pytest.mark.parametrize("folder", MACHINE_OF)
def test_an_install_shows_its_steps(folder):
    lines = dry_run(FOLDERS / folder / "install.sh", HPCLLM_CONTAINER="none")
    steps = [line for line in lines if not line.startswith("module ")]
    if folder == "alps":  # the uenv has mpi4py for its own MPI
        assert len(steps) == 3
        assert all("uenv run --view=default pytorch/" in step for step in steps)
        return
    assert re.match("conda create|python3 -m venv", steps[0])
    (mpi4py,) = [line for line in steps if "--no-binary mpi4py" in line]
    assert "MPICC=" in mpi4py  # compiled by the machine's own compiler
    assert "--editable" in steps[-1]
    done = run("bash", FOLDERS / folder / "install.sh", "pakc", DRY_RUN="1")
    assert done.returncode == 2
    assert "'pakc' is unknown" in done.stderr


def test_an_install_in_a_container_adds_only_what_its_image_lacks():
    lines = dry_run(FOLDERS / "lumi" / "install.sh", HPCLLM_CONTAINER="/images/torch.sif", HPCLLM_ENV="/env")
    steps = [shlex.split(line) for line in lines if not line.startswith("module ")]
    inside = ["singularity", "exec", "/images/torch.sif"]
    assert [step[step.index("singularity") :][:3] for step in steps] == [inside] * 4
    assert steps[0][3:] == ["python3", "-m", "venv", "--system-site-packages", "/env"]
    assert steps[1][3:] == ["python3", str(FOLDERS / "common" / "packages_beside.py"), "/env"]
    assert "--editable" in steps[2]
    assert not any("torch==" in word or "--index-url" in word for step in steps for word in step)


# the CuPy whose kernels each machine gets: none where no wheel is made for its ROCm, and on Intel's devices
CUPY = {
    "frontier": "rocm7",
    "lumi": "rocm7",
    "perlmutter": "cudaNN",
    "leonardo": "cudaNN",
    "alps": "cudaNN",
    "el-capitan": "",
    "aurora": "",
}


@pytest.mark.parametrize("folder", MACHINE_OF)
@pytest.mark.parametrize("asked", ["", "cuda12", "none"])
def test_an_install_brings_the_cupy_that_loads_the_kernels(folder, asked):
    """As an extra of the project, after everything else; the caller's word counts more than the machine's."""
    lines = dry_run(FOLDERS / folder / "install.sh", HPCLLM_CUPY=asked)
    extras = [extra for line in lines for extra in re.findall(r"--editable .*\[([a-z0-9,]+N*)\]", line)]
    wanted = asked or CUPY[folder]
    assert extras == ["text,tensorboard", *([wanted] if wanted not in ("", "none") else [])]
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert wanted in ("", "none", "cudaNN") or packages[wanted][0].startswith("cupy-")
    assert set(PACKAGES) | {"cudaNN", ""} >= set(CUPY.values())
    assert all(packages[extra][0].startswith(wheel) for extra, wheel in PACKAGES.items())


def test_a_cluster_of_its_own_names_the_cupy_that_it_wants():
    script = FOLDERS / "slurm" / "install.sh"
    assert dry_run(script)[0].endswith("local/setup.sh")
    assert dry_run(script, HPCLLM_CUPY="rocm7")[0].endswith("local/setup.sh rocm7")


@pytest.mark.parametrize("fails", ["", "yes"])
@pytest.mark.parametrize("there", ["", "yes"])
@pytest.mark.parametrize(("build", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_kernels_are_for_the_torch_that_is_there_and_an_install_goes_on_without(tmp_path, build, extra, there, fails):
    """A Python that says what its torch is made for, and a pip that perhaps cannot install."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"""#!/bin/sh
case "$*" in
    *find_spec*) [ -n "{there}" ] ;;
    *torch.version*) PYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@" ;;
    *pip*) echo "$*" >>"{tmp_path}/asked"; [ -z "{fails}" ] ;;
esac
""")
    python.chmod(0o755)
    (tmp_path / "torch.py").write_text(f"class version: cuda = {build!r}")
    words = f"""
        . "{FOLDERS}/common/install.sh"; set -eo pipefail
        HPCLLM_VENV=$0 hpcllm_inside=() hpcllm_cupy=torch
        hpcllm_kernels "$0/pins"
        echo goes on
    """
    done = run("bash", "-c", words, tmp_path)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked.endswith(f"--constraint {tmp_path}/pins --editable {ROOT}[{extra}]\n") == (not there)
    assert ("without kernels for codecs and model" in done.stderr) == bool(fails and not there)
    assert ("there already" in done.stderr) == bool(there)


def test_an_install_goes_on_with_the_step_that_failed(tmp_path):
    """Each step is noted with its command: done once, again if the command changes, and after a failure from there."""
    steps = f"""
        . "{FOLDERS}/common/install.sh"; HPCLLM_VENV="$0/an env" work=$1 last=$2
        hpcllm_step first bash -c 'echo first >>"$0"' "$work"
        hpcllm_step second bash -c "$last" "$work"
    """
    work = tmp_path / "work done"

    def install(last: str) -> int:
        return run("bash", "-c", steps, tmp_path, work, last).returncode

    assert install("exit 3") == 1
    assert install('echo second >>"$0"') == 0
    assert install('echo second >>"$0"') == 0
    assert install('echo other >>"$0"') == 0
    assert work.read_text().split() == ["first", "second", "other"]


def test_each_rank_of_a_node_sees_its_own_device():
    def seen(rank: int, devices: str) -> subprocess.CompletedProcess[str]:
        wrapper = FOLDERS / "common" / "one_device.sh"
        command = ["bash", wrapper, "SOME_DEVICES", devices, "bash", "-c", 'echo "$SOME_DEVICES|$0|$1"', "a b", "c"]
        return run(*command, SLURM_LOCALID=str(rank))

    assert [seen(rank, "3,2,1,0").stdout for rank in range(4)] == [f"{3 - rank}|a b|c\n" for rank in range(4)]
    done = seen(2, "0,1")
    assert done.returncode == 2
    assert "rank 2 of its node, but there are 2 devices" in done.stderr


def test_the_readme_names_every_machine():
    text = (FOLDERS / "README.md").read_text()
    for folder in ("slurm", *MACHINE_OF):
        assert f"`{folder}`" in text
    assert len(text.splitlines()) < 90  # one page
