"""Folder of weights as Hugging Face has it: checked by one process, then read like a checkpoint, any box on any rank.

    config.json                 architecture, ModelConfig: every key that changes the arithmetic is one that we have
    model.safetensors, or index and shards        where each tensor lies: inside its file, once, in the model's shape
    tokenizer.json, generation_config.json, ...   carried along as they are

    rank 0   read_contents --+
    all                      +--> where each tensor lies --> boxes of theirs that are my slab --> pread

Weights of few bits (few_bits.py) are read as float32 values like all others, or, by read_codes, as they are.

Such a folder comes from strangers. No file in it can run code (pickled weights are rejected), no number of it is used
unchecked, and no name in it leads out of the folder, save links that its owner made, as a download cache does.
"""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from hpcllm.checkpoint.folder import locate
from hpcllm.checkpoint.huggingface import few_bits
from hpcllm.checkpoint.huggingface.architectures import Architecture, read_model
from hpcllm.checkpoint.huggingface.safetensors import DTYPES, Entry, read_header
from hpcllm.checkpoint.huggingface.settings import Settings
from hpcllm.checkpoint.huggingface.tensor_map import MappedTensor
from hpcllm.checkpoint.layout import MODEL, STORED_AS, DatasetSpec, as_bytes
from hpcllm.checkpoint.slabs import Slab, runs
from hpcllm.config.schema import ModelConfig
from hpcllm.errors import DataError, HuggingFaceError
from hpcllm.model.quantised import Quantisation, QuantisedWeight
from hpcllm.model.shapes import parameter_shapes
from hpcllm.mpi.collective_errors import on_root
from hpcllm.system.raw_files import disk_errors, read_at
from hpcllm.system.text import printable

if TYPE_CHECKING:
    from mpi4py import MPI

CONFIG, TOKENIZER_FILE, TEMPLATE_FILE = "config.json", "tokenizer.json", "chat_template.jinja"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# carried along unread, so that what came from a folder goes back into one as it was
COMPANIONS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE)
CARRIED = "interchange"  # group of the attributes that hold a folder's small files, as they were
_LARGEST_TEXT_BYTES = 1 << 28
_LARGEST_CONFIG_BYTES = 1 << 24
_REQUEST_BYTES = 1 << 23


@dataclass(frozen=True)
class Contents:
    """Content of a folder without its tensors, checked."""

    kind: str  # of architecture
    model: ModelConfig
    tensor_map: dict[str, MappedTensor]  # our name -> their tensor
    entries: dict[str, tuple[str, Entry]]  # their name -> file, and place in it
    texts: dict[str, str]  # file -> its text
    notes: tuple[str, ...]  # for people
    quantisation: Quantisation | None = None  # of the linear layers of blocks


def read_contents(path: Path) -> Contents:
    """Read and check everything but the tensors. Not collective. Raises HuggingFaceError."""
    if not path.is_dir():
        raise HuggingFaceError(f"there is no folder {str(path)!r}")
    texts = {name: text for name in (CONFIG, TOKENIZER_FILE, *COMPANIONS) if (text := text_of(path / name)) is not None}
    if CONFIG not in texts:
        raise HuggingFaceError(f"{path} has no {CONFIG}; a Hugging Face folder has one, beside its .safetensors")
    if TOKENIZER_FILE in texts:
        parse(texts[TOKENIZER_FILE], path / TOKENIZER_FILE)
    table = parse(texts[CONFIG], path / CONFIG)
    quantisation = few_bits.read(table, str(path / CONFIG))
    if quantisation:  # whoever gets the texts gets whole weights too
        del table[few_bits.KEY]
        texts[CONFIG] = json.dumps(table, indent=2)
    settings = Settings(table, str(path / CONFIG))
    architecture, model = read_model(settings)
    entries = _entries(path)
    names = architecture.names
    embedding = f"{names.ends['embedding']}.weight"  # where neither is there, it is missing under its usual name
    is_bare = embedding in entries and f"{names.prefix}.{embedding}" not in entries
    tensors = names.tensor_map(model, "" if is_bare else names.prefix)
    head = f"{names.head}.weight"
    if model.tied and head in entries:
        _check_tied(path, entries, tensors["embedding.weight"].name, head)
    ignored = {name for name in entries if names.is_ignored(name) or (model.tied and name == head)}
    wanted = _wanted(architecture, model, tensors, quantisation)
    _check_names(path, wanted, {name: entry for name, (_, entry) in entries.items() if name not in ignored})
    notes = [f"{CONFIG} says {key}, which is not known here and was passed over" for key in settings.unknown_keys()]
    if TOKENIZER_FILE not in texts:
        other = f" (tokenizer.model is another format; save {TOKENIZER_FILE})"
        has_other = (path / "tokenizer.model").exists()
        notes.append(f"there is no {TOKENIZER_FILE}: a model without words{other if has_other else ''}")
    return Contents(architecture.kind, model, tensors, entries, texts, tuple(notes), quantisation)


