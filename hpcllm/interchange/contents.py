"""What a folder of weights says that it holds, read by one process and believed only after it was checked.

    config.json                 architecture, ModelConfig: every key that changes the arithmetic is one that we have
    model.safetensors, or index and shards        where each tensor lies: inside its file, once, in the model's shape
    tokenizer.json, generation_config.json, ...   carried along as they are

Such a folder comes from strangers. No file in it can run code (pickled weights are refused), no number of it is used
unchecked, and no name in it leads out of the folder, save links that its owner made, as a download cache does.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcllm.checkpoint import regular
from hpcllm.config import ModelConfig
from hpcllm.errors import InterchangeError
from hpcllm.interchange.architectures import read_model
from hpcllm.interchange.places import Place
from hpcllm.interchange.safetensors import DTYPES, Entry, read_header
from hpcllm.interchange.settings import Settings
from hpcllm.model.shapes import parameter_shapes
from hpcllm.printable import printable

CONFIG, TOKENIZER_FILE = "config.json", "tokenizer.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# carried along unread, so that what came from a folder goes back into one as it was
COMPANIONS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_LARGEST_TEXT_BYTES = 1 << 28
_LARGEST_CONFIG_BYTES = 1 << 24
_REQUEST_BYTES = 1 << 23


@dataclass(frozen=True)
class Contents:
    """All of a folder but the tensors, checked."""

    kind: str  # of architecture
    model: ModelConfig
    places: dict[str, Place]  # our name -> where it lies
    entries: dict[str, tuple[str, Entry]]  # their name -> file, and where in it
    texts: dict[str, str]  # file -> what it says
    notes: tuple[str, ...]  # what people should know


def read_contents(path: Path) -> Contents:
    """Read and check everything but the tensors. Not collective. Raises InterchangeError."""
    if not path.is_dir():
        raise InterchangeError(f"there is no folder {str(path)!r}")
    texts = {name: text for name in (CONFIG, TOKENIZER_FILE, *COMPANIONS) if (text := _text(path / name)) is not None}
    if CONFIG not in texts:
        raise InterchangeError(f"{path} has no {CONFIG}; a Hugging Face folder has one, beside its .safetensors")
    if TOKENIZER_FILE in texts:
        parse(texts[TOKENIZER_FILE], path / TOKENIZER_FILE)
    settings = Settings(parse(texts[CONFIG], path / CONFIG), str(path / CONFIG))
    architecture, model = read_model(settings)
    entries = _entries(path)
    names = architecture.names
    front = names.prefix if _has(entries, f"{names.prefix}.", names.ends["embedding"]) else ""
    if not front and not _has(entries, "", names.ends["embedding"]):
        front = names.prefix  # neither: so that what is missing is called by its usual name
    places = names.places(model, front)
    head = f"{names.head}.weight"
    if model.tied and head in entries:
        _check_tied(path, entries, places["embedding.weight"].name, head)
    ignored = {name for name in entries if names.is_ignored(name) or (model.tied and name == head)}
    _check_names(path, model, places, {name: entry for name, (_, entry) in entries.items() if name not in ignored})
    notes = [f"{CONFIG} says {key}, which is not known here and was passed over" for key in settings.passed_over()]
    if TOKENIZER_FILE not in texts:
        notes.append(f"there is no {TOKENIZER_FILE}: a model without words" + _other_tokenizer(path))
    return Contents(architecture.kind, model, places, entries, texts, tuple(notes))


def parse(text: str, path: Path) -> dict[str, Any]:
    """The table of a JSON file. Raises InterchangeError."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InterchangeError(f"{path} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise InterchangeError(f"{path} holds a {type(table).__name__}; valid: a table of keys")
    return table


def _has(entries: Mapping[str, Any], front: str, layer: str) -> bool:
    return f"{front}{layer}.weight" in entries


def _text(path: Path) -> str | None:
    """What a text file says; None if there is none. Raises InterchangeError."""
    if not path.exists():
        return None
    limit = _LARGEST_TEXT_BYTES if path.name == TOKENIZER_FILE else _LARGEST_CONFIG_BYTES
    size = _file_bytes(path)
    if size > limit:
        raise InterchangeError(f"{path} has {size} bytes; valid: at most {limit}")
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InterchangeError(f"cannot read {path}: {error}") from error


def _file_bytes(path: Path) -> int:
    """Of a plain file, or a link to one: what else there is could block whoever opens it. Raises InterchangeError."""
    try:
        status = path.stat()
    except OSError as error:
        raise InterchangeError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise InterchangeError(f"{path} is not a plain file")
    return status.st_size


