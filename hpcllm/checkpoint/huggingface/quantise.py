"""Write a model as a Hugging Face folder whose linear layers are held in 8 or 4 bits: `python -m hpcllm quantise`.

    checkpoint, adapters with their base, or a folder
        linear layers of blocks --one by one, float32--> rounded to nearest --> codes, scales      few_bits.py
        embedding, norms, biases, output layer           as they are stored
        config.json                                      with the key quantization_config

A folder of one file of weights, written beside its name and renamed when it is whole. In one process, in which one
weight at a time is whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hpcllm.checkpoint.file_layout import temporary_path
from hpcllm.checkpoint.huggingface import few_bits
from hpcllm.checkpoint.huggingface.architectures import Architecture, read_model
from hpcllm.checkpoint.huggingface.export import as_json, make_texts
from hpcllm.checkpoint.huggingface.folder import CONFIG, SINGLE, Folder, which
from hpcllm.checkpoint.huggingface.merge import MergedWeights, has_adapters, open_merged
from hpcllm.checkpoint.huggingface.safetensors import lay_out
from hpcllm.checkpoint.huggingface.settings import Settings
from hpcllm.checkpoint.layout import MODEL, DatasetSpec, as_bytes
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import check_names, tokenizer_json
from hpcllm.checkpoint.slabs import whole
from hpcllm.checkpoint.state import as_tensor, facts
from hpcllm.config.schema import ModelConfig, from_tables
from hpcllm.errors import ConfigError, HuggingFaceError
from hpcllm.model.quantised import Quantisation, QuantisedWeight
from hpcllm.model.shapes import parameter_count, parameter_shapes
from hpcllm.system.raw_files import disk_errors, sync

OURS = {"I8": "int8", "I32": "int32", "I64": "int64", "F32": "float32"}  # types of a header -> of DatasetSpec


@dataclass(frozen=True)
class Report:
    """Result of a quantisation. Bytes: of all tensors, as they were stored and as they are now."""

    source: str
    target: str
    architecture: str
    parameters: int
    bits: int
    group: int  # inputs with one scale; 0: all of a row
    stored_bytes: int
    bytes: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class _Opened:
    source: Checkpoint | Folder | MergedWeights
    model: ModelConfig
    architecture: Architecture
    texts: Mapping[str, str]


def quantise(path: Path, target: Path, bits: int, advance: Callable[[int], None] = lambda _: None) -> Report:
    """Write the folder. path: a checkpoint, a run folder, or a Hugging Face folder. bits: 8 or 4. Not collective.

    advance: gets the bytes that were read, as they are. Raises HuggingFaceError, DataError or ConfigError before a byte
    is written; CheckpointError, HuggingFaceError.
    """
    started_s = time.perf_counter()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} is there already; remove it, or name another")
    with _open(path) as opened:
        model = opened.model
        how = Quantisation(bits, few_bits.choose_group(model, bits))
        few_bits.check(opened.architecture.names, model, how)
        stored = sum(opened.source.specs[f"{MODEL}/{name}"].bytes for name in parameter_shapes(model))
        with temporary_path(target, None) as folder:
            written = _write(opened, how, folder, advance)
            with disk_errors(HuggingFaceError, f"cannot finish {target}"):
                folder.replace(target)
    kind, count, time_s = opened.architecture.kind, parameter_count(model), time.perf_counter() - started_s
    return Report(str(path), str(target), kind, count, bits, how.group, stored, written, time_s)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[_Opened]:
    path, is_folder = which(path)
    if is_folder:
        with Folder.open(path) as folder:
            if folder.quantisation:
                raise ConfigError(
                    f"{path} is held in {folder.quantisation.bits} bits already; name the weights it came from"
                )
            architecture, _ = read_model(Settings(json.loads(folder.texts[CONFIG]), CONFIG))
            yield _Opened(folder, folder.model, architecture, folder.texts)
        return
    with Checkpoint.open(path) as checkpoint, contextlib.ExitStack() as stack:
        model = from_tables(facts(checkpoint).config).model
        source: Checkpoint | MergedWeights = checkpoint
        if has_adapters(checkpoint, None):
            source = stack.enter_context(open_merged(checkpoint))
        else:
            check_names(checkpoint, MODEL, parameter_shapes(model))
        dtype = source.specs[f"{MODEL}/embedding.weight"].dtype
        texts = make_texts(source.attributes, tokenizer_json(checkpoint), model, "", dtype, keeps_types=True)
        yield _Opened(source, model, *texts)


def _write(opened: _Opened, how: Quantisation, folder: Path, advance: Callable[[int], None]) -> int:
    """Write the files of the folder; returns the bytes of its tensors."""
    names = opened.architecture.names
    theirs = names.tensor_map(opened.model, names.prefix)
    specs: dict[str, DatasetSpec] = {}
    for name, shape in parameter_shapes(opened.model).items():
        if few_bits.is_held(name, shape):
            parts = few_bits.tensors_of(theirs[name].name, shape, how).items()
            specs |= {part: DatasetSpec(size, OURS[dtype]) for part, (size, dtype) in parts}
        else:
            specs[theirs[name].name] = DatasetSpec(shape, opened.source.specs[f"{MODEL}/{name}"].dtype)
    header, offsets = lay_out(specs)
    table = json.loads(opened.texts[CONFIG]) | {few_bits.KEY: few_bits.written(how, names.head)}
    total = sum(spec.bytes for spec in specs.values())
    with disk_errors(HuggingFaceError, f"cannot write {folder}"):
        folder.mkdir(parents=True)
        space = os.statvfs(folder)
        if len(header) + total > space.f_bavail * space.f_frsize:
            raise HuggingFaceError(f"{folder.parent} has no room for {len(header) + total:,} bytes")
        with (folder / SINGLE).open("xb") as file:
            file.write(header)
            for name, shape in parameter_shapes(opened.model).items():
                for part, values in _tensors(opened, how, name, theirs[name].name, shape):
                    _put(file, values, offsets[part])
                advance(math.prod(shape) * opened.source.specs[f"{MODEL}/{name}"].item_bytes)
        for name, text in {**opened.texts, CONFIG: as_json(table)}.items():
            (folder / name).write_text(text, encoding="utf-8")
            sync(folder / name)
        sync(folder / SINGLE)
        sync(folder)
    return total


def _tensors(
    opened: _Opened, how: Quantisation, name: str, theirs: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of theirs that hold a parameter. Raises HuggingFaceError for values that are no numbers."""
    slab = whole(f"{MODEL}/{name}", shape)
    values = opened.source.read(slab)
    if not few_bits.is_held(name, shape):
        yield theirs, values
        return
    outputs, inputs = shape
    weight = QuantisedWeight(outputs, inputs, how.bits, torch.device("cpu"), how.group)
    weight.set(as_tensor(values, opened.source.specs[slab.dataset].dtype).float())
    codes, scales = (part.numpy() for part in weight.parts)
    if not np.isfinite(scales).all():
        raise HuggingFaceError(f"{name} holds NaN or infinite values; `checkpoint inspect` shows which tensors do")
    parts = few_bits.tensors_of(theirs, shape, how)
    yield from zip(parts, (codes, scales, np.array(shape, "<i8")), strict=False)  # the shape is of 4 bits


def _put(file: BinaryIO, values: np.ndarray, offset: int) -> None:
    file.seek(offset)
    file.write(as_bytes(np.ascontiguousarray(values)))
