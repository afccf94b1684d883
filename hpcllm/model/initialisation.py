"""Initial weights that do not depend on the layout.

    (seed, name) --blake2b--> key --+
                                    +--> Philox --> 64 random bits --> uniform in (0, 1) --> normal
    element's global index --> counter

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is a function of a counter, not a sequence,
so any stage makes its own part of the model, and any tp rank its own shard of a tensor, without the rest. The inverse
of the normal distribution takes exactly one number an element, which keeps the index and the counter in step; a
table-driven or pair-wise method would not.

Scheme of GPT-2: standard deviation 0.02; the two projections that write to the residual path of each layer divided by
sqrt(2 layers), so that the sum over the layers starts with the same spread at any depth; norms 1, biases 0. Adapters
begin as nothing: b is 0, and a is normal (arXiv:2106.09685 section 4.1) with the variance of PEFT's, 1 / (3 inputs).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcllm.config.schema import AdapterConfig, ModelConfig
from hpcllm.model.linear import Linear
from hpcllm.model.quantised import Quantisation
from hpcllm.model.shapes import ADAPTER_A, ADAPTER_B, StageSpan, adapter_shapes, parameter_shapes, shard_of
from hpcllm.model.tensor_parallel import ALONE, TensorParallel
from hpcllm.model.transformer import NO_ADAPTERS, Decoder

STANDARD_DEVIATION = 0.02
RESIDUAL_OUTPUTS = ("attention.output.weight", "ffn.down.weight")
CHUNK = 2**20  # elements made at once: 16 MiB of scratch however large the tensor is
CPU = torch.device("cpu")
WORDS_PER_COUNT = 4  # Philox4x64 gives four words for each value of its counter


def build(
    model: ModelConfig, span: StageSpan, seed: int, tp: TensorParallel = ALONE, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Make the span's decoder with its initial weights. Same seed: same values on any layout, without communication.

    Of a parameter that tp splits, a rank makes its shard alone. Values are made in float32, then cast to dtype.
    """
    decoder = allocate(model, span, tp, dtype)
    initialise(decoder, model, seed, tp)
    return decoder


def allocate_chunks(
    model: ModelConfig,
    spans: Sequence[StageSpan],
    tp: TensorParallel = ALONE,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    bare: bool = False,
    adapter: AdapterConfig = NO_ADAPTERS,
) -> list[Decoder]:
    """Make a rank's decoders, in the order of the model; a tied embedding that is first and last is one parameter.

    bare, adapter: as for `allocate`.
    """
    decoders = [allocate(model, span, tp, dtype, device, bare, adapter) for span in spans]
    first, last = decoders[0], decoders[-1]
    if model.tied and first.span.has_embedding and last.span.has_head:
        last.embedding = first.embedding  # it gets the gradients of both ends, and no message has to carry one over
    return decoders


def allocate(
    model: ModelConfig,
    span: StageSpan,
    tp: TensorParallel = ALONE,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    bare: bool = False,
    adapter: AdapterConfig = NO_ADAPTERS,
    quantisation: Quantisation | None = None,
) -> Decoder:
    """Make the span's decoder with memory but no values yet: for a checkpoint's reader, which sets every one of them.

    bare: parameters that are trained get no memory, for an optimizer that lays them out itself. quantisation: of the
    linear layers of blocks, None: they are whole.
    """
    with torch.device("meta"):  # else PyTorch would fill each weight with numbers that nobody uses
        decoder = Decoder(model, span, tp, adapter)
        for layer in decoder.blocks.modules():
            if quantisation and isinstance(layer, Linear):
                layer.quantise(quantisation.bits, quantisation.group)
    memory = {}
    for name, p in decoder.named_parameters():
        held_as = p.dtype if p.dtype == torch.bfloat16 else dtype
        memory[name] = torch.empty(p.shape, dtype=held_as, device=device)  # empty_like(meta) loads sympy
        if bare and p.requires_grad:  # one by one: a device may not have room for all of them
            memory[name].untyped_storage().resize_(0)
    decoder.load_state_dict(memory, assign=True)
    for weight in decoder.quantised.values():
        weight.data = torch.empty(weight.data.shape, dtype=torch.uint8, device=device)
    if decoder.table is not None:
        decoder.table = decoder.table.to(device)
    return decoder


@torch.no_grad()
def initialise(decoder: Decoder, model: ModelConfig, seed: int, tp: TensorParallel = ALONE) -> None:
    """Set every parameter of the span in place; see the module's text for the scheme."""
    fill = initial_values(model, seed, tp)
    for name, weight in decoder.named_parameters():
        fill(name, weight)


def initial_values(
    model: ModelConfig, seed: int, tp: TensorParallel = ALONE, adapter: AdapterConfig = NO_ADAPTERS
) -> Callable[[str, Tensor], None]:
    """Return a function that sets one parameter, by its name, in memory that is contiguous and of this rank's shape."""
    shapes = parameter_shapes(model) | adapter_shapes(model, adapter)

    @torch.no_grad()
    def fill(name: str, weight: Tensor) -> None:
        if name.endswith((".bias", ADAPTER_B)):
            weight.zero_()
        elif weight.dim() == 1:
            weight.fill_(1.0)
        elif not weight.is_cpu:  # made there, so that the bits do not depend on the device
            made = torch.empty_like(weight, device=CPU)
            fill(name, made)
            weight.copy_(made)
        else:
            start, _ = shard_of(name, shapes[name], tp.rank, tp.size)
            _fill_normal(weight, start, shapes[name][1], seed, name, _standard_deviation(name, shapes[name], model))

    return fill


def normal_slab(seed: int, name: str, start: int, count: int) -> Tensor:
    """Make elements start .. start+count of the standard normal tensor `name`, in row-major order of its global shape.

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


def _fill_normal(
    weight: Tensor, start: tuple[int, ...], columns: int, seed: int, name: str, standard_deviation: float
) -> None:
    """Fill weight, the box that begins at `start` of a tensor of so many columns; contiguous, of any float type."""
    flat, done = weight.view(-1), 0
    for first, count in _runs(start, weight.shape, columns):
        for piece in range(0, count, CHUNK):
            values = normal_slab(seed, name, first + piece, min(CHUNK, count - piece))
            torch.mul(values, standard_deviation, out=flat[done : done + values.numel()])
            done += values.numel()


def _runs(start: tuple[int, ...], shape: Sequence[int], columns: int) -> Iterator[tuple[int, int]]:
    """Yield global index and length of each stretch of a box that is contiguous in the whole tensor too."""
    first, (rows, width) = start[0] * columns + start[1], shape
    if width == columns:
        yield first, rows * width
    else:
        yield from ((first + row * columns, width) for row in range(rows))


def _standard_deviation(name: str, shape: Sequence[int], model: ModelConfig) -> float:
    if name.endswith(ADAPTER_A):
        return 1 / math.sqrt(3 * shape[1])
    return STANDARD_DEVIATION / (math.sqrt(2 * model.layers) if name.endswith(RESIDUAL_OUTPUTS) else 1.0)
