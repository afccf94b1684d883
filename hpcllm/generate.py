"""A model and a prompt -> text. What is given is enough by itself: a checkpoint holds tokenizer and run file.

    checkpoint, or a Hugging Face folder --> this rank's part of the weights --> sampling.py --> tokens --> text

One process starts no MPI, so that it works where only a login node is; several ranks share a model by stages.py.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcllm.checkpoint.facts import facts
from hpcllm.checkpoint.layout import MODEL
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import read_model, tokenizer_json
from hpcllm.checkpoint.slabs import Slab
from hpcllm.config import Config, DataConfig, MeshConfig, ModelConfig, from_tables
from hpcllm.data.tokenizer import Encoder
from hpcllm.device import choose, take
from hpcllm.errors import CheckpointError, ConfigError, DataError
from hpcllm.interchange.dtype import as_tensor
from hpcllm.interchange.folder import Folder, which
from hpcllm.model.initialisation import CPU, allocate
from hpcllm.model.sampling import Drawing, NextToken, Reader, alone, check_prompt, check_settings, generate
from hpcllm.model.shapes import Shape, StageSpan, parameter_shapes, split_layers
from hpcllm.model.shards import shard_of
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, tensor_parallel
from hpcllm.model.transformer import Decoder
from hpcllm.precision import DTYPES
from hpcllm.together import on_root

if TYPE_CHECKING:
    from hpcllm.mesh import Mesh

Boxes = Mapping[str, tuple[Shape, Tensor]]  # name -> where in the global tensor a rank's part begins, and its memory


def continue_prompt(
    path: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    precision: str = "fp32",
    device: str = "auto",
    mesh: Mesh | None = None,
) -> Iterator[str]:
    """Text that continues `prompt`, up to `tokens` tokens or the end of the text: a piece a token, and one at the end.

    path: a checkpoint, a run folder for its newest, or a Hugging Face folder. precision: fp32, bf16 or fp16, what to
    compute in, whatever the weights are stored in. device: as run.device. mesh: of dp = 1, whose ranks share the model;
    then this is collective, each piece too, and all get the same text. Same arguments, same text; on another mesh or
    device the same but for rounding.

    Raises before the first piece: DataError if there is no such file or the prompt is not Unicode, CheckpointError or
    InterchangeError if it is damaged or of no text model, ConfigError for a setting out of range or a device that is
    not there, MeshError for a mesh that the model cannot be split over.
    """
    check_settings(tokens, temperature, top_k)
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed = {seed} is out of range; valid: 0 <= seed < 2^63")
    if any("\ud800" <= c <= "\udfff" for c in prompt):
        raise DataError("the prompt is not UTF-8; give it in that encoding, or set the locale that it is in")
    place = take(device, mesh.world, mesh.node).device if mesh else choose(device)
    decoder, text = _load(path, DTYPES[precision], place, mesh)
    if not text:
        raise CheckpointError(f"{path} holds no tokenizer; it cannot be asked in words")
    tokenizer, model = Encoder(text), decoder.model
    ids = tokenizer.encode([prompt])[0].tolist()[:-1] or [tokenizer.end_of_text]  # encode closes a document
    vocabulary = min(tokenizer.vocabulary, model.vocabulary)
    check_prompt(ids, vocabulary)
    drawing = Drawing(temperature, top_k, vocabulary, torch.Generator().manual_seed(seed))
    next_token = _next_token(decoder, drawing, len(ids) + tokens, mesh)
    return _as_text(generate(next_token, ids, tokens, model.max_sequence, tokenizer.end_of_text), tokenizer)


def load_decoder(checkpoint: Checkpoint) -> Decoder:
    """The whole model of a checkpoint, in float32. Raises CheckpointError."""
    return of_checkpoint(checkpoint, torch.float32, None)


def _next_token(decoder: Decoder, drawing: Drawing, most_tokens: int, mesh: Mesh | None) -> NextToken:
    if mesh is None:
        return alone(decoder, drawing, most_tokens)
    from hpcllm.stages import Stage  # starts MPI

    return Stage(mesh, Reader(decoder, most_tokens), drawing).next_token


def _as_text(tokens: Iterator[int], tokenizer: Encoder) -> Iterator[str]:
    # a character may take several tokens: pieces wait in the decoder until they are whole
    whole = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield whole.decode(tokenizer.decode(np.array([token])))
    yield whole.decode(b"", final=True)


def _load(path: Path, dtype: torch.dtype, device: torch.device, mesh: Mesh | None) -> tuple[Decoder, str]:
    """This rank's part of the model, and the text of its tokenizer. Collective over the mesh."""
    comm = mesh.world if mesh else None
    path, is_folder = on_root(comm, lambda: which(path))
    if is_folder:
        with Folder.open(path, comm) as folder:
            return _of_folder(folder, dtype, device, mesh), folder.tokenizer_json
    with Checkpoint.open(path, comm) as checkpoint:
        return of_checkpoint(checkpoint, dtype, mesh, device), on_root(comm, lambda: tokenizer_json(checkpoint))


def of_checkpoint(checkpoint: Checkpoint, dtype: torch.dtype, mesh: Mesh | None, device: torch.device = CPU) -> Decoder:
    """This rank's part of a checkpoint's model. Collective over the mesh. Raises CheckpointError, MeshError."""
    model = from_tables(facts(checkpoint).config).model
    decoder, boxes = _allocate(model, dtype, device, mesh)
    read_model(checkpoint, parameter_shapes(model), boxes)
    return decoder


def _of_folder(folder: Folder, dtype: torch.dtype, device: torch.device, mesh: Mesh | None) -> Decoder:
    decoder, boxes = _allocate(folder.model, dtype, device, mesh)
    for name, (start, weight) in boxes.items():
        slab = Slab(f"{MODEL}/{name}", start, tuple(weight.shape))
        weight.data.copy_(as_tensor(folder.read(slab), folder.specs[slab.dataset].dtype))
    return decoder


def _allocate(model: ModelConfig, dtype: torch.dtype, device: torch.device, mesh: Mesh | None) -> tuple[Decoder, Boxes]:
    """The decoder of this rank without values, and where each of its parameters begins in the global tensor."""
    span, tp = _part(model, mesh) if mesh else (split_layers(model, 1)[0], ALONE)
    decoder, shapes = allocate(model, span, tp, dtype, device), parameter_shapes(model)
    boxes = {n: (shard_of(n, shapes[n], tp.rank, tp.size)[0], p) for n, p in decoder.named_parameters()}
    return decoder, boxes


def _part(model: ModelConfig, mesh: Mesh) -> tuple[StageSpan, TensorParallel]:
    """What this rank has of the model. Raises MeshError."""
    from hpcllm.collectives import group_of
    from hpcllm.layout import check_layout, check_vocabulary, spans_of
    from hpcllm.pipeline.placement import Placement

    sizes = MeshConfig(dp=1, pp=mesh.pp.size, tp=mesh.tp.size)
    config = Config(model=model, mesh=sizes, data=DataConfig(global_batch=1))
    check_vocabulary(check_layout(config, mesh.world.size))
    spans = spans_of(config, Placement(sizes.pp))
    return spans[mesh.pp.rank], tensor_parallel(group_of(mesh.tp))
