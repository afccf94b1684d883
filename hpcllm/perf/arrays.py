"""The arrays of one operation at one size, with fresh data in them, and the calls that are timed on them.

               x, left as it was or summed into            out
allreduce      (size,)                                     x
reduce_scatter (size,)                                     (this rank's chunk,)
allgather      (size,)                                     (ranks * size,)
alltoall       (ranks * size,)                             (ranks * size,)
broadcast      (size,)                                     x

All algorithms go through hpcllm.collectives as a caller would, but `mpi`: the library's own blocking collective through
mpi4py and nothing of ours, the baseline of every comparison. The algorithm `native` is the same collective as our
callers get it: nonblocking, with a time limit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mpi4py import MPI

from hpcllm.codecs import Codec
from hpcllm.collectives import operations
from hpcllm.collectives.group import Group
from hpcllm.collectives.window import free_shared, shared_zeros
from hpcllm.mpi import buffers
from hpcllm.mpi.message_memory import mpi_reads_devices
from hpcllm.perf.timing import Case
from hpcllm.perf.values import pattern, unroll
from hpcllm.system.device import synchronize

CPU = torch.device("cpu")
LIBRARY = "mpi"  # the algorithm that is not ours
IN_PLACE = ("allreduce", "broadcast")


def lengths(operation: str, size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Values of x and of out; size is counted as on the command line, in values."""
    start, end = operations.chunk_range(size, ranks, rank)
    x = size * ranks if operation == "alltoall" else size
    return x, {"reduce_scatter": end - start, "allgather": size * ranks}.get(operation, x)


class Arrays:
    """Collective over group, as is `free`. shared: in the node's shared memory, of the CPU."""

    def __init__(
        self,
        operation: str,
        size: int,
        dtype: torch.dtype,
        group: Group,
        device: torch.device = CPU,
        shared: bool = False,
    ) -> None:
        self.operation, self.size, self.group, self.device, self.shared = operation, size, group, device, shared
        x, out = lengths(operation, size, group.rank, group.size)
        self.x = self._zeros(x, dtype)
        self.out = self.x if operation in IN_PLACE else self._zeros(out, dtype)
        values = torch.zeros(x, dtype=dtype)
        if operation != "broadcast" or group.rank == 0:
            unroll(pattern(group.rank, dtype), 0, values)
        self._fresh = values.to(device)

    @property
    def planned(self) -> int:
        """Values that auto.plan counts: of x, for an all-gather of what it brings together."""
        return self.out.numel() if self.operation == "allgather" else self.x.numel()

    def refresh(self) -> None:
        self.x.copy_(self._fresh)
        self.arrive()

    def call(self, algorithm: str, codec: Codec) -> Callable[[], object]:
        """A call without arguments. Raises ValueError if there is none, at the latest when it is called."""
        if algorithm == LIBRARY:
            return library_call(self.operation, self.x, self.out, codec, self.group.comm)
        return collective_call(self.operation, self.x, self.out, self.group, codec.name, algorithm)

    def case(self, algorithm: str, codec: Codec) -> Case:
        """A call to be timed until the device is done, with fresh data each time. Raises ValueError as `call`."""
        call = self.call(algorithm, codec)

        def timed() -> None:
            call()
            self.arrive()

        return Case(timed, self.refresh)

    def arrive(self) -> None:
        """Return when the device has done what it was told."""
        synchronize(self.device)

    def free(self) -> None:
        """Give back shared memory, which would stay as long as the group."""
        if self.shared:
            for array in [self.x] if self.operation in IN_PLACE else [self.x, self.out]:
                if array.numel():
                    free_shared(array, self.group)

    def _zeros(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return shared_zeros(n, self.group, dtype) if self.shared else torch.zeros(n, dtype=dtype, device=self.device)


def collective_call(
    operation: str, x: torch.Tensor, out: torch.Tensor, group: Group, codec: str = "raw", algorithm: str = "auto"
) -> Callable[[], object]:
    """A call of ours without arguments, as users make it."""
    if operation == "allreduce":
        return lambda: operations.allreduce(x, group, codec, algorithm)
    if operation == "broadcast":
        return lambda: operations.broadcast(x, group, 0, codec, algorithm)
    door = getattr(operations, operation)
    return lambda: door(x, group, codec, algorithm, out)


def library_call(
    operation: str, x: torch.Tensor, out: torch.Tensor, codec: Codec, comm: MPI.Intracomm
) -> Callable[[], None]:
    """A call without arguments. x, out: as the front doors take them. Raises ValueError for what MPI cannot do.

    An array on a device must be complete when it is called: the library knows nothing of the device's streams.
    """
    if codec.name != "raw":
        raise ValueError(f"the MPI library takes raw arrays, not {codec.name}")
    if not (x.is_cpu or mpi_reads_devices()):
        raise ValueError(f"this MPI library cannot read memory of {x.device}")
    if operation in ("allreduce", "reduce_scatter"):
        return _sum(operation, x, out, comm)
    send, receive = ([buffers.as_buffer(tensor), MPI.BYTE] for tensor in (x, out))
    if operation == "allgather":
        return lambda: comm.Allgather(send, receive)
    if operation == "alltoall":
        return lambda: comm.Alltoall(send, receive)
    return lambda: comm.Bcast(send, root=0)


def _sum(operation: str, x: torch.Tensor, out: torch.Tensor, comm: MPI.Intracomm) -> Callable[[], None]:
    if x.dtype != torch.float32:
        raise ValueError(f"MPI adds up float32, it has no portable {x.dtype}")
    send, receive = ([buffers.as_buffer(tensor), MPI.FLOAT] for tensor in (x, out))
    if operation == "allreduce":
        return lambda: comm.Allreduce(MPI.IN_PLACE, send)
    ends = [x.numel() * rank // comm.size for rank in range(comm.size + 1)]
    counts = [ends[rank + 1] - ends[rank] for rank in range(comm.size)]
    return lambda: comm.Reduce_scatter(send, receive, counts)