def parse(text: str, path: Path) -> dict[str, Any]:
    """The table of a JSON file. Raises HuggingFaceError."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HuggingFaceError(f"{path} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise HuggingFaceError(f"{path} holds a {type(table).__name__}; valid: a table of keys")
    return table


def text_of(path: Path) -> str | None:
    """Read a text file; None if there is none. Raises HuggingFaceError."""
    if not path.exists():
        return None
    limit = _LARGEST_TEXT_BYTES if path.name == TOKENIZER_FILE else _LARGEST_CONFIG_BYTES
    size = _file_bytes(path)
    if size > limit:
        raise HuggingFaceError(f"{path} has {size} bytes; valid: at most {limit}")
    with disk_errors(HuggingFaceError, f"cannot read {path}"):
        return path.read_bytes().decode()


def _file_bytes(path: Path) -> int:
    """Size of a plain file, or a link to one; anything else could block whoever opens it. Raises HuggingFaceError."""
    with disk_errors(HuggingFaceError, f"cannot read {path}"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise HuggingFaceError(f"{path} is not a plain file")
    return status.st_size


def _entries(path: Path) -> dict[str, tuple[str, Entry]]:
    """Their name -> file and place, of all files of weights. Raises HuggingFaceError."""
    index = _index(path)
    entries: dict[str, tuple[str, Entry]] = {}
    for file in dict.fromkeys(index.values()) if index is not None else [SINGLE]:
        for name, entry in header_of(path / file).items():
            if name in entries:
                raise HuggingFaceError(f"{path} has {printable(name)!r} in {entries[name][0]} and again in {file}")
            entries[name] = (file, entry)
    for name, file in (index or {}).items():
        if name not in entries or entries[name][0] != file:
            raise HuggingFaceError(f"{path / INDEX} says that {printable(name)!r} is in {file}, but it is not")
    return entries


def _index(path: Path) -> dict[str, str] | None:
    """Name -> file of a folder in shards; None for a single file. Raises HuggingFaceError."""
    if (path / SINGLE).exists():
        return None
    text = text_of(path / INDEX)
    if text is None:
        pickled = next(iter(sorted(path.glob("*.bin"))), None)
        why = f"; {pickled.name} is pickled, and reading it would run whatever code it holds" if pickled else ""
        raise HuggingFaceError(f"{path} has no {SINGLE} and no {INDEX}{why}; save the weights as safetensors")
    files = parse(text, path / INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise HuggingFaceError(f"{path / INDEX} has no weight_map, the table from tensors to files")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors") or "\0" in file:
            raise HuggingFaceError(
                f"{path / INDEX} puts {printable(name)!r} into {printable(str(file)[:200])!r}; "
                "valid: the name of a .safetensors file in the same folder"
            )
    return files


def header_of(path: Path) -> dict[str, Entry]:
    """Read the header of a file of tensors. Raises HuggingFaceError."""
    size = _file_bytes(path)
    try:
        with disk_errors(HuggingFaceError, "cannot be read"), path.open("rb") as file:
            return read_header(file, size)
    except HuggingFaceError as error:
        raise HuggingFaceError(f"{path} {error}") from error


def _wanted(
    architecture: Architecture, model: ModelConfig, tensors: Mapping[str, MappedTensor], how: Quantisation | None
) -> dict[str, tuple[tuple[int, ...], Collection[str]]]:
    """Their name -> shape and types. Raises HuggingFaceError for few bits where one tensor holds several of ours."""
    if how:
        few_bits.check(architecture.names, model, how)
    wanted: dict[str, tuple[tuple[int, ...], Collection[str]]] = {}
    for name, shape in parameter_shapes(model).items():
        tensor = tensors[name]
        if how and few_bits.is_held(name, shape):
            parts = few_bits.tensors_of(tensor.name, shape, how)
            wanted |= {part: (size, (dtype,)) for part, (size, dtype) in parts.items()}
        else:
            wanted[tensor.name] = tensor.shape(shape), tuple(DTYPES)
    return wanted


def _check_names(
    path: Path, wanted: Mapping[str, tuple[tuple[int, ...], Collection[str]]], has: Mapping[str, Entry]
) -> None:
    """Raises HuggingFaceError unless the folder has the wanted tensors and no others, in their shapes and types."""
    both = [name for name in wanted if name in has]
    faults = [f"{name} is missing" for name in wanted if name not in has]
    faults += [f"{printable(name)} is not of this model" for name in has if name not in wanted]
    faults += [f"{n} has shape {has[n].shape}, not {wanted[n][0]}" for n in both if has[n].shape != wanted[n][0]]
    faults += [
        f"{n} is {has[n].dtype}; valid: {', '.join(wanted[n][1])}" for n in both if has[n].dtype not in wanted[n][1]
    ]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise HuggingFaceError(f"{path} does not fit its {CONFIG}: {'; '.join(faults[:3])}{more}")


def _check_tied(path: Path, entries: Mapping[str, tuple[str, Entry]], embedding: str, head: str) -> None:
    """Raises HuggingFaceError if an output layer that is tied to the embedding is another tensor."""
    same = embedding in entries and entries[embedding][1].shape == entries[head][1].shape
    same = same and entries[embedding][1].dtype == entries[head][1].dtype
    if not same or not _same_bytes(path, entries[embedding], entries[head]):
        raise HuggingFaceError(
            f"{path}: {CONFIG} ties the output layer to the embedding, but {head} is another tensor than {embedding}; "
            "say tie_word_embeddings = false, or leave the one that is not used out"
        )


def _same_bytes(path: Path, *two: tuple[str, Entry]) -> bool:
    with contextlib.ExitStack() as files:
        opened = [files.enter_context(open_file(path / file)) for file, _ in two]
        for done in range(0, two[0][1].bytes, _REQUEST_BYTES):
            parts = [bytearray(min(_REQUEST_BYTES, entry.bytes - done)) for _, entry in two]
            for file, part, (_, entry) in zip(opened, parts, two, strict=True):
                read_into(file, memoryview(part), entry.offset + done)
            if parts[0] != parts[1]:
                return False
    return True


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raises HuggingFaceError."""
    with disk_errors(HuggingFaceError, f"cannot read {path}"):
        return path.open("rb", buffering=0)


