"""`mpi`: the library's own blocking collective through mpi4py and nothing of ours, the baseline of every comparison.

The algorithm `native` is the same collective as our callers get it: nonblocking, with a limit, through the front door.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mpi4py import MPI

from hpcllm.codecs import Codec
from hpcllm.messages import buffers
from hpcllm.messages.memory import mpi_reads_devices


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
