"""A model and a prompt -> text. A checkpoint is enough: it holds tokenizer, run file and the template of its chats.

    checkpoint, or a Hugging Face folder --> this rank's part of the weights --> sampling.py --> tokens --> text
                                        `--> tokenizer, template --> prompt as tokens, tokens that end an answer

One process starts no MPI, so that it works where only a login node is; several ranks share a model by
several_ranks.py.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcllm.checkpoint.huggingface.folder import Folder, which
from hpcllm.checkpoint.huggingface.merge import MergedWeights, has_adapters, open_merged
from hpcllm.checkpoint.layout import MODEL
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import read_model
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.state import as_tensor, facts
from hpcllm.config.schema import Config, DataConfig, MeshConfig, ModelConfig, from_tables
from hpcllm.data.chat import Rendered, open_template
from hpcllm.data.chat_template import RejectedError
from hpcllm.data.model_texts import ModelTexts, model_texts
from hpcllm.data.tokenizer import Encoder, controls_of
from hpcllm.errors import CheckpointError, ConfigError, DataError
from hpcllm.model.initialisation import CPU, allocate
from hpcllm.model.sampling import (
    CachedDecoder,
    NextToken,
    TokenSampler,
    check_prompt,
    check_settings,
    generate,
    local_next_token,
)
from hpcllm.model.shapes import Shape, StageSpan, parameter_shapes, shard_of, split_layers
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, tensor_parallel
from hpcllm.model.transformer import Decoder
from hpcllm.mpi.collective_errors import on_root
from hpcllm.system.device import choose_device, take_device, torch_dtype

if TYPE_CHECKING:
    from hpcllm.mpi.mesh import Mesh

Boxes = Mapping[str, tuple[Shape, Tensor]]  # name -> start of a rank's part in the global tensor, and its memory


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
    chat: bool = False,
) -> Iterator[str]:
    """Continue `prompt` by up to `tokens` tokens, or to the end of the text or of an assistant's turn.

    Yields a piece a token, one at the end. chat: the prompt is what a user says, rendered by the template of the
    model's chats, and what follows is the answer.

    path: a checkpoint, a run folder for its newest, or a Hugging Face folder. precision: type to compute in, fp32, bf16
    or fp16, whatever the weights are stored in. device: as run.device. mesh: of dp = 1, whose ranks share the model;
    then this is collective, each piece too, and all ranks get the same text. Same arguments, same text; on another mesh
    or device the same but for rounding.

    Raises before the first piece: DataError if there is no such file or the prompt is not Unicode, CheckpointError or
    HuggingFaceError if it is damaged or of no text model, ConfigError for a setting out of range, a device that is not
    there or a chat with a model that has no template, MeshError for a mesh that the model cannot be split over.
    """
    check_settings(tokens, temperature, top_k)
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed = {seed} is out of range; valid: 0 <= seed < 2^63")
    if any("\ud800" <= c <= "\udfff" for c in prompt):
        raise DataError("the prompt is not UTF-8; give it in that encoding, or set the locale that it is in")
    place = take_device(device, mesh.world, mesh.node).device if mesh else choose_device(device)
    comm = mesh.world if mesh else None
    path, is_folder = on_root(comm, lambda: which(path))
    text, ids, stops = on_root(comm, lambda: _prompt(path, prompt, chat))
    decoder = load_model(path, is_folder, torch_dtype(precision), place, mesh)
    tokenizer, model = Encoder(text), decoder.model
    vocabulary = min(tokenizer.vocabulary, model.vocabulary)
    check_prompt(ids, vocabulary)
    sampler = TokenSampler(temperature, top_k, vocabulary, torch.Generator().manual_seed(seed))
    next_token = _next_token(decoder, sampler, len(ids) + tokens, mesh)
    return _as_text(generate(next_token, ids, tokens, model.max_sequence, stops), tokenizer)


def _prompt(path: Path, prompt: str, chat: bool) -> tuple[str, list[int], set[int]]:
    """Return the tokenizer as JSON, the prompt's tokens, and those that end what follows it. Not collective."""
    texts = model_texts(path)
    if not texts.tokenizer_json:
        raise CheckpointError(f"{path} holds no tokenizer, so it cannot read a prompt")
    if chat and not texts.template.text:
        raise ConfigError(f"{path} has no chat template: it was not trained on chats; valid: leave out --chat")
    tokenizer = Encoder(texts.tokenizer_json)
    ends, rendered = _rendered(texts, prompt, chat)
    stops = {tokenizer.end_of_text, *(tokenizer.id_of(token) for token in ends)}
    if rendered:
        return texts.tokenizer_json, tokenizer.encode_chats([rendered])[0][0].tolist(), stops
    ids = tokenizer.encode([prompt])[0].tolist()[:-1]  # encode closes a document
    return texts.tokenizer_json, ids or [tokenizer.end_of_text], stops