def _entries(path: Path) -> dict[str, tuple[str, Entry]]:
    """Their name -> file and place, of all files of weights. Raises InterchangeError."""
    index = _index(path)
    entries: dict[str, tuple[str, Entry]] = {}
    for file in dict.fromkeys(index.values()) if index is not None else [SINGLE]:
        for name, entry in _header(path / file).items():
            if name in entries:
                raise InterchangeError(f"{path} has {printable(name)!r} in {entries[name][0]} and again in {file}")
            entries[name] = (file, entry)
    for name, file in (index or {}).items():
        if name not in entries or entries[name][0] != file:
            raise InterchangeError(f"{path / INDEX} says that {printable(name)!r} is in {file}, but it is not")
    return entries


def _index(path: Path) -> dict[str, str] | None:
    """Name -> file of a folder in shards; None for a single file. Raises InterchangeError."""
    if (path / SINGLE).exists():
        return None
    text = _text(path / INDEX)
    if text is None:
        pickled = next(iter(sorted(path.glob("*.bin"))), None)
        why = f"; {pickled.name} is pickled, and reading it would run whatever code it holds" if pickled else ""
        raise InterchangeError(f"{path} has no {SINGLE} and no {INDEX}{why}; save the weights as safetensors")
    files = parse(text, path / INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise InterchangeError(f"{path / INDEX} has no weight_map, the table from tensors to files")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors") or "\0" in file:
            raise InterchangeError(
                f"{path / INDEX} puts {printable(name)!r} into {printable(str(file)[:200])!r}; "
                "valid: the name of a .safetensors file in the same folder"
            )
    return files


def _header(path: Path) -> dict[str, Entry]:
    size = _file_bytes(path)
    try:
        with path.open("rb") as file:
            return read_header(file, size)
    except OSError as error:
        raise InterchangeError(f"cannot read {path}: {error.strerror}") from error
    except InterchangeError as error:
        raise InterchangeError(f"{path} {error}") from error


def _check_names(path: Path, model: ModelConfig, places: Mapping[str, Place], has: Mapping[str, Entry]) -> None:
    """The folder has the model's tensors, no more and no others, in their shapes and in types that we have."""
    shapes = parameter_shapes(model)
    wanted = {place.name: place.shape(shapes[name]) for name, place in places.items()}
    both = [name for name in wanted if name in has]
    faults = [f"{name} is missing" for name in wanted if name not in has]
    faults += [f"{printable(name)} is not of this model" for name in has if name not in wanted]
    faults += [f"{n} has shape {has[n].shape}, not {wanted[n]}" for n in both if has[n].shape != wanted[n]]
    faults += [f"{n} is {has[n].dtype}; valid: {', '.join(DTYPES)}" for n in both if has[n].dtype not in DTYPES]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise InterchangeError(f"{path} does not fit its {CONFIG}: {'; '.join(faults[:3])}{more}")


def _check_tied(path: Path, entries: Mapping[str, tuple[str, Entry]], embedding: str, head: str) -> None:
    """An output layer beside an embedding that is said to be the same must be the same. Raises InterchangeError."""
    same = embedding in entries and entries[embedding][1].shape == entries[head][1].shape
    same = same and entries[embedding][1].dtype == entries[head][1].dtype
    if not same or not _same_bytes(path, entries[embedding], entries[head]):
        raise InterchangeError(
            f"{path}: {CONFIG} ties the output layer to the embedding, but {head} is another tensor than {embedding}; "
            "say tie_word_embeddings = false, or leave the one that is not used out"
        )


def _same_bytes(path: Path, one: tuple[str, Entry], other: tuple[str, Entry]) -> bool:
    descriptors = [open_file(path / file) for file, _ in (one, other)]
    try:
        for done in range(0, one[1].bytes, _REQUEST_BYTES):
            parts = [bytearray(min(_REQUEST_BYTES, one[1].bytes - done)) for _ in descriptors]
            for descriptor, part, (file, entry) in zip(descriptors, parts, (one, other), strict=True):
                read_at(descriptor, memoryview(part), entry.offset + done, path / file)
            if parts[0] != parts[1]:
                return False
        return True
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _other_tokenizer(path: Path) -> str:
    return f" (tokenizer.model is another format; save {TOKENIZER_FILE})" if (path / "tokenizer.model").exists() else ""


def open_file(path: Path) -> int:
    """A descriptor to read from. Raises InterchangeError."""
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise InterchangeError(f"cannot read {path}: {error.strerror}") from error


def read_at(descriptor: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill `out` from byte `offset` of the file on. Raises InterchangeError."""
    try:
        count = regular.read_at(descriptor, out, offset)
    except OSError as error:
        raise InterchangeError(f"cannot read {path}: {error.strerror}") from error
    if count < len(out):
        raise InterchangeError(f"{path} ends at byte {offset + count}; it was cut while it was read")
