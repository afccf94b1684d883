"""The axes of the mesh as numbers: the size of each, and the coordinates of a rank. Pure."""

from __future__ import annotations

from hpcllm.config.rules import divisors
from hpcllm.config.schema import MeshConfig
from hpcllm.errors import MeshError

AXES = ("dp", "pp", "tp")


def mesh_sizes(ranks: int, mesh: MeshConfig) -> dict[str, int]:
    """Return axis -> size for that many ranks, dp = 0 filled in. Raises MeshError if the product is not the ranks."""
    rest = mesh.pp * mesh.tp
    if not mesh.dp and ranks % rest:
        raise MeshError(
            f"mesh.pp * mesh.tp = {mesh.pp} * {mesh.tp} = {rest} does not divide the {ranks} "
            f"rank{'s' if ranks != 1 else ''} of the job; start it with a multiple of {rest} (srun --ntasks={rest}, "
            f"mpirun -n {rest}) or take another mesh.pp * mesh.tp; valid with {ranks}: {divisors(ranks)}"
        )
    dp = mesh.dp or ranks // rest
    if dp * rest != ranks:
        need = dp * rest
        raise MeshError(
            f"mesh.dp * mesh.pp * mesh.tp = {dp} * {mesh.pp} * {mesh.tp} = {need}, but the job has {ranks} "
            f"rank{'s' if ranks != 1 else ''}; start it with {need} (srun --ntasks={need}, mpirun -n {need}) "
            "or change the mesh"
        )
    return {"dp": dp, "pp": mesh.pp, "tp": mesh.tp}


def coordinates(rank: int, sizes: dict[str, int], order: str) -> dict[str, int]:
    """Return axis -> coordinate of `rank` on it; `order` names the fastest-varying axis first."""
    place = {}
    for axis in order.split(","):
        rank, place[axis] = divmod(rank, sizes[axis])
    return place


def describe_rank(rank: int, ranks: int, config: MeshConfig) -> str:
    """Return 'dp 1, stage 2', and ', tp 3' where layers are split: the coordinates of a rank of a job of `ranks`."""
    place = coordinates(rank, mesh_sizes(ranks, config), config.order)
    return f"dp {place['dp']}, stage {place['pp']}" + (f", tp {place['tp']}" if config.tp > 1 else "")
