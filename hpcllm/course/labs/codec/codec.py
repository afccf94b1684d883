"""Lab 3: block int8, and what it is worth. Fill in this file, then run `hpcllm course check`."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Values = NDArray[np.float32]
Bytes = NDArray[np.uint8]
BLOCK = 256
LEAST_SCALE = np.float32(2.0**-126)  # the least normal float32


def encode(values: Values) -> Bytes:
    """Return the encoding of (n,) values, any n: a new array of n + 4 * (number of blocks) uint8. values stay.

    A block is 256 values, the last one what is left. First come the scales, a float32 for each block, then the codes,
    an int8 for each value:

        scale = largest |value| of the block / 127, but never below LEAST_SCALE
        code  = value / scale, rounded to the nearest, so that |value - code * scale| <= scale / 2

    Codes are -127 to 127, and those of -values are minus those of values. A block with a value that is not finite has
    the scale NaN and codes 0, so that it decodes to NaN as a whole; it changes no other block. Values are up to 1e38.
    """
    raise NotImplementedError


def decode(data: Bytes, n: int) -> Values:
    """Return the n values of an encoding, code * scale: a new array (n,) of float32. data stays."""
    raise NotImplementedError


def with_feedback(values: Values, residual: Values) -> Bytes:
    """Return the encoding of values + residual; afterwards residual, in place, is what that encoding left out.

    So what is sent over many steps is, up to the last residual, the sum of the values. Where it is not finite,
    residual is 0: else one NaN would be there for ever. values stay.
    """
    raise NotImplementedError


def pays_from(link_bytes_per_s: float, call_s: float, codec_bytes_per_s: float) -> float:
    """Return the n from which a message of n float32 values comes sooner encoded than plain; math.inf where never.

    A message of b bytes takes b / link_bytes_per_s. To encode and to decode n values take call_s + 4 n /
    codec_bytes_per_s together. An encoded value takes 1 + 4 / BLOCK bytes.
    """
    raise NotImplementedError


def allreduce(x: Values, comm: MPI.Intracomm) -> None:
    """Replace x by the sum over all ranks, near to it, with the same bits on all. Collective over comm.

    Two steps: the owner of each part of `np.array_split(x, comm.size)` gets everybody's encoding of it, adds up in
    float32, its own addend included, and sends the encoding of the sum to everybody. x: (n,) float32, any n, on each
    rank as long.
    """
    raise NotImplementedError


PREDICTIONS: dict[str, float | None] = {
    "bytes": None,  # of the encoding of a million values
    "sent_bytes": None,  # that one rank of 4 sends in an allreduce of a million values
    "crossover": None,  # MB/s of a link on which your codec, on this machine, takes as long as it saves
    "speedup": None,  # of your sum of 4 MiB over one of float32, on 4 ranks with links of 10 MB/s
}
