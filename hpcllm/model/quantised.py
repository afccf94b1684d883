"""A frozen weight in 8 or 4 bits a value, made whole again for each product.

    row of a weight   [ 64 inputs ][ 64 inputs ][ 20 inputs, zeros ]     a group: whole numbers and one float32 scale
    bits a value      8 + 32/64 or 4 + 32/64; rounded to nearest         |error| <= scale / 2, scale = absmax / 127 or 7

Groups are as the codecs int8:64 and int4:64 have their blocks, and so are the kernels, on the CPU and on devices. They
lie along the inputs and end with the row, so a rank of tp that holds some outputs has the groups that one rank has; of
a layer that is split by inputs tp may only cut between groups, which a run file's check sees to.

Forward and backward pass each make the weight whole, use it for one product and free it: a pass over 4 (or 2) bytes a
value, little beside a product with hundreds of tokens, and no second layout for the product with the transposed weight.
PyTorch's kernels for packed weights multiply by the weight alone, not by its transpose, and int8's know no groups.
Source: arXiv:2305.14314 section 3, whose blocks have 64 values too, but codes of another spacing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcllm.codecs import find_codec
from hpcllm.config.schema import GROUP


class QuantisedWeight:
    """Weight (outputs, inputs) as a codec's bytes; without values until `set` is called."""

    def __init__(self, outputs: int, inputs: int, bits: int, device: torch.device) -> None:
        """bits: 8 or 4."""
        self.shape, self.name = (outputs, inputs), f"int{bits}:{GROUP}"
        self._padded = -(-inputs // GROUP) * GROUP
        size = find_codec(self.name).encoded_bytes(outputs * self._padded)
        self.data = torch.empty(size, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def set(self, values: Tensor) -> None:
        """Round values (outputs, inputs), float32, to what the groups can hold."""
        outputs, inputs = self.shape
        padded = values.new_zeros(outputs, self._padded)
        padded[:, :inputs] = values
        find_codec(self.name, device=self.data.device.type).encode(padded.view(-1), self.data)

    @torch.no_grad()
    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return (outputs, inputs) of a floating-point type, in memory of its own; rows may be strided."""
        outputs, inputs = self.shape
        padded = torch.empty(outputs, self._padded, dtype=dtype, device=self.data.device)
        find_codec(self.name, dtype, self.data.device.type).decode(self.data, padded.view(-1))
        return padded[:, :inputs]