def _rendered(texts: ModelTexts, prompt: str, chat: bool) -> tuple[frozenset[str], Rendered | None]:
    """Return the control tokens that end an answer, and of a chat the prompt with the beginning of its answer."""
    if not texts.template.text:
        return frozenset(), None
    try:
        with open_template(texts.template, controls_of(texts.tokenizer_json)) as template:
            return template.ends_of_turn(), template.beginning(prompt) if chat else None
    except RejectedError as error:
        raise ConfigError(f"the prompt makes no chat: {error.reason} {error.detail}".rstrip()) from error
    except DataError:
        if chat:
            raise
        return frozenset(), None  # a text goes on without a template that does not compile or does not end


def _next_token(decoder: Decoder, sampler: TokenSampler, most_tokens: int, mesh: Mesh | None) -> NextToken:
    if mesh is None:
        return local_next_token(decoder, sampler, most_tokens)
    from hpcllm.inference.several_ranks import DistributedGeneration  # starts MPI

    return DistributedGeneration(mesh, CachedDecoder(decoder, most_tokens), sampler).next_token


def _as_text(tokens: Iterator[int], tokenizer: Encoder) -> Iterator[str]:
    # a character may take several tokens: pieces wait in the decoder until they are whole
    whole = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield whole.decode(tokenizer.decode(np.array([token])))
    yield whole.decode(b"", final=True)


def load_model(path: Path, is_folder: bool, dtype: torch.dtype, device: torch.device, mesh: Mesh | None) -> Decoder:
    """Load this rank's part of a checkpoint, of adapters with their base, or of a Hugging Face folder.

    path, is_folder: as folder.which returns them. mesh: each of its replicas gets the model; None: one process has all
    of it. Collective over the mesh. Raises UserError, CheckpointError.
    """
    comm = mesh.world if mesh else None
    if is_folder:
        with Folder.open(path, comm) as folder:
            return _load_source(folder, folder.model, dtype, device, mesh)
    with Checkpoint.open(path, comm) as checkpoint:
        if not has_adapters(checkpoint, comm):
            return load_decoder(checkpoint, dtype, mesh, device)
        with open_merged(checkpoint) as merged:
            return _load_source(merged, merged.config.model, dtype, device, mesh)


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
    device: torch.device = CPU,
) -> Decoder:
    """Load this rank's part of a checkpoint's model, without a mesh all of it.

    Collective over the mesh. Raises CheckpointError, MeshError.
    """
    model = from_tables(facts(checkpoint).config).model
    decoder, boxes = _allocate(model, dtype, device, mesh)
    read_model(checkpoint, parameter_shapes(model), boxes)
    return decoder


def _load_source(
    source: Folder | MergedWeights, model: ModelConfig, dtype: torch.dtype, device: torch.device, mesh: Mesh | None
) -> Decoder:
    """Load this rank's part of a folder's model, or of a base with its adapters."""
    decoder, boxes = _allocate(model, dtype, device, mesh)
    for name, (start, weight) in boxes.items():
        slab = Slab(f"{MODEL}/{name}", start, tuple(weight.shape))
        weight.data.copy_(as_tensor(source.read(slab), source.specs[slab.dataset].dtype))
    return decoder


def _allocate(model: ModelConfig, dtype: torch.dtype, device: torch.device, mesh: Mesh | None) -> tuple[Decoder, Boxes]:
    """Make this rank's decoder without values, and find where its parameters begin in the global tensors."""
    span, tp = _part(model, mesh) if mesh else (split_layers(model, 1)[0], ALONE)
    decoder, shapes = allocate(model, span, tp, dtype, device), parameter_shapes(model)
    boxes = {n: (shard_of(n, shapes[n], tp.rank, tp.size)[0], p) for n, p in decoder.named_parameters()}
    return decoder, boxes


def _part(model: ModelConfig, mesh: Mesh) -> tuple[StageSpan, TensorParallel]:
    """Return the layers and the tp group of this rank. Raises MeshError."""
    from hpcllm.collectives import group_of
    from hpcllm.pipeline.actions import Placement
    from hpcllm.plan.resolve import check_layout, check_vocabulary, layer_spans

    sizes = MeshConfig(dp=mesh.dp.size, pp=mesh.pp.size, tp=mesh.tp.size)
    config = Config(model=model, mesh=sizes, data=DataConfig(global_batch=mesh.dp.size))
    check_vocabulary(check_layout(config, mesh.world.size))
    spans = layer_spans(config, Placement(sizes.pp))
    return spans[mesh.pp.rank], tensor_parallel(group_of(mesh.tp))