def read_into(file: BinaryIO, out: memoryview, offset: int) -> None:
    """Fill `out` from byte `offset` of the file on. Raises HuggingFaceError."""
    with disk_errors(HuggingFaceError, f"cannot read {file.name}"):
        count = read_at(file.fileno(), out, offset)
    if count < len(out):
        raise HuggingFaceError(f"{file.name} ends at byte {offset + count}; it was cut while it was read")


def which(path: Path) -> tuple[Path, bool]:
    """Return a Hugging Face folder and True, or the checkpoint that the path names and False.

    Not collective. Raises DataError if it is neither, CheckpointError.
    """
    if (path / CONFIG).is_file():
        return path, True
    try:
        return locate(path), False
    except DataError as error:
        neither = f"{path} has no {CONFIG}, so it is no Hugging Face folder; and " if path.is_dir() else ""
        raise DataError(f"{neither}{error}") from error


class Folder:
    """An open folder; close it, or use it in a `with` statement. Reading is not collective."""

    def __init__(self, path: Path, contents: Contents, comm: MPI.Intracomm | None = None) -> None:
        self.path, self.comm = path, comm
        self.kind, self.model, self.texts, self.notes = contents.kind, contents.model, contents.texts, contents.notes
        self._tensor_map, self._entries = contents.tensor_map, contents.entries
        self._shapes, self.quantisation = parameter_shapes(contents.model), contents.quantisation
        self._closing = contextlib.ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self.specs: dict[str, DatasetSpec] = {  # as in a checkpoint: model/<parameter>
            f"{MODEL}/{name}": DatasetSpec(
                shape, "float32" if self._is_held(name) else DTYPES[self._entry(self._tensor_map[name].name).dtype]
            )
            for name, shape in self._shapes.items()
        }

    @classmethod
    def open(cls, path: Path, comm: MPI.Intracomm | None = None) -> Folder:
        """Check all but the tensors, on rank 0. Collective over comm. Raises HuggingFaceError on all ranks."""
        return cls(path, on_root(comm, lambda: read_contents(path)), comm)

    def close(self) -> None:
        self._files.clear()
        self._closing.close()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer_json(self) -> str:
        return self.texts.get(TOKENIZER_FILE, "")

    def read(self, slab: Slab) -> np.ndarray:
        """Read a slab of model/<parameter>, in its shape and the stored type (bfloat16 as uint16). Not collective.

        Of few bits: float32. Raises HuggingFaceError if a file cannot be read.
        """
        name = slab.dataset.removeprefix(f"{MODEL}/")
        if self._is_held(name):
            return self._made_whole(slab)
        tensor, entry = self._tensor_map[name], self._entry(self._tensor_map[name].name)
        values = np.empty(slab.shape, dtype=STORED_AS[DTYPES[entry.dtype]])
        for theirs, rows in tensor.boxes(slab, self._shapes[name]):
            if tensor.transposed:
                turned = np.empty(theirs.shape, dtype=values.dtype)
                self._fill(as_bytes(turned), theirs)
                values[rows] = turned.T
            else:
                self._fill(as_bytes(values[rows]), theirs)
        return values

    def read_codes(self, slab: Slab) -> tuple[np.ndarray, np.ndarray]:
        """Read a slab that is held in few bits: codes (rows, bytes) uint8, scales (rows, groups) float32.

        Its columns begin and end with a group, or lie inside of the only one. Not collective. Raises HuggingFaceError.
        """
        assert self.quantisation is not None, "the weights are whole"
        bits, group = self.quantisation
        name = self._tensor_map[slab.dataset.removeprefix(f"{MODEL}/")].name
        codes_in, scales_in = list(few_bits.tensors_of(name, (1, 1), self.quantisation))[:2]
        (row, first), (rows, columns) = slab.start, slab.shape
        word = 8 if bits == 4 else 1  # inputs in an element
        codes = np.empty((rows, columns * bits // 8), np.uint8)
        self._fill(as_bytes(codes), Slab(codes_in, (row, first // word), (rows, columns // word)))
        scales = np.empty((rows, columns // group if group else 1), np.float32)
        self._fill(as_bytes(scales), Slab(scales_in, (row, first // group if group else 0), scales.shape))
        return codes, scales

    def _made_whole(self, slab: Slab) -> np.ndarray:
        assert self.quantisation is not None, "the weights are whole"
        (row, first), (rows, columns) = slab.start, slab.shape
        step = self.quantisation.group or 1
        begin, end = first // step * step, -(-(first + columns) // step) * step
        weight = QuantisedWeight(
            rows, end - begin, self.quantisation.bits, torch.device("cpu"), self.quantisation.group
        )
        weight.fill(*self.read_codes(Slab(slab.dataset, (row, begin), (rows, end - begin))))
        return weight.whole(torch.float32)[:, first - begin : first - begin + columns].contiguous().numpy()

    def _is_held(self, name: str) -> bool:
        return self.quantisation is not None and few_bits.is_held(name, self._shapes[name])

    def _entry(self, theirs: str) -> Entry:
        return self._entries[theirs][1]

    def _fill(self, out: memoryview, slab: Slab) -> None:
        file, entry = self._entries[slab.dataset]
        if file not in self._files:
            self._files[file] = self._closing.enter_context(open_file(self.path / file))
        done = 0
        for offset, length in runs(slab, entry.shape, entry.item_bytes):
            read_into(self._files[file], out[done : done + length], entry.offset + offset)
            done += length
