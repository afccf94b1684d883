"""Every rank has one place, and each communicator holds the ranks that differ in its axis alone, in order."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from hpcllm.config.schema import MeshConfig
from hpcllm.errors import MeshError
from hpcllm.mpi.mesh import open_mesh
from hpcllm.mpi.mesh_axes import AXES, coordinates, describe_rank, mesh_sizes

ORDERS = [",".join(axes) for axes in itertools.permutations(AXES)]
axis_sizes = st.fixed_dictionaries({axis: st.integers(1, 6) for axis in AXES})


def layouts(ranks: int) -> list[MeshConfig]:
    """Every dp x pp of that many ranks in every order."""
    stages = [pp for pp in range(1, ranks + 1) if ranks % pp == 0]
    return [MeshConfig(dp=ranks // pp, pp=pp, order=order) for pp in stages for order in ORDERS]


@settings(deadline=None)
@given(axis_sizes, st.sampled_from(ORDERS))
def test_coordinates_are_a_bijection_whose_first_axis_runs_fastest(sizes, order):
    places = [coordinates(rank, sizes, order) for rank in range(math.prod(sizes.values()))]
    fastest_last = [tuple(place[axis] for axis in reversed(order.split(","))) for place in places]
    assert fastest_last == sorted(set(fastest_last))
    assert all(0 <= place[axis] < sizes[axis] for place in places for axis in AXES)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(0, 16), st.integers(1, 16))
def test_sizes_multiply_to_the_ranks_or_are_rejected_with_all_numbers(ranks, dp, pp):
    config, need = MeshConfig(dp=dp, pp=pp), dp * pp
    if need == ranks or (dp == 0 and ranks % pp == 0):
        assert mesh_sizes(ranks, config) == {"dp": ranks // pp, "pp": pp, "tp": 1}
    elif dp == 0:
        with pytest.raises(MeshError, match=rf"= {pp} does not divide the {ranks} ranks? .*; valid with {ranks}: 1"):
            mesh_sizes(ranks, config)
    else:
        with pytest.raises(MeshError, match=rf"= {need}, but the job has {ranks} ranks?; .*mpirun -n {need}\)"):
            mesh_sizes(ranks, config)


@pytest.mark.parallel([1, 2, 3, 4])
def test_members_of_every_communicator(comm):
    for config in layouts(comm.size):
        sizes = mesh_sizes(comm.size, config)
        places = [coordinates(rank, sizes, config.order) for rank in range(comm.size)]
        here = places[comm.rank]
        with open_mesh(comm, config) as mesh:
            assert mesh.shape == sizes
            assert mesh.world.allgather(mesh.world.rank) == list(range(comm.size))
            for axis in AXES:
                line = [r for r, p in enumerate(places) if all(p[a] == here[a] for a in AXES if a != axis)]
                along = sorted(line, key=lambda rank: places[rank][axis])
                assert getattr(mesh, axis).allgather(comm.rank) == along
                assert getattr(mesh, axis).rank == here[axis]
            assert mesh.ends.allgather(comm.rank) == ends_of(mesh.pp.allgather(comm.rank), comm.rank)


def ends_of(pipeline: list[int], rank: int) -> list[int]:
    ends = sorted({0, len(pipeline) - 1})
    return [pipeline[i] for i in ends] if rank in (pipeline[0], pipeline[-1]) else [rank]


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_rank_of_the_pipeline_is_known_by_its_world_rank(comm):
    for config in layouts(comm.size):
        with open_mesh(comm, config) as mesh:
            ranks = mesh.pp.allgather(mesh.world.rank)
            assert [mesh.world_rank(peer) for peer in range(mesh.pp.size)] == ranks


@pytest.mark.parallel([1, 2, 3, 4])
def test_ranks_of_a_node_are_known(comm):
    hosts = comm.allgather(MPI.Get_processor_name())
    with open_mesh(comm, MeshConfig()) as mesh:
        assert mesh.node.allgather(comm.rank) == [r for r, host in enumerate(hosts) if host == hosts[comm.rank]]


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_message_of_one_axis_cannot_be_taken_on_another(comm):
    with open_mesh(comm, MeshConfig()) as mesh:
        neighbour, other = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent = [mesh.dp.isend("gradient", neighbour, 0), mesh.world.isend("control", neighbour, 0)]
        assert mesh.world.recv(source=other, tag=0) == "control"
        assert mesh.dp.recv(source=other, tag=0) == "gradient"
        for request in sent:
            request.wait()


@pytest.mark.parallel([1, 2, 3, 4])
def test_communicators_are_freed(comm):
    """MPICH has 2048 context ids a process; 400 meshes of six communicators would need more, were they kept."""
    for _ in range(400):
        with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
            pass
    assert all(part == MPI.COMM_NULL for part in (mesh.world, mesh.dp, mesh.pp, mesh.tp, mesh.node, mesh.ends))


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_mesh_that_does_not_fit_is_rejected_on_every_rank(comm):
    with (
        pytest.raises(MeshError, match=rf"= {comm.size + 1}, but the job has {comm.size}"),
        open_mesh(comm, MeshConfig(dp=comm.size + 1)),
    ):
        pass


@pytest.mark.parametrize("order", ["tp,dp,pp", "pp,tp,dp"])
@pytest.mark.parametrize("tp", [1, 3])
def test_where_a_rank_stands_is_said_with_its_part_of_the_layers_if_they_are_split(order, tp):
    config = MeshConfig(dp=2, pp=2, tp=tp, order=order)
    said = [describe_rank(rank, 4 * tp, config) for rank in range(4 * tp)]
    part = [f", tp {place}" for place in range(tp)] if tp > 1 else [""]
    assert sorted(said) == sorted(f"dp {dp}, stage {stage}{end}" for dp in (0, 1) for stage in (0, 1) for end in part)
