"""Initial weights that do not depend on the layout.

    (seed, name) --blake2b--> key --+
                                    +--> Philox --> 64 random bits --> uniform in (0, 1) --> normal
    element's global index --> counter

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is a function of a counter, not a sequence,
so any stage makes its own part of the model, and any rank any slab of a tensor, without the rest. The inverse of the
normal distribution takes exactly one number an element, which keeps the index and the counter in step; a table-driven
or pair-wise method would not.

Scheme of GPT-2: standard deviation 0.02; the two projections that write to the residual path of each layer divided by
sqrt(2 layers), so that the sum over the layers starts with the same spread at any depth; norms 1, biases 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcllm.config import ModelConfig
from hpcllm.model.shapes import StageSpan
from hpcllm.model.transformer import Decoder

STANDARD_DEVIATION = 0.02
RESIDUAL_OUTPUTS = ("attention.output.weight", "ffn.down.weight")
CHUNK = 2**20  # elements made at once: 16 MiB of scratch however large the tensor is
WORDS_PER_COUNT = 4  # Philox4x64 gives four words for each value of its counter


def build(model: ModelConfig, span: StageSpan, seed: int) -> Decoder:
    """The span's decoder with its initial weights. Same seed: same values on any layout, without communication."""
    decoder = allocate(model, span)
    initialise(decoder, model, seed)
    return decoder


def build_chunks(model: ModelConfig, spans: Sequence[StageSpan], seed: int) -> list[Decoder]:
    """The decoders of one rank, in the order of the model; a tied embedding that is first and last is one parameter."""
    decoders = [build(model, span, seed) for span in spans]
    first, last = decoders[0], decoders[-1]
    if model.tied and first.span.has_embedding and last.span.has_head:
        last.embedding = first.embedding  # it gets the gradients of both ends, and no message has to carry one over
    return decoders


def allocate(model: ModelConfig, span: StageSpan) -> Decoder:
    """The span's decoder with memory but no values yet: for a checkpoint's reader, which sets every one of them."""
    with torch.device("meta"):  # else PyTorch would fill each weight with numbers that nobody uses
        decoder = Decoder(model, span)
    memory = {name: torch.empty_like(weight, device="cpu") for name, weight in decoder.named_parameters()}
    decoder.load_state_dict(memory, assign=True)
    return decoder


@torch.no_grad()
def initialise(decoder: Decoder, model: ModelConfig, seed: int) -> None:
    """Set every parameter of the span in place; see the module's text for the scheme."""
    for name, weight in decoder.named_parameters():
        if name.endswith(".bias"):
            weight.zero_()
        elif weight.dim() == 1:
            weight.fill_(1.0)
        else:
            _fill_normal(weight, seed, name, _standard_deviation(name, model))


def normal_slab(seed: int, name: str, start: int, count: int) -> Tensor:
    """Elements start .. start+count of the standard normal tensor `name`, in row-major order of its global shape.

    Returns (count,) float32. A pure function of (seed, name, global index): slabs that are cut in another way hold
    the same bits.
    """
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    skip = start % WORDS_PER_COUNT
    philox = np.random.Philox(key=int.from_bytes(key, "little"), counter=start // WORDS_PER_COUNT)
    words = philox.random_raw(skip + count)[skip:]
    # 53 bits are what a float64 holds; the half keeps the ends out, where the normal is infinite
    uniform = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
    normal: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return normal.float()


def _fill_normal(weight: Tensor, seed: int, name: str, standard_deviation: float) -> None:
    flat = weight.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK]
        torch.mul(normal_slab(seed, name, start, chunk.numel()), standard_deviation, out=chunk)


def _standard_deviation(name: str, model: ModelConfig) -> float:
    return STANDARD_DEVIATION / (math.sqrt(2 * model.layers) if name.endswith(RESIDUAL_OUTPUTS) else 1.0)
