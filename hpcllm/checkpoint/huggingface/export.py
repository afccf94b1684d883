"""Write one of our checkpoints as a folder of weights as Hugging Face has it.

    all      the same plan: which tensor of theirs lies in which file, at which byte
    rank 0   temporary folder, files of their full length, headers
    all      blocks of parameters, shared by size --read--> (round) --> pwrite at the place of their tensor, fsync
    rank 0   config.json, tokenizer.json, index, fsync, rename

A tensor that is fused of several of ours is never put together in memory: each of ours goes to its own places in it.
Small files are those that the weights came with, or new ones that say the same:

    config.json             the architecture
    generation_config.json  where a text begins and ends
    tokenizer.json          as the run had it; tokenizer_config.json: how transformers should load it
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
import torch

from hpcllm.checkpoint.file_layout import temporary_path
from hpcllm.checkpoint.huggingface.architectures import Architecture, canonical, read_model, write_model
from hpcllm.checkpoint.huggingface.folder import (
    CARRIED,
    COMPANIONS,
    CONFIG,
    INDEX,
    SINGLE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
)
from hpcllm.checkpoint.huggingface.safetensors import lay_out
from hpcllm.checkpoint.huggingface.settings import Settings
from hpcllm.checkpoint.huggingface.tensor_map import MappedTensor
from hpcllm.checkpoint.layout import END_OF_TEXT_NAMES, MODEL, TEMPLATE, Attribute, DatasetSpec, as_bytes, my_blocks
from hpcllm.checkpoint.reader import map_ahead
from hpcllm.checkpoint.slabs import Slab, runs
from hpcllm.checkpoint.state import as_tensor
from hpcllm.config.schema import ModelConfig
from hpcllm.errors import HuggingFaceError
from hpcllm.model.shapes import parameter_shapes
from hpcllm.mpi.collective_errors import on_all, on_root, rank_and_size
from hpcllm.system.raw_files import disk_errors, sync, write_at

if TYPE_CHECKING:
    from mpi4py import MPI

DTYPE_OPTIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # as on the command line -> as files have it


class Source(Protocol):
    """Whole weights: a checkpoint, or adapters merged into their base."""

    @property
    def comm(self) -> MPI.Intracomm | None: ...

    @property
    def specs(self) -> Mapping[str, DatasetSpec]: ...

    def read(self, slab: Slab) -> np.ndarray:
        """Read a slab, in its shape and the stored type (bfloat16 as uint16). Not collective, for any thread."""


@dataclass(frozen=True)
class ExportPlan:
    """File and offset of each tensor of theirs, the same on all ranks."""

    tensor_map: Mapping[str, MappedTensor]  # our name -> their tensor
    shapes: Mapping[str, tuple[int, ...]]  # of ours
    specs: Mapping[str, DatasetSpec]  # of theirs
    files: Mapping[str, str]  # their name -> file
    offsets: Mapping[str, int]  # of theirs in its file
    headers: Mapping[str, bytes]  # of each file

    def file_bytes(self, file: str) -> int:
        return len(self.headers[file]) + sum(self.specs[name].bytes for name, at in self.files.items() if at == file)


def plan_export(
    model: ModelConfig, architecture: Architecture, dtypes: Mapping[str, str], shard_bytes: float
) -> ExportPlan:
    """Plan the files, each of at most shard_bytes of tensors, or one tensor. dtypes: our name -> type in the file.

    Raises HuggingFaceError if parts of one tensor of theirs are of different types.
    """
    shapes = parameter_shapes(model)
    tensors = architecture.names.tensor_map(model, architecture.names.prefix)
    specs: dict[str, DatasetSpec] = {}
    for name, tensor in tensors.items():
        spec = DatasetSpec(tensor.shape(shapes[name]), dtypes[name])
        if specs.setdefault(tensor.name, spec) != spec:
            raise HuggingFaceError(f"{name} is {spec.dtype}, but shares {tensor.name} with another type; give --dtype")
    shards = _shards(specs, shard_bytes)
    files = {name: _file_name(number, len(shards)) for number, shard in enumerate(shards) for name in shard}
    laid_out = [lay_out({name: specs[name] for name in shard}) for shard in shards]
    headers = {_file_name(number, len(shards)): header for number, (header, _) in enumerate(laid_out)}
    offsets = {name: offset for _, part in laid_out for name, offset in part.items()}
    return ExportPlan(tensors, shapes, specs, files, offsets, headers)


def write_folder(
    source: Source,
    kind: str,
    plan: ExportPlan,
    texts: Mapping[str, str],
    target: Path,
    advance: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Write the folder; an empty folder at `target` is replaced once it is whole.

    kind: of the source's tensors to write, model or optimizer/master. texts: file -> its text. advance: gets
    the bytes that this rank has read, as it does. Returns the names of tensors that hold NaN or infinite values, of
    which this rank has seen a block. Collective over source.comm.
    Raises CheckpointError, HuggingFaceError; what was written is then removed.
    """
    comm = source.comm
    with temporary_path(target, comm) as folder:
        on_root(comm, lambda: _create(folder, plan))
        not_finite = _write_blocks(source, kind, plan, folder, advance)
        on_root(comm, lambda: _finish(folder, target, plan, texts))
    return not_finite


