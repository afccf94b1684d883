"""The mesh: coordinates of each rank, as communicators that are plain values.

    dp = 2, pp = 2, order "tp,dp,pp":          pp 0      pp 1
    (fastest axis first)               dp 0    rank 0    rank 2      a row:    one pipeline (mesh.pp)
                                       dp 1    rank 1    rank 3      a column: replicas of one stage (mesh.dp)

Each communicator carries one kind of traffic, so messages of two threads cannot meet: dp gradients, pp activations,
`ends` the gradient of an embedding that first and last stage share, world the few words of control.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from mpi4py import MPI

from hpcllm.config.schema import MeshConfig
from hpcllm.mpi.mesh_axes import AXES, coordinates, mesh_sizes
from hpcllm.mpi.wait import meet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mesh:
    """Communicators of this rank."""

    world: MPI.Intracomm
    dp: MPI.Intracomm
    pp: MPI.Intracomm  # rank = stage
    tp: MPI.Intracomm
    node: MPI.Intracomm  # ranks that share memory
    ends: MPI.Intracomm  # first and last stage of one pipeline; a rank in between is alone in it

    @property
    def shape(self) -> dict[str, int]:
        return {"dp": self.dp.size, "pp": self.pp.size, "tp": self.tp.size}

    def world_rank(self, peer: int) -> int:
        """Return the world rank of a rank of this pipeline, for error messages."""
        return int(self.pp.group.Translate_ranks([peer], self.world.group)[0])

    def shares_node(self, peer: int) -> bool:
        """Return True if that rank of this pipeline is on this rank's node."""
        return bool(self.pp.group.Translate_ranks([peer], self.node.group)[0] != MPI.UNDEFINED)


@contextmanager
def open_mesh(comm: MPI.Intracomm, config: MeshConfig) -> Iterator[Mesh]:
    """Split `comm` into a Mesh and free it at the end. Collective over comm. Raises MeshError."""
    sizes = mesh_sizes(comm.size, config)
    here = coordinates(comm.rank, sizes, config.order)
    meet(comm, "to make the mesh")
    world = comm.Dup()
    axes = {axis: _along(world, axis, here, sizes) for axis in AXES}
    is_end = here["pp"] in (0, sizes["pp"] - 1)
    ends = _split(axes["pp"], 0 if is_end else 1 + here["pp"], here["pp"])
    node = cast(MPI.Intracomm, world.Split_type(MPI.COMM_TYPE_SHARED))
    mesh = Mesh(world, **axes, node=node, ends=ends)
    at = ", ".join(f"{axis} {here[axis]} of {sizes[axis]}" for axis in AXES)
    log.debug("rank %d of %d is %s, and %d of %d on its node", world.rank, world.size, at, node.rank, node.size)
    yield mesh
    # not in a `finally`: Free is collective, and a rank that fails must not wait for the others here
    for part in (mesh.ends, mesh.node, *axes.values(), world):
        part.Free()


def _along(world: MPI.Intracomm, axis: str, here: dict[str, int], sizes: dict[str, int]) -> MPI.Intracomm:
    """Return the communicator of the ranks that differ from this one in `axis` only, ordered by it."""
    color = 0
    for other in AXES:
        if other != axis:
            color = color * sizes[other] + here[other]
    return _split(world, color, here[axis])


def _split(comm: MPI.Intracomm, color: int, key: int) -> MPI.Intracomm:
    return cast(MPI.Intracomm, comm.Split(color, key))
