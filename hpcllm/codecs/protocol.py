"""The interface of a codec, as collectives use it.

    values (n,) fp32, bf16 or fp16  --encode-->  at most encoded_bytes(n) uint8  --decode-->  values (n,)

A codec is a value: a name such as "int8:256" bound to the dtype of the arrays that it serves, without state. Fixed rate
means that n values always take encoded_bytes(n); the others begin with a header that says how long they are, so that a
receiver can post encoded_bytes(n), the upper bound, before anything is sent.

Machines differ in which NaN a conversion or a product makes: PyTorch on the CPU, CUDA and the kernels of gpu/casts.cu
have three forms in 16 bits. So the rule for numbers is the same bits on every machine, and for a NaN that it is one.
Lossless codecs keep its bits. Ranks agree nevertheless: an owner encodes once, and all decode the same bytes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Codec(Protocol):
    """Encoder and decoder of arrays of one dtype.

    All tensors are contiguous and in the memory of one device, that of find_codec; values at a multiple of their size,
    bytes at one of 4.

    Kernels run in one pass and release the GIL. On a device they are queued on its current stream.
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values: float32, bfloat16 or float16."""

    @property
    def lossless(self) -> bool: ...

    @property
    def fixed_rate(self) -> bool: ...

    @property
    def block(self) -> int:
        """Number of values coded as one: cuts of an array at multiples of it do not change the bytes."""

    def encoded_bytes(self, n: int) -> int:
        """Return the bytes that n values take; with fixed_rate false, the most that they can take."""

    def used_bytes(self, data: torch.Tensor, n: int) -> int:
        """Return the bytes of the encoding of n values at the start of `data` (any length). Raises CodecError."""

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Encode (n,) of dtype; return the bytes: the front of `out` (encoded_bytes(n) uint8) or `values`' own memory.

        index: place of values[0] in the whole array, which seeds stochastic rounding and nothing else.
        """

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Decode (used_bytes,) uint8 to out, (n,) of dtype or float32. Raises CodecError; never writes outside out.

        On a device a codec of variable rate does not wait to see damage; it raises later: gpu/device_codecs.py.
        """

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Add the decoded values to out, (n,) float32, in fp32. Raises CodecError."""

    def bound(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the largest possible |decoded - value| of each finite value; (n,) float64 -> (n,) float64.

        Infinite where a finite value may come back as no number, because a value near it is none.
        """


class SumEncoder(Protocol):
    """Codec on a device that adds up encodings and encodes their sum in one kernel."""

    def sum_encode(
        self, parts: torch.Tensor, own_rank: int, own: torch.Tensor, out: torch.Tensor, index: int = 0
    ) -> torch.Tensor:
        """Encode a sum at the front of `out` (at least encoded_bytes(n) uint8) and return it.

        parts: (ranks, bytes) uint8; row r begins with rank r's encoding of n values, but row own_rank is not read.
        own: (n,) of dtype, the addend of own_rank, and afterwards what the sum's encoding decodes to. The same bits as
        decode, decode_add and encode in rank order.
        """
