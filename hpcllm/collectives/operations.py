"""The blocking collectives: checks of array, communicator and codec, and the algorithm that does the work.

    from hpcllm.collectives import allreduce
    allreduce(gradients, comm, codec="int8")

    array (torch, NumPy, CuPy) --flat--> (n,) where it is --plan--> ALGORITHMS[operation][name](..., group, codec)

Arrays on a device stay there: codecs and sums run on its current stream, and what goes through MPI lies where MPI can
read it (mpi/message_memory.py). Results are complete on that stream, as those of any other operation of torch.

Every rank of the communicator makes the same call with arrays of the same length and dtype, the same codec and
algorithm. All raise ValueError for what cannot be done, StallError when the group's waits have a limit and it passes,
CodecError for damaged bytes, CollectiveError on a communicator where a collective failed before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from mpi4py import MPI

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.catalogue import VALUE_TYPES, find_codec
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives import (
    auto,
    broadcasts,
    bruck,
    doubling,
    grid,
    library_calls,
    native,
    node_window,
    pairwise,
    ring,
    two_level,
    two_step,
)
from hpcllm.collectives.arrays import Array, flat, new_like, overlap
from hpcllm.collectives.group import Group, group_of
from hpcllm.collectives.selection import SUMS
from hpcllm.mpi.partition import chunk_range

__all__ = ["ALGORITHMS", "allgather", "allreduce", "alltoall", "broadcast", "chunk_range", "reduce_scatter"]

ALGORITHMS: dict[str, dict[str, Callable[..., None]]] = {
    "allreduce": {
        "ring": ring.ring_allreduce,
        "two_step": two_step.two_step_allreduce,
        "grid": grid.grid_allreduce,
        "recursive_doubling": doubling.recursive_doubling_allreduce,
        "rabenseifner": doubling.rabenseifner_allreduce,
        "node_window": node_window.node_window_allreduce,
        "two_level": two_level.two_level_allreduce,
        "native": native.native_allreduce,
    },
    "reduce_scatter": {
        "ring": ring.ring_reduce_scatter,
        "two_step": two_step.two_step_reduce_scatter,
        "node_window": node_window.node_window_reduce_scatter,
        "native": native.native_reduce_scatter,
    },
    "allgather": {
        "ring": ring.ring_allgather,
        "bruck": bruck.bruck_allgather,
        "node_window": node_window.node_window_allgather,
        "native": native.native_allgather,
    },
    "alltoall": {
        "pairwise": pairwise.pairwise_alltoall,
        "bruck": bruck.bruck_alltoall,
        "native": native.native_alltoall,
    },
    "broadcast": {
        "binomial": broadcasts.binomial_broadcast,
        "ring": broadcasts.ring_broadcast,
        "native": native.native_broadcast,
    },
}
CPU_ONLY = ("node_window",)  # algorithms that work in memory which the ranks of a node share


def allreduce(
    x: Array, comm: MPI.Intracomm | Group, codec: str | Codec = "raw", algorithm: str = "auto", out: Array | None = None
) -> Array:
    """The sum over ranks of x, of any shape; the same bits on every rank. Collective over comm.

    x: contiguous, float32, bfloat16 or float16; sums are made in fp32. In place, unless `out`, like x, is given.
    """
    group = group_of(comm)
    if algorithm == "auto" and out is None and library_calls.call_in_place("allreduce", x, group, codec):
        return x
    values = flat(x, written=out is None)
    if out is not None:
        values = _copied(values, x, out)
    _run("allreduce", values, codec, algorithm, group, values)
    return x if out is None else out


def reduce_scatter(
    x: Array, comm: MPI.Intracomm | Group, codec: str | Codec = "raw", algorithm: str = "auto", out: Array | None = None
) -> Array:
    """This rank's chunk, chunk_range(x's values, ranks, rank), of the sum over ranks of x. Collective over comm.

    x: contiguous, float32, bfloat16 or float16. Left as it is, unless `out` is that very chunk of it. Returns out, or a
    new (own chunk,) array of x's kind.
    """
    group = group_of(comm)
    if algorithm == "auto" and (done := library_calls.call_between("reduce_scatter", x, out, group, codec)) is not None:
        return done
    values = flat(x, written=False)
    start, end = chunk_range(values.numel(), group.size, group.rank)
    out = new_like(x, (end - start,)) if out is None else out
    result = _like("out", out, values, end - start)
    if overlap(values, result) and result.data_ptr() != values[start:end].data_ptr():
        raise ValueError("reduce_scatter: out shares memory with x but is not this rank's chunk of it")
    _run("reduce_scatter", values, codec, algorithm, group, values, result)
    return out


def allgather(
    part: Array,
    comm: MPI.Intracomm | Group,
    codec: str | Codec = "raw",
    algorithm: str = "auto",
    out: Array | None = None,
) -> Array:
    """Every rank's part, in rank order, on every rank; through the codec the owner's too. Collective over comm.

    part: contiguous, of any dtype with the codec raw. Without out all parts have the same length, and the result is
    new, (ranks * d0, d1, ...) for parts (d0, d1, ...). With out, part is chunk_range(out's values, ranks, rank) of it,
    and may be that very memory.
    """
    group = group_of(comm)
    if algorithm == "auto" and (done := library_calls.call_between("allgather", part, out, group, codec)) is not None:
        return done
    values = flat(part, written=False)
    if out is None:
        shape = tuple(part.shape) or (1,)
        out = new_like(part, (group.size * shape[0], *shape[1:]))
    result = _like("out", out, values, math.prod(out.shape))
    start, end = chunk_range(result.numel(), group.size, group.rank)
    if values.numel() != end - start:
        raise ValueError(
            f"allgather: out has {result.numel()} values, of which rank {group.rank} of {group.size} owns "
            f"{end - start}, but part has {values.numel()}"
        )
    if overlap(values, result) and values.data_ptr() != result[start:end].data_ptr():
        raise ValueError("allgather: part overlaps out but is not this rank's chunk of it")
    _run("allgather", result, codec, algorithm, group, values, result)
    return out


def alltoall(
    x: Array, comm: MPI.Intracomm | Group, codec: str | Codec = "raw", algorithm: str = "auto", out: Array | None = None
) -> Array:
    """Block r of x goes to rank r; block r of the result came from rank r. Collective over comm.

    x: contiguous, as many blocks of the same length as ranks, of any dtype with the codec raw; left as it is. A rank's
    block for itself is not encoded. Returns out, or a new array of x's kind and shape.
    """
    group = group_of(comm)
    if algorithm == "auto" and (done := library_calls.call_between("alltoall", x, out, group, codec)) is not None:
        return done
    values = flat(x, written=False)
    if values.numel() % group.size:
        raise ValueError(f"alltoall: {values.numel()} values do not make {group.size} blocks of the same length")
    out = new_like(x, tuple(x.shape)) if out is None else out
    result = _like("out", out, values, values.numel())
    if overlap(values, result):
        raise ValueError("alltoall: out shares memory with x")
    _run("alltoall", values, codec, algorithm, group, values, result)
    return out


def broadcast(
    x: Array, comm: MPI.Intracomm | Group, root: int = 0, codec: str | Codec = "raw", algorithm: str = "auto"
) -> Array:
    """root's x on every rank, in place; through a lossy codec root too gets the decoded values. Collective over comm.

    x: contiguous, of any dtype with the codec raw.
    """
    group = group_of(comm)
    if algorithm == "auto" and library_calls.call_in_place("broadcast", x, group, codec, root):
        return x
    if not 0 <= root < group.size:
        raise ValueError(f"broadcast: root {root} is none of {group.size} ranks; valid: 0 to {group.size - 1}")
    values = flat(x, written=True)
    _run("broadcast", values, codec, algorithm, group, values, root)
    return x


def _run(
    operation: str, counted: torch.Tensor, codec: str | Codec, algorithm: str, group: Group, *arguments: Any
) -> None:
    """Resolve codec and algorithm, and call it. What a failed collective leaves behind makes its group unusable.

    counted: the array whose length, dtype and device say what there is to do.
    """
    group.check()
    function, found = _choice(operation, counted, codec, algorithm, group)
    memory = group.wire.turn_to(counted.device)
    memory.enter()
    try:
        function(*arguments, group, memory.staged(found))
    except ValueError:
        raise  # rejected before a message was sent
    except BaseException as error:
        group.broken = f"{operation}: {error}"
        raise
    finally:
        memory.leave()


def _choice(
    operation: str, counted: torch.Tensor, codec: str | Codec, algorithm: str, group: Group
) -> tuple[Callable[..., None], Codec]:
    algorithms, n, dtype, place = ALGORITHMS[operation], counted.numel(), counted.dtype, counted.device.type
    if algorithm != "auto":
        _check_algorithm(operation, algorithm, place)
        return algorithms[algorithm], _bind(operation, codec, dtype, place)
    name = codec if isinstance(codec, str) else codec.name
    key = operation, n, name, dtype, place
    plan = group.plans.get(key)
    if plan is None:
        plan = group.plans[key] = auto.plan(operation, n, _bind(operation, codec, dtype, place), group, place)
    if codec is name or plan.codec.name != name:
        return algorithms[plan.algorithm], plan.codec
    return algorithms[plan.algorithm], _bind(operation, codec, dtype, place)


def valid_algorithms(operation: str, place: str) -> list[str]:
    """Names of the algorithms that take arrays on this type of device."""
    return [name for name in ALGORITHMS[operation] if place == "cpu" or name not in CPU_ONLY]


def _check_algorithm(operation: str, algorithm: str, place: str) -> None:
    valid = valid_algorithms(operation, place)
    if algorithm in ALGORITHMS[operation] and algorithm not in valid:
        raise ValueError(f"{algorithm} works in memory of the CPU, the array is on {place}; valid: {', '.join(valid)}")
    if algorithm not in valid:
        raise ValueError(f"{operation}: algorithm {algorithm!r} is unknown; valid: auto, {', '.join(valid)}")


def _bind(operation: str, codec: str | Codec, dtype: torch.dtype, place: str) -> Codec:
    """The codec for this operation on values of this dtype, there. Raises ValueError with what would be valid."""
    if operation in SUMS and dtype not in VALUE_TYPES:
        raise ValueError(f"{operation} sums {', '.join(map(str, VALUE_TYPES))}, not {dtype}")
    if not isinstance(codec, str):
        if codec.dtype != dtype:
            raise ValueError(f"{operation}: codec {codec.name} is for {codec.dtype}, the values are {dtype}")
        return codec
    plain = codec == "raw" and (place == "cpu" or dtype not in VALUE_TYPES)  # the latter are moved, never added up
    return _raw(dtype) if plain else find_codec(codec, dtype, place)


@cache
def _raw(dtype: torch.dtype) -> Codec:
    return Raw(dtype)


def _like(name: str, out: Array, values: torch.Tensor, n: int) -> torch.Tensor:
    """`out` as a flat tensor that can take n results. Raises ValueError."""
    result = flat(out, written=True)
    if result.dtype != values.dtype or result.numel() != n:
        raise ValueError(f"{name} has {result.numel()} values of {result.dtype}, the result has {n} of {values.dtype}")
    if result.device != values.device:
        raise ValueError(f"{name} is on {result.device}, the values are on {values.device}")
    return result


def _copied(values: torch.Tensor, x: Array, out: Array) -> torch.Tensor:
    """out, as a flat tensor, with x's values in it."""
    if type(out) is not type(x) or tuple(out.shape) != tuple(x.shape):
        raise ValueError(
            f"out is a {type(out).__name__} of shape {tuple(out.shape)}, x a {type(x).__name__} of {tuple(x.shape)}"
        )
    result = _like("out", out, values, values.numel())
    if result.data_ptr() != values.data_ptr():
        if overlap(result, values):
            raise ValueError("out overlaps x but is not x")
        result.copy_(values)
    return result
