"""What tests of collectives on a device share: the front doors, and which algorithms meet which codecs there."""

from __future__ import annotations

import laws
import torch

from hpcllm.codecs import find_codec
from hpcllm.collectives import allgather, allreduce, alltoall, broadcast, reduce_scatter
from hpcllm.collectives.operations import ALGORITHMS, valid_algorithms

DEVICE = "pretend"  # as text: there is no such device in a process that has not started it
DOORS = {
    "allreduce": allreduce,
    "reduce_scatter": reduce_scatter,
    "allgather": allgather,
    "alltoall": alltoall,
    "broadcast": broadcast,
}
NAMES = {operation: valid_algorithms(operation, DEVICE) for operation in ALGORITHMS}


def on_device(dtype: torch.dtype) -> list[str]:
    """The codecs that have a twin there."""

    def has_twin(name: str) -> bool:
        try:
            return find_codec(name, dtype, DEVICE) is not None
        except ValueError:
            return False

    return [name for name in laws.CODECS if has_twin(name)]


def cases(operation: str) -> list[tuple[str, str, torch.dtype]]:
    return [
        (algorithm, codec, dtype)
        for algorithm in NAMES[operation]
        for dtype in laws.DTYPES
        for codec in on_device(dtype)
        if (algorithm != "native" or (codec == "raw" and dtype == torch.float32))
        and (dtype != torch.float16 or codec in ("raw", "int8"))
    ]
