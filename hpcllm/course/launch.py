"""The command that starts the ranks of a check, and its environment. Pure.

    inside a Slurm job      srun         as many tasks as ranks, on however many cores there are, on one node: this one
    anywhere else           mpirun       the one beside this Python, or on PATH; on this machine alone

What each variable is for is said in jobscripts/local/launch.sh.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import hpcllm
from hpcllm.errors import ConfigError
from hpcllm.system.job import RANK_VARIABLES, SIZE_VARIABLES

LONGEST_TMPDIR = 50  # characters; MPI libraries keep sockets below it, whose whole path has a limit of about 100
OPEN_MPI = ("Open MPI", "OpenRTE", "PRRTE", "prte")
VERSION_LIMIT_S = 60.0


def launch_command(
    ranks: int, environment: Mapping[str, str] = os.environ, scratch: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the words that start so many ranks of a program, and the environment to start it in.

    scratch: folder for what MPI libraries leave lying about when their processes are killed.

    Raises ConfigError if nothing is there that starts ranks.
    """
    own = _environment(environment, scratch)
    path = environment.get("PATH", os.defpath)
    if "SLURM_JOB_ID" in environment and (srun := shutil.which("srun", path=path)):
        node = [f"--nodelist={here}"] if (here := environment.get("SLURMD_NODENAME")) else []
        return [srun, "--nodes=1", *node, f"--ntasks={ranks}", *_SRUN], own
    beside = str(Path(sys.executable).parent)
    if not (mpirun := shutil.which("mpirun", path=f"{beside}{os.pathsep}{path}")):
        raise ConfigError(
            f"a check starts {ranks} ranks, and neither mpirun nor, in a Slurm job, srun is on PATH; valid: load the "
            "MPI module, or pip install mpich"
        )
    if any(word in _version(mpirun) for word in OPEN_MPI):
        return [mpirun, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks)], own | _open_mpi(own)
    lo = {"UCX_NET_DEVICES": "lo"} if Path("/sys/class/net/lo").exists() else {}
    return [mpirun, "-n", str(ranks)], lo | own


def _environment(environment: Mapping[str, str], scratch: Path | None) -> dict[str, str]:
    """Keep the environment but for what a launcher has left in it; ranks share the cores."""
    left = ("PMI_", "PMIX_", "PRTE_", "OMPI_COMM_", "HYDI_", *SIZE_VARIABLES, *RANK_VARIABLES)
    kept = {key: value for key, value in environment.items() if key in _JOB or not key.startswith(left)}
    if scratch:
        kept["TMPDIR"] = str(scratch)
    if len(os.fsencode(kept.get("TMPDIR", ""))) > LONGEST_TMPDIR:
        kept["TMPDIR"] = "/tmp"
    root = str(Path(hpcllm.__file__).parents[1])  # for who runs from a checkout: the ranks start in another folder
    paths = [root, *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


_JOB = ("SLURM_JOB_ID",)
_SRUN = ("--overcommit", "--overlap", "--kill-on-bad-exit=1")


def scratch_parent(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder for scratch files that the ranks see, too; None: the system's own.

    Who is inside a Slurm job but on none of its nodes, as after salloc, shares no /tmp with the ranks.
    """
    is_elsewhere = "SLURM_JOB_ID" in environment and "SLURMD_NODENAME" not in environment
    return os.getcwd() if is_elsewhere else None


def _open_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    settings = {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_osc": "^ucx",
    }
    if os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {key: value for key, value in settings.items() if key not in environment}


def _version(mpirun: str) -> str:
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, timeout=VERSION_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{mpirun} does not answer: {error}; valid: an MPI that works") from error
    return (done.stdout + done.stderr).decode("utf-8", "replace")
