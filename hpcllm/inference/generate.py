"""A model and prompts -> texts. A checkpoint is enough: it holds tokenizer, run file and the template of its chats.

    checkpoint, or a Hugging Face folder --> this rank's part of the weights --> complete.py --> tokens --> texts
                                        `--> tokenizer, template --> prompts as tokens, tokens that end an answer

One process starts no MPI, so that it works where only a login node is; several ranks share a model by
several_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcllm.checkpoint.huggingface import few_bits
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
from hpcllm.inference.batch import Request
from hpcllm.inference.complete import BatchSettings, generate_batch, make_batch
from hpcllm.inference.endings import StopStrings, pieces
from hpcllm.model.initialisation import CPU, allocate
from hpcllm.model.quantised import Quantisation
from hpcllm.model.sampling import Sampling, check_prompt, seed_of
from hpcllm.model.shapes import Shape, StageSpan, parameter_shapes, shard_of, split_layers
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, tensor_parallel
from hpcllm.model.transformer import Decoder
from hpcllm.mpi.collective_errors import on_root
from hpcllm.system.device import choose_device, take_device, torch_dtype

if TYPE_CHECKING:
    from hpcllm.mpi.mesh import Mesh

Boxes = Mapping[str, tuple[Shape, Tensor]]  # name -> start of a rank's part in the global tensor, and its memory


@dataclass(frozen=True)
class TextSettings:
    """Settings of texts: how their tokens are drawn, from which seed, and where they end."""

    sampling: Sampling = field(default_factory=Sampling)
    batch: BatchSettings = field(default_factory=BatchSettings)
    seed: int = 0
    samples: int = 1  # texts of each prompt
    stops: tuple[str, ...] = ()  # strings that end a text, of which they are no part
    chat: bool = False  # a prompt is what a user says, rendered by the template of the model's chats

    def check(self) -> None:
        """Raise ConfigError for a setting that is out of range."""
        self.sampling.check()
        self.batch.check()
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed = {self.seed} is out of range; valid: 0 <= seed < 2^63")
        if self.samples < 1:
            raise ConfigError(f"samples = {self.samples} is out of range; valid: 1 or more")


@dataclass(frozen=True)
class Place:
    """Device and type that a model computes in. mesh: whose replicas share it; None: this process alone."""

    precision: str = "fp32"  # or bf16, fp16, whatever the weights are stored in
    device: str = "auto"  # as run.device
    mesh: Mesh | None = None


@dataclass(frozen=True)
class Completion:
    """Text that follows a prompt. prompt, sample: their numbers, from 0."""

    prompt: int
    sample: int
    text: str
    tokens: int
    reason: str  # why it ended: "stop", at a token or a string that ends it, or "length"


@dataclass(frozen=True)
class _Opened:
    decoder: Decoder
    prompts: list[list[int]]
    stops: StopStrings
    batch: BatchSettings
    vocabulary: int


def continue_prompt(path: Path, prompt: str, settings: TextSettings, place: Place) -> Iterator[str]:
    """Continue a prompt, to the end of the text or of an assistant's turn or to the bounds of the settings.

    Yields a piece a token, one at the end. path: a checkpoint, a run folder for its newest, or a Hugging Face folder.
    The mesh has dp = 1; with one this is collective, each piece too, and all ranks get the same text. Same arguments,
    same text: that of sample 0 of `complete`; on another mesh or device the same but for rounding.

    Raises before the first piece: DataError if there is no such file or the prompt is not Unicode, CheckpointError or
    HuggingFaceError if it is damaged or of no text model, ConfigError for a setting out of range, a device that is not
    there or a chat with a model that has no template, MeshError for a mesh that the model cannot be split over.
    """
    opened = _open(path, [prompt], settings, place)
    request = Request(opened.prompts[0], seed_of(settings.seed, 0, 0))
    check_prompt(request.prompt, opened.vocabulary)
    batch = make_batch(
        opened.decoder, [request], settings.sampling, opened.batch, opened.vocabulary, place.mesh, opened.stops.is_over
    )
    return pieces(batch, opened.stops)


def complete(path: Path, prompts: Sequence[str], settings: TextSettings, place: Place) -> Iterator[Completion]:
    """Continue many prompts, as many times each as `samples` says; yields a completion when it has come to its end.

    Draws depend on the seed, the number of the prompt and that of the sample, not on what else is made or where.
    With a mesh this is collective and all ranks get all completions; replicas (dp) share the prompts. Raises what
    continue_prompt does, and DataError for a list without prompts.
    """
    opened = _open(path, prompts, settings, place)
    numbers = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(settings.samples)]
    requests = [Request(opened.prompts[p], seed_of(settings.seed, p, sample)) for p, sample in numbers]
    texts = generate_batch(
        opened.decoder, requests, settings.sampling, opened.batch, opened.vocabulary, place.mesh, opened.stops.is_over
    )
    return (
        Completion(*numbers[text.index], opened.stops.text_of(text.tokens), len(text.tokens), text.reason)
        for text in texts
    )


def _open(path: Path, prompts: Sequence[str], settings: TextSettings, place: Place) -> _Opened:
    """Check everything, turn prompts into tokens and load this rank's part of the model. Collective over the mesh."""
    settings.check()
    for number, prompt in enumerate(prompts):
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            which_one = f"prompt {number + 1}" if len(prompts) > 1 else "the prompt"
            raise DataError(f"{which_one} is not UTF-8; give it in that encoding, or set the locale that it is in")
    mesh = place.mesh
    device = take_device(place.device, mesh.world, mesh.node).device if mesh else choose_device(place.device)
    comm = mesh.world if mesh else None
    path, is_folder = on_root(comm, lambda: which(path))
    text, ids, ends = on_root(comm, lambda: _prompts(path, prompts, settings.chat))
    tokenizer = Encoder(text)
    stops = StopStrings(settings.stops, tokenizer)
    decoder = load_model(path, is_folder, torch_dtype(place.precision), device, mesh)
    vocabulary = min(tokenizer.vocabulary, decoder.model.vocabulary)
    return _Opened(decoder, ids, stops, replace(settings.batch, stops=ends), vocabulary)


