"""One of our checkpoints -> a folder of weights as Hugging Face has it.

    all      the same plan: which tensor of theirs lies in which file, at which byte
    rank 0   folder aside, files of their full length, headers
    all      blocks of parameters, shared by size --read--> (round) --> pwrite at the place of their tensor, fsync
    rank 0   config.json, tokenizer.json, index, fsync, rename

A tensor that is fused of several of ours is never put together in memory: each of ours goes to its own places in it.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcllm.checkpoint.ahead import ahead
from hpcllm.checkpoint.layout import MODEL, DatasetSpec, as_bytes
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.shares import my_blocks
from hpcllm.checkpoint.slabs import Slab, runs
from hpcllm.config import ModelConfig
from hpcllm.errors import HpcllmError, InterchangeError
from hpcllm.interchange.architectures import Architecture
from hpcllm.interchange.contents import INDEX, SINGLE
from hpcllm.interchange.dtype import cast
from hpcllm.interchange.places import Place
from hpcllm.interchange.safetensors import lay_out
from hpcllm.interchange.texts import as_json
from hpcllm.model.shapes import parameter_shapes
from hpcllm.raw_hdf5 import sync, write_at
from hpcllm.together import on_root, place_in, raise_together


@dataclass(frozen=True)
class Plan:
    """Where each tensor of theirs goes. Pure; the same on all ranks."""

    places: Mapping[str, Place]  # our name -> theirs
    shapes: Mapping[str, tuple[int, ...]]  # of ours
    specs: Mapping[str, DatasetSpec]  # of theirs
    files: Mapping[str, str]  # their name -> file
    offsets: Mapping[str, int]  # of theirs in its file
    fronts: Mapping[str, bytes]  # of each file

    def file_bytes(self, file: str) -> int:
        return len(self.fronts[file]) + sum(self.specs[name].bytes for name, at in self.files.items() if at == file)


def plan(model: ModelConfig, architecture: Architecture, dtypes: Mapping[str, str], shard_bytes: float) -> Plan:
    """dtypes: our name -> type in the file. A file holds at most so many bytes of tensors, or one tensor.

    Raises InterchangeError if parts of one tensor of theirs are of different types.
    """
    shapes = parameter_shapes(model)
    places = architecture.names.places(model, architecture.names.prefix)
    specs: dict[str, DatasetSpec] = {}
    for name, place in places.items():
        spec = DatasetSpec(place.shape(shapes[name]), dtypes[name])
        if specs.setdefault(place.name, spec) != spec:
            raise InterchangeError(f"{name} is {spec.dtype}, but shares {place.name} with another type; give --dtype")
    shards = _shards(specs, shard_bytes)
    files = {name: _file_name(number, len(shards)) for number, shard in enumerate(shards) for name in shard}
    laid_out = [lay_out({name: specs[name] for name in shard}) for shard in shards]
    fronts = {_file_name(number, len(shards)): front for number, (front, _) in enumerate(laid_out)}
    offsets = {name: offset for _, part in laid_out for name, offset in part.items()}
    return Plan(places, shapes, specs, files, offsets, fronts)


def write_folder(
    checkpoint: Checkpoint,
    kind: str,
    plan: Plan,
    texts: Mapping[str, str],
    target: Path,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the folder; what is at `target`, at most an empty folder, is replaced once it is whole.

    kind: of the checkpoint's tensors to write, model or optimizer/master. texts: file -> what it says. advance: told
    the bytes that this rank has read, as it does. Collective over checkpoint.comm.
    Raises CheckpointError, InterchangeError; what was written is then gone.
    """
    comm = checkpoint.comm
    aside = on_root(comm, lambda: _aside(target))
    try:
        on_root(comm, lambda: _create(aside, plan))
        _write_together(checkpoint, kind, plan, aside, advance)
        on_root(comm, lambda: _finish(aside, target, plan, texts))
    except BaseException:
        if comm is None or comm.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


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


def _aside(target: Path) -> Path:
    """Beside the target, so that the rename stays on one file system."""
    return target.with_name(f"{target.name}.tmp-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")


def _create(aside: Path, plan: Plan) -> None:
    try:
        aside.mkdir(parents=True)
        space = os.statvfs(aside)
        free, needed = space.f_bavail * space.f_frsize, sum(map(plan.file_bytes, plan.fronts))
        if needed > free:
            raise InterchangeError(f"{aside.parent} has {free:,} bytes free, but the weights need {needed:,}")
        for file, front in plan.fronts.items():
            with (aside / file).open("xb") as out:
                out.write(front)
                out.truncate(plan.file_bytes(file))
    except OSError as error:
        raise InterchangeError(f"cannot create {aside}: {error.strerror}") from error


def _write_together(checkpoint: Checkpoint, kind: str, plan: Plan, aside: Path, advance: Callable[[int], None]) -> None:
    comm = checkpoint.comm
    rank, ranks = place_in(comm)
    specs = {name: checkpoint.datasets[f"{kind}/{name}"].spec for name in plan.places}
    blocks = my_blocks(specs, rank, ranks)
    error: Exception | None = None
    try:
        with _Files(aside) as files:
            read = ahead(lambda block: checkpoint.read_block(f"{kind}/{block[0]}", block[1]), blocks, ranks)
            for (name, index), values in zip(blocks, read, strict=True):
                advance(values.nbytes)
                values = cast(values, specs[name].dtype, plan.specs[plan.places[name].name].dtype, f"{MODEL}/{name}")
                _write(files, values, specs[name].block(name, index), plan)
            files.sync()
    except (HpcllmError, OSError) as fault:
        error = fault
    raise_together(comm, error)


def _write(files: _Files, values: np.ndarray, block: Slab, plan: Plan) -> None:
    """A block of ours into its places in theirs."""
    place = plan.places[block.dataset]
    spec, file, offset = plan.specs[place.name], plan.files[place.name], plan.offsets[place.name]
    for theirs, rows in place.boxes(block, plan.shapes[block.dataset]):
        data = as_bytes(np.ascontiguousarray(values[rows].T if place.transposed else values[rows]))
        done = 0
        for begin, length in runs(theirs, spec.shape, spec.item_bytes):
            write_at(files.descriptor(file), data[done : done + length], offset + begin)
            done += length


class _Files:
    """The files that this rank has written to."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._descriptors = folder, dict[str, int]()

    def descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self._folder / file, os.O_WRONLY)
        return self._descriptors[file]

    def sync(self) -> None:
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _finish(aside: Path, target: Path, plan: Plan, texts: Mapping[str, str]) -> None:
    if len(plan.fronts) > 1:
        total = {"total_size": sum(spec.bytes for spec in plan.specs.values())}
        total["total_parameters"] = sum(math.prod(spec.shape) for spec in plan.specs.values())
        texts = {**texts, INDEX: as_json({"metadata": total, "weight_map": dict(sorted(plan.files.items()))})}
    try:
        for file, text in texts.items():
            (aside / file).write_text(text, encoding="utf-8")
            sync(aside / file)
        sync(aside)
        aside.replace(target)
        sync(target.parent)
    except OSError as error:
        raise InterchangeError(f"cannot finish {target}: {error.strerror}") from error
