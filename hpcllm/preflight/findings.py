"""A fault of an allocation, in four parts: how bad, what, where, and how to fix it in the launcher's own words. Pure.

Some faults are ranks or nodes that are slower than the others, beyond their scatter:

    x x xx x xx     x    <- speeds      slow: below the median by five times the scatter, and by LEAST_SHARE of it
          |median
    scatter = 1.4826 x median of the distances to the median: that of a normal distribution, whatever a few do

Source: Leys et al. 2013, "Detecting outliers", J. Exp. Soc. Psychol. 49. With two values nobody is in the middle: the
slower one is compared with the faster, and which of them is as it should be nobody can tell: a note, no fault.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcllm.mpi.rank_names import name_ranks
from hpcllm.preflight.facts import Allocation, Kind
from hpcllm.system.hardware.sysfs import mask_text
from hpcllm.system.slurm import nodes_text
from hpcllm.system.text import counted

Severity = Literal["breaks", "slow", "note"]
Fault = tuple[Severity, str, Sequence[int] | None, str]  # a finding of nodes that are alike: places in them, None: all
ORDER: tuple[Severity, ...] = ("breaks", "slow", "note")
MOST_NODES, MOST_RUNS = 8, 3  # named in a line


@dataclass(frozen=True)
class Finding:
    """breaks: a run would fail. slow: it would take a multiple of its time, or a good part of what is paid idles."""

    severity: Severity
    what: str
    where: str
    fix: str


def on(kind: Kind, places: Sequence[int] | None = None) -> str:
    """'ranks 0-3, 8-11 on n[1-2]': ranks of these places, or all, in nodes that are alike."""
    ranks = kind.ranks(range(len(kind.facts.ranks)) if places is None else places)
    return f"{name_ranks(ranks, MOST_RUNS)} on {nodes_text(kind.names, MOST_NODES)}"


def everywhere(allocation: Allocation) -> str:
    """'all ranks', of one that has more than one node."""
    return "all ranks" if allocation.size > 1 else f"rank 0 on {allocation.nodes[0].name}"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; one finding where several differ in their place alone."""
    found: dict[tuple[Severity, str, str], Finding] = {}
    for one in findings:
        key = (one.severity, one.what, one.fix)
        before = found.get(key)
        found[key] = replace(one, where=f"{before.where}; {one.where}") if before else one
    return sorted(found.values(), key=lambda finding: ORDER.index(finding.severity))


def cores_each(allocation: Allocation, cores: int) -> str:
    """Option that gives each rank so many cores of its own."""
    ways = {
        "slurm": f"srun --cpus-per-task={cores} --cpu-bind=cores (srun takes no -c from sbatch; or export "
        f"SRUN_CPUS_PER_TASK={cores})",
        "flux": f"flux run --cores-per-task={cores} --setopt=cpu-affinity=per-task",
        "openmpi": f"mpirun --map-by slot:PE={cores} --bind-to core",
        "mpich": f"mpiexec -bind-to core:{cores}",
        "": f"{cores} cores for this process: taskset, numactl or a container's --cpuset-cpus holds it to fewer",
    }
    return ways.get(allocation.launcher, f"the launcher's option for {cores} cores a rank")


def ranks_a_node(allocation: Allocation, ranks: int) -> str:
    """Option that starts at most so many ranks on a node."""
    ways = {
        "slurm": f"srun --ntasks-per-node={ranks}",
        "flux": f"flux run --nodes={len(allocation.nodes)} --ntasks={ranks * len(allocation.nodes)}",
        "openmpi": f"mpirun --map-by ppr:{ranks}:node",
        "mpich": f"mpiexec -ppn {ranks}",
    }
    few = f"start {counted(ranks, 'rank')} a node"
    if len(allocation.nodes) == 1 and allocation.launcher in ("openmpi", "mpich"):
        command, option = ways[allocation.launcher].split(" ", 1)
        return f"{few}: {command} -n {ranks}, or on more nodes {option}"  # with one alone these put all ranks on it
    return f"{few}: {ways.get(allocation.launcher, f'mpirun -n {ranks}')}"


def all_ranks_one_job(allocation: Allocation) -> str:
    if allocation.launcher == "slurm":
        return (
            "take the MPI plugin that this library knows, of those that `srun --mpi=list` names: --mpi=pmi2 or "
            "--mpi=cray_shasta for MPICH, --mpi=pmix for Open MPI; or build mpi4py against the system's MPI"
        )
    if allocation.launcher == "flux":
        return "build mpi4py against the system's MPI, which Flux's PMI brings together; or flux run --setopt=pmi=LIST"
    return "start with the mpirun or mpiexec that came with this MPI library: an environment should have one MPI only"


def one_device_each(allocation: Allocation) -> str:
    if allocation.launcher == "slurm":
        each = "jobscripts/common/one_device.sh before the command gives each rank its own"
        return f"srun --gpu-bind=none leaves all devices visible to all ranks of a node; {each}"
    if allocation.launcher == "flux":
        return "flux run --gpus-per-task=1 --setopt=gpu-affinity=per-task"
    return "leave all devices visible to all ranks of a node: unset CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES"


def core_masks(allocation: Allocation, shares: Sequence[Sequence[int]]) -> str:
    """Option that gives the ranks of a node, in their order, these hardware threads."""
    if allocation.launcher == "slurm":
        return f"srun --cpu-bind=mask_cpu:{','.join(map(mask_text, shares))}"
    if allocation.launcher == "flux":
        return f"flux run --setopt='cpu-affinity=map:{';'.join(map(mask_text, shares))}'"
    if allocation.launcher == "openmpi":
        return (
            f"mpirun --map-by numa:PE={min(map(len, shares))} --bind-to core, and ranks in the order of their devices"
        )
    return f"mpiexec -bind-to user:{','.join('+'.join(map(str, share)) for share in shares)}"


def without(allocation: Allocation, names: Sequence[str]) -> str:
    """Option that leaves these nodes out of the next job.

    Nothing is left of a job of one node that no batch system gave.
    """
    text = nodes_text(names)
    if allocation.launcher == "slurm":
        return f"exclude it: sbatch --exclude={text}"
    if allocation.launcher == "flux":
        return f"exclude it: flux batch --requires=-host:{text}"
    return f"leave out {text}" if len(allocation.nodes) > 1 else f"look for what else runs on {text}"


LEAST_SHARE = 0.10  # slower than that is told,
SLOW_SHARE = 0.25  # and than that is a finding that ends with exit code 1: all ranks wait for the slowest
_SCATTERS = 5 * 1.4826


def severity_of(share: float, speeds: Sequence[float]) -> Severity:
    """Judge one of slow_ones(speeds), which lacks this share: "slow" needs at least three that were measured."""
    compared = sum(not math.isnan(speed) for speed in speeds)
    return "slow" if share >= SLOW_SHARE and compared > 2 else "note"


def slow_ones(speeds: Sequence[float]) -> list[tuple[int, float]]:
    """(which, share of the usual speed that it lacks), the slowest first. NaN: not measured, compared with nobody."""
    known = [speed for speed in speeds if not math.isnan(speed)]
    if len(known) < 2:
        return []
    usual = max(known) if len(known) == 2 else statistics.median(known)
    scatter = 0.0 if len(known) == 2 else statistics.median(abs(speed - usual) for speed in known)
    least = usual - max(_SCATTERS * scatter, LEAST_SHARE * usual)
    found = [(which, 1 - speed / usual) for which, speed in enumerate(speeds) if speed < least]
    return sorted(found, key=lambda pair: -pair[1])