def _prompts(path: Path, prompts: Sequence[str], chat: bool) -> tuple[str, list[list[int]], frozenset[int]]:
    """Return the tokenizer as JSON, the prompts' tokens, and those that end what follows them. Not collective."""
    texts = model_texts(path)
    if not texts.tokenizer_json:
        raise CheckpointError(f"{path} holds no tokenizer, so it cannot read a prompt")
    if chat and not texts.template.text:
        raise ConfigError(f"{path} has no chat template: it was not trained on chats; valid: leave out --chat")
    tokenizer = Encoder(texts.tokenizer_json)
    ends, rendered = _rendered(texts, prompts, chat)
    stops = frozenset({tokenizer.end_of_text, *(tokenizer.id_of(token) for token in ends)})
    if chat:
        return texts.tokenizer_json, [ids.tolist() for ids, _ in tokenizer.encode_chats(rendered)], stops
    found = [ids.tolist()[:-1] for ids in tokenizer.encode(prompts)]  # encode closes a document
    return texts.tokenizer_json, [ids or [tokenizer.end_of_text] for ids in found], stops


def _rendered(texts: ModelTexts, prompts: Sequence[str], chat: bool) -> tuple[frozenset[str], list[Rendered]]:
    """Return the control tokens that end an answer, and of chats the prompts with the beginnings of their answers."""
    if not texts.template.text:
        return frozenset(), []
    try:
        with open_template(texts.template, controls_of(texts.tokenizer_json)) as template:
            return template.ends_of_turn(), [template.beginning(prompt) for prompt in prompts if chat]
    except RejectedError as error:
        raise ConfigError(f"the prompt makes no chat: {error.reason} {error.detail}".rstrip()) from error
    except DataError:
        if chat:
            raise
        return frozenset(), []  # a text goes on without a template that does not compile or does not end


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
    quantisation = source.quantisation if isinstance(source, Folder) else None
    if quantisation and quantisation.group and mesh:
        few_bits.check_cuts(model, quantisation, mesh.tp.size)
    decoder, boxes = _allocate(model, dtype, device, mesh, quantisation)
    for name, (start, weight) in boxes.items():
        slab = Slab(f"{MODEL}/{name}", start, tuple(weight.shape))
        weight.data.copy_(as_tensor(source.read(slab), source.specs[slab.dataset].dtype))
    if isinstance(source, Folder):
        shapes, tp = parameter_shapes(model), decoder.tp
        for name, held in decoder.quantised.items():
            start, shape = shard_of(name, shapes[name], tp.rank, tp.size)
            held.fill(*source.read_codes(Slab(f"{MODEL}/{name}", start, shape)))
    return decoder


def _allocate(
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh | None,
    quantisation: Quantisation | None = None,
) -> tuple[Decoder, Boxes]:
    """Make this rank's decoder without values, and find where its parameters begin in the global tensors."""
    span, tp = _part(model, mesh) if mesh else (split_layers(model, 1)[0], ALONE)
    decoder = allocate(model, span, tp, dtype, device, quantisation=quantisation)
    shapes = parameter_shapes(model)
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