def _shards(specs: Mapping[str, DatasetSpec], shard_bytes: float) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= spec.bytes
    return shards


def _file_name(number: int, shards: int) -> str:
    return SINGLE if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"


def _create(folder: Path, plan: ExportPlan) -> None:
    with disk_errors(HuggingFaceError, f"cannot create {folder}"):
        folder.mkdir(parents=True)
        space = os.statvfs(folder)
        free, needed = space.f_bavail * space.f_frsize, sum(map(plan.file_bytes, plan.headers))
        if needed > free:
            raise HuggingFaceError(f"{folder.parent} has {free:,} bytes free, but the weights need {needed:,}")
        for file, header in plan.headers.items():
            with (folder / file).open("xb") as out:
                out.write(header)
                out.truncate(plan.file_bytes(file))


def _write_blocks(
    source: Source, kind: str, plan: ExportPlan, folder: Path, advance: Callable[[int], None]
) -> list[str]:
    rank, ranks = rank_and_size(source.comm)
    specs = {name: source.specs[f"{kind}/{name}"] for name in plan.tensor_map}
    blocks = my_blocks(specs, rank, ranks)
    not_finite: dict[str, None] = {}

    def copy() -> None:
        files: dict[str, BinaryIO] = {}
        with contextlib.ExitStack() as closing:
            slabs = (specs[name].block(f"{kind}/{name}", index) for name, index in blocks)
            read = map_ahead(source.read, slabs, ranks)
            for (name, index), values in zip(blocks, read, strict=True):
                advance(values.nbytes)
                if not is_finite(values, specs[name].dtype):
                    not_finite[name] = None
                theirs = plan.tensor_map[name].name
                file = plan.files[theirs]
                if file not in files:
                    files[file] = closing.enter_context((folder / file).open("r+b", buffering=0))
                values = cast(values, specs[name].dtype, plan.specs[theirs].dtype, f"{MODEL}/{name}")
                _write(files[file].fileno(), values, specs[name].block(name, index), plan)
            for out in files.values():
                os.fsync(out.fileno())

    on_all(source.comm, copy)
    return list(not_finite)


def _write(descriptor: int, values: np.ndarray, block: Slab, plan: ExportPlan) -> None:
    """Write a block of ours into its places in theirs."""
    tensor = plan.tensor_map[block.dataset]
    spec, offset = plan.specs[tensor.name], plan.offsets[tensor.name]
    for theirs, rows in tensor.boxes(block, plan.shapes[block.dataset]):
        data = as_bytes(np.ascontiguousarray(values[rows].T if tensor.transposed else values[rows]))
        done = 0
        for begin, length in runs(theirs, spec.shape, spec.item_bytes):
            write_at(descriptor, data[done : done + length], offset + begin)
            done += length


