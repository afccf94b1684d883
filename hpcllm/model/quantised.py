"""A frozen weight in 8 or 4 bits a value, made whole again for each product.

    row of a weight   [ 64 inputs ][ 64 inputs ][ 20 inputs, zeros ]     a group: whole numbers and one float32 scale
    bits a value      8 + 32/64 or 4 + 32/64; rounded to nearest         |error| <= scale / 2, scale = absmax / 127 or 7

Groups are as the codecs int8:64 and int4:64 have their blocks, and so are the kernels, on the CPU and on devices. They
lie along the inputs and end with the row, so a rank of tp that holds some outputs has the groups that one rank has; of
a layer that is split by inputs tp may only cut between groups, which a run file's check sees to. A group may be another
number of inputs, as folders of quantised weights have it: a whole row, of 8 bits.

Forward and backward pass each make the weight whole, use it for one product and free it: a pass over 4 (or 2) bytes a
value, little beside a product with hundreds of tokens, and no second layout for the product with the transposed weight.
A token of each text is multiplied by the codes as they are (token_pass.py), on the CPU; on devices, and where tp splits
the layers, the weight is made whole for it too. PyTorch's kernels for packed weights multiply by the weight alone, not
by its transpose, and int8's know no groups.
Source: arXiv:2305.14314 section 3, whose blocks have 64 values too, but codes of another spacing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcllm.codecs import find_codec
from hpcllm.codecs.blocks import BlockCodec
from hpcllm.codecs.names import BLOCKS
from hpcllm.codecs.protocol import Codec
from hpcllm.codecs.quantise import INT8
from hpcllm.config.schema import GROUP


class Quantisation(NamedTuple):
    """Form in which the linear layers of a model's blocks are held."""

    bits: int  # 8 or 4
    group: int  # inputs with one scale; 0: all of a row


class QuantisedWeight:
    """Weight (outputs, inputs) as a codec's bytes; without values until `set` is called, or `parts` are filled."""

    def __init__(self, outputs: int, inputs: int, bits: int, device: torch.device, group: int = GROUP) -> None:
        """bits: 8 or 4. group: inputs with one scale; 0: all of a row, of 8 bits."""
        self.shape, self.bits, self.group = (outputs, inputs), bits, group or inputs
        self._padded = -(-inputs // self.group) * self.group
        size = self._codec(torch.float32, "cpu").encoded_bytes(outputs * self._padded)
        self.data = torch.empty(size, dtype=torch.uint8, device=device)

    def _codec(self, dtype: torch.dtype, device: str) -> Codec:
        name = f"int{self.bits}:{self.group}"
        return find_codec(name, dtype, device) if self.group in BLOCKS else BlockCodec(name, dtype, self.group, INT8)

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """The codes (outputs, bytes) uint8 and scales (outputs, groups) float32, in place.

        Codes of 8 bits are in two's complement; of 4 bits two are in a byte, 8 added to each, the first one low.
        """
        outputs, count = self.shape[0], self.shape[0] * self._padded
        end, scales = count * self.bits // 8, self.data[-(-count * self.bits // 32) * 4 :]
        return self.data[:end].view(outputs, -1), scales[: 4 * count // self.group].view(torch.float32).view(
            outputs, -1
        )

    @torch.no_grad()
    def set(self, values: Tensor) -> None:
        """Round values (outputs, inputs), float32, to what the groups can hold. With a scale a row: on the CPU."""
        outputs, inputs = self.shape
        padded = values.new_zeros(outputs, self._padded)
        padded[:, :inputs] = values
        self._codec(torch.float32, self.data.device.type).encode(padded.view(-1), self.data)

    def fill(self, codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
        """Copy codes and scales into `parts`."""
        for own, values in zip(self.parts, (codes, scales), strict=True):
            own.copy_(torch.from_numpy(values))

    @torch.no_grad()
    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return (outputs, inputs) of a floating-point type, in memory of its own; rows may be strided."""
        outputs, inputs = self.shape
        if self.group not in BLOCKS:  # which kernels of devices do not have
            codes, scales = self.parts
            return codes.view(torch.int8).to(dtype).mul_(scales)
        padded = torch.empty(outputs, self._padded, dtype=dtype, device=self.data.device)
        self._codec(dtype, self.data.device.type).decode(self.data, padded.view(-1))
        return padded[:, :inputs]
