"""Options that mend a placement, in the words of whoever starts the ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hpcllm.hardware.lists import mask_text, nodes_text
from hpcllm.preflight.facts import Allocation


def cores_each(allocation: Allocation, cores: int) -> str:
    """So many cores for each rank, and for no other."""
    ways = {
        "slurm": f"srun --cpus-per-task={cores} --cpu-bind=cores (srun takes no -c from sbatch; or export "
        f"SRUN_CPUS_PER_TASK={cores})",
        "openmpi": f"mpirun --map-by slot:PE={cores} --bind-to core",
        "mpich": f"mpiexec -bind-to core:{cores}",
        "": f"{cores} cores for this process: taskset, numactl or a container's --cpuset-cpus holds it to fewer",
    }
    return ways.get(allocation.launcher, f"the launcher's option for {cores} cores a rank")


def ranks_a_node(allocation: Allocation, ranks: int) -> str:
    """At most so many ranks on a node."""
    ways = {
        "slurm": f"srun --ntasks-per-node={ranks}",
        "openmpi": f"mpirun --map-by ppr:{ranks}:node",
        "mpich": f"mpiexec -ppn {ranks}",
    }
    few = f"start {ranks} rank{'s' if ranks != 1 else ''} a node"
    if len(allocation.nodes) == 1 and allocation.launcher in ways and allocation.launcher != "slurm":
        command, option = ways[allocation.launcher].split(" ", 1)
        return f"{few}: {command} -n {ranks}, or on more nodes {option}"  # with one alone these put all ranks on it
    return f"{few}: {ways.get(allocation.launcher, f'mpirun -n {ranks}')}"


def all_ranks_one_job(allocation: Allocation) -> str:
    if allocation.launcher == "slurm":
        return (
            "take the MPI plugin that this library knows, of those that `srun --mpi=list` names: --mpi=pmi2 or "
            "--mpi=cray_shasta for MPICH, --mpi=pmix for Open MPI; or build mpi4py against the system's MPI"
        )
    return "start with the mpirun or mpiexec that came with this MPI library: an environment should have one MPI only"


def one_device_each(allocation: Allocation) -> str:
    if allocation.launcher == "slurm":
        return "srun --gpus-per-task=1 --gpu-bind=closest, or leave all devices visible to all ranks of a node"
    return "leave all devices visible to all ranks of a node: unset CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES"


def core_masks(allocation: Allocation, shares: Sequence[Sequence[int]]) -> str:
    """These hardware threads for the ranks of a node, in their order."""
    if allocation.launcher == "slurm":
        return f"srun --cpu-bind=mask_cpu:{','.join(map(mask_text, shares))}"
    if allocation.launcher == "openmpi":
        return (
            f"mpirun --map-by numa:PE={min(map(len, shares))} --bind-to core, and ranks in the order of their devices"
        )
    return f"mpiexec -bind-to user:{','.join('+'.join(map(str, share)) for share in shares)}"


def without(allocation: Allocation, names: Sequence[str]) -> str:
    """These nodes left out of the next job; nothing is left of a job of one node that no batch system gave."""
    text = nodes_text(names)
    if allocation.launcher == "slurm":
        return f"exclude it: sbatch --exclude={text}"
    return f"leave out {text}" if len(allocation.nodes) > 1 else f"look for what else runs on {text}"
