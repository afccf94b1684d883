"""The preflight in a real Slurm, on sound allocations and on some that are bad on purpose. Started by run.sh.

srun -N2 --ntasks-per-node=1     sound: exit code 0
srun -n2 taskset -c 0            two ranks on one core      --.
srun --mpi=none                  ranks that never meet      --+--> exit code 1, and what fixes it
srun --gpu-bind=map_gpu:0,0      two ranks on one device    --'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pretend
import pytest
from slurm_commands import environment

TESTS = Path(__file__).parents[1]
LIMIT_S = 200.0
WITH_DEVICE = "import pretend, sys; pretend.start(); from hpcllm.cli.main import main; sys.exit(main())"


def srun(options: str, *words: str, before: tuple[str, ...] = (), python: tuple[str, ...] = ("-m", "hpcllm")) -> Any:
    """(exit code, what was printed) of a preflight on fresh nodes."""
    folder = Path(os.environ["HPCLLM_SLURM"])
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    command = ["srun", *options.split(), *before, sys.executable, *python, "preflight", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def bad(page: dict[str, Any]) -> list[dict[str, str]]:
    return [finding for finding in page["findings"] if finding["severity"] in ("breaks", "slow")]


def test_a_sound_allocation_is_fit():
    code, out, _ = srun("-N2 --ntasks-per-node=1", "--quick", "--json")
    page = json.loads(out)
    assert bad(page) == []
    assert code == 0
    assert [node["name"] for node in page["nodes"]] == ["n1", "n2"]
    assert [node["ranks"] for node in page["nodes"]] == [[0], [1]]
    assert len(page["kinds"]) == 1  # nodes that are alike travel once
    assert page["job"].startswith("Slurm job ")


def test_two_ranks_on_one_core_are_found_named_and_fixed():
    code, out, _ = srun("-N2 --ntasks-per-node=2", "--quick", before=("taskset", "-c", "0"))
    assert code == 1
    assert "SLOW  2 ranks share 1 core (0)" in out
    assert "where  ranks 0-3 on n[1-2]" in out
    assert "fix  srun --cpus-per-task=" in out or "fix  start 1 rank a node: srun --ntasks-per-node=1" in out
    assert "2 nodes alike, ranks 0-1 of n1 are drawn" in out


def test_ranks_that_never_meet_are_found():
    code, out, _ = srun("-N1 -n2 --mpi=none", "--quick")
    assert code == 1
    assert "BREAKS  2 ranks were started, but each is alone in its MPI" in out


@pytest.mark.skipif(bool(pretend.why_not()), reason=pretend.why_not())
def test_two_ranks_on_one_device_are_found_and_each_on_its_own_are_fit():
    python = ("-c", WITH_DEVICE)
    code, out, _ = srun("-N1 -n2 --gpus-per-node=2 --gpu-bind=map_gpu:1,1", "--quick", "--json", python=python)
    found = [finding for finding in bad(json.loads(out)) if "2 ranks share the device" in finding["what"]]
    assert code == 1
    assert len(found) == 1
    assert found[0]["where"] in ("ranks 0-1 on n1", "ranks 0-1 on n2")  # where the job before has left the node
    assert "srun --gpu-bind=none" in found[0]["fix"]
    code, out, _ = srun("-N1 -n2 --gpus-per-node=2 --gpu-bind=map_gpu:0,1", "--quick", "--json", python=python)
    assert [finding for finding in bad(json.loads(out)) if "device" in finding["what"]] == []


def test_all_is_measured_within_a_minute(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(f"[run]\nfolder = '{tmp_path}/runs'\n[data]\nstore = '/dev/shm/only here.h5'\n")
    start_s = time.monotonic()
    code, out, err = srun("-N2 --ntasks-per-node=1", str(run), "--json")
    assert time.monotonic() - start_s < 60
    page = json.loads(out)
    assert code == 1
    store = next(finding for finding in page["findings"] if "cannot read data.store" in finding["what"])
    assert (store["severity"], store["where"]) == ("breaks", "n[1-2]")
    assert page["measured"].keys() == {"matrix products", "between nodes", "file system", "codecs"}
    assert len(page["measured"]["between nodes"]["gb_s"]) == 2
    assert page["measured"]["between nodes"]["rounds"] == 1
    assert page["measured"]["codecs"]["wrong"] == []
    assert "hpcllm: preflight: matrix products" in err  # said while it runs
    assert os.listdir(tmp_path) == ["run.toml"]