def _finish(folder: Path, target: Path, plan: ExportPlan, texts: Mapping[str, str]) -> None:
    if len(plan.headers) > 1:
        total = {"total_size": sum(spec.bytes for spec in plan.specs.values())}
        total["total_parameters"] = sum(math.prod(spec.shape) for spec in plan.specs.values())
        texts = {**texts, INDEX: as_json({"metadata": total, "weight_map": dict(sorted(plan.files.items()))})}
    with disk_errors(HuggingFaceError, f"cannot finish {target}"):
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
            sync(folder / file)
        sync(folder)
        folder.replace(target)
        sync(target.parent)


def as_json(table: dict[str, Any]) -> str:
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


def make_texts(
    attributes: Mapping[str, Attribute], tokenizer: str, model: ModelConfig, kind: str, dtype: str, keeps_types: bool
) -> tuple[Architecture, dict[str, str]]:
    """Make the small files; returns the architecture to write, and file -> its text.

    attributes, tokenizer: of the checkpoint. kind: of architecture, "" for the one that the weights came in, else the
    first that can say the model. dtype: of the weights; keeps_types: none were rounded to it. Raises HuggingFaceError.
    """
    words = {TOKENIZER_FILE: tokenizer} if tokenizer else {}
    if template := str(attributes.get(TEMPLATE, "")):
        words[TEMPLATE_FILE] = template
    names = {file: f"{CARRIED}/{file}" for file in (CONFIG, *COMPANIONS)}
    carried = {file: str(attributes[name]) for file, name in names.items() if name in attributes}
    if CONFIG in carried:
        table = json.loads(carried[CONFIG])
        architecture, before = read_model(Settings(table, CONFIG))
        if kind in ("", architecture.kind) and before == canonical(model):
            if not keeps_types:
                carried[CONFIG] = as_json({**table, "dtype" if "dtype" in table else "torch_dtype": dtype})
            return architecture, {**carried, **words}
    architecture, table = write_model(model, kind)
    return architecture, {**_new(table, tokenizer, dtype, model), **words}


def _new(table: dict[str, Any], tokenizer: str, dtype: str, model: ModelConfig) -> dict[str, str]:
    content, end = _end_of_text(tokenizer) if tokenizer else (None, None)
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}  # as GPT-2: one token parts texts
    texts = {CONFIG: as_json({**table, **ids, "torch_dtype": dtype}), "generation_config.json": as_json(ids)}
    if content:
        names = {"bos_token": content, "eos_token": content, "clean_up_tokenization_spaces": False}
        loads = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.max_sequence}
        texts["tokenizer_config.json"] = as_json({**loads, **names})
    return texts


def _end_of_text(tokenizer: str) -> tuple[str | None, int | None]:
    """The special token between texts and its number, as `data.tokenizer` finds it, but without the library."""
    added = json.loads(tokenizer).get("added_tokens", [])
    special = {token["content"]: token["id"] for token in added if token.get("special")}
    return next(((name, special[name]) for name in END_OF_TEXT_NAMES if name in special), (None, None))


def is_finite(values: np.ndarray, stored: str) -> bool:
    """True if no value of a block is NaN or infinite."""
    if stored == "bfloat16":  # as uint16: all bits of the exponent are set
        return not bool(((values & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(values).all())


def cast(values: np.ndarray, stored: str, wanted: str, name: str) -> np.ndarray:
    """Convert values to another type, to the nearest; the array itself where the types are the same.

    Raises HuggingFaceError if a number becomes infinite: fp16 ends at 65504.
    """
    if stored == wanted:
        return values
    before = as_tensor(values, stored)
    after = before.to(getattr(torch, wanted))
    if wanted == "float16" and not bool((after.isfinite() | ~before.isfinite()).all()):
        raise HuggingFaceError(f"{name} has values beyond fp16's largest, 65504; valid: --dtype bf16 or fp32")
    return after.view(torch.uint16).numpy() if wanted == "bfloat16" else after.numpy()
