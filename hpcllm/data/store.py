"""The token store: one HDF5 file that `prepare` writes and training memory-maps.

    header                index and checksums of all that follows, as every file of ours has: checkpoint/header.py
    /                     format, version, kind, template, template_variables, vocabulary, end_of_text, seed,
                          validation_fraction, fingerprint, {train,validation}_{documents,tokens,bytes,counted},
                          zstd19_bits_per_byte, sources (sources.py, of several)                       (attributes)
    /train/tokens         (tokens,) uint16, uint32 beyond 65536 ids: document, end of text, document, end of text, ...
    /train/documents      (documents + 1,) int64: document i is tokens[documents[i] : documents[i + 1]], end included
    /train/counted        (ceil(tokens / 8),) uint8, of chats: bit i % 8 of byte i // 8 is 1 if token i is a target
    /validation/...       the same; of a split without text there are no tokens
    /tokenizer            (bytes,) uint8: the tokenizer.json
    /token_bytes          (vocabulary,) uint32: bytes of text that a token stands for, 0 for the end of text
    /checksums            (blocks,) uint64: XXH3 of each block of 4 MiB

Kinds: "text"; "chat", whose documents are conversations as the template renders them, without an end of text; and
"preferences", in which document 2i is the chosen and 2i + 1 the rejected one of a pair that shares its prompt.

A file may come from anyone, so HDF5 never parses it: places and types are read from the index and checked, every size
is held against a limit before memory is taken, and blocks are verified at three times:

    open      tokenizer and token_bytes whole; of documents, tokens and counted PROBED_BLOCKS blocks, evenly spread
    training  now and then a block that a batch came from: store_watch.py
    verify    every block, every document and the fingerprint: `hpcllm checkpoint verify`, store_verify.py

The hot path is a plain memory map.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcllm.checkpoint.directory import Stored
from hpcllm.checkpoint.layout import TOKENIZER, Attribute, DatasetSpec, checksum
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.config.schema import Config
from hpcllm.data.sampler import sample_count
from hpcllm.data.sources import Run, from_text
from hpcllm.errors import CheckpointError, ConfigError, DataError
from hpcllm.mpi.collective_errors import on_all, on_root

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger(__name__)
FORMAT = "hpcllm token store"
VERSION = 2
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
KINDS = ("text", "chat", "preferences")
# finetuning.kind -> what it learns from; of a text every token counts, as in plain training
FITTING = {
    "none": ("text", "chat"),
    "supervised": ("text", "chat"),
    "dpo": ("preferences",),
    "grpo": ("text", "chat"),  # of which it needs the tokenizer alone
}
TOKEN_BYTES = "token_bytes"
LARGEST_VOCABULARY = 2**24
LARGEST_TOKENIZER_BYTES = 64 * 2**20  # the largest known ones have 35 MB
MOST_EPOCHS = 4
PROBED_BLOCKS = 8  # of a dataset, verified at open: all of a small store


@dataclass(frozen=True)
class Header:
    """Checked attributes of a store. Bytes are of normalised UTF-8, without ends of text."""

    vocabulary: int
    end_of_text: int
    fingerprint: str
    documents: dict[Split, int]
    tokens: dict[Split, int]
    bytes: dict[Split, int]
    zstd19_bits_per_byte: float
    kind: str = "text"
    template: str = ""  # of chats, in Jinja
    template_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # beside the messages
    sources: tuple[Run, ...] = ()  # where documents came from, in order; none: of one source, or not known
    counted: dict[Split, int] = dataclasses.field(default_factory=dict)  # tokens that are targets; of text all are

    def specs(self) -> dict[str, DatasetSpec]:
        """Return name -> shape and type of every dataset that a store of this header has."""
        kind = str(token_dtype(self.vocabulary))
        found = {split: DatasetSpec((self.tokens[split],), kind) for split in SPLITS if self.tokens[split]}
        bits = {s: DatasetSpec((-(-self.tokens[s] // 8),), "uint8") for s in found if self.kind != "text"}
        return {
            TOKEN_BYTES: DatasetSpec((self.vocabulary,), "uint32"),
            **{f"{split}/counted": spec for split, spec in bits.items()},
            **{f"{split}/tokens": spec for split, spec in found.items()},
            **{f"{split}/documents": DatasetSpec((self.documents[split] + 1,), "int64") for split in SPLITS},
        }


@dataclass(frozen=True)
class TokenStore:
    """An open store, its file mapped once: another file that takes its name changes nothing.

    zstd19_bits_per_byte: what `zstd -19` needs for the (first 16 MiB of the) validation text, NaN if there is none.
    fingerprint: hexadecimal, the same for equal tokenizer and tokens, whatever wrote them.
    """

    path: Path
    header: Header
    token_bytes: NDArray[np.uint32]
    tokenizer_json: str
    _datasets: Mapping[str, Stored]
    _map: mmap.mmap  # all of the file

    @classmethod
    def open(cls, path: str | Path, comm: MPI.Intracomm | None = None) -> TokenStore:
        """Check and open. With `comm`: rank 0 looks at the file, the others get its answer; collective over comm.

        Raises DataError, naming the file and what to do, if it is missing, foreign, unfinished or damaged.
        """
        path = Path(path)
        on_root(comm, lambda: _check_there(path))
        with _as_data_error(path), Checkpoint.open(path, comm) as file:
            header, token_bytes, tokenizer_json = on_root(comm, lambda: _read(file))
            return cls(path, header, token_bytes, tokenizer_json, file.datasets, on_all(comm, file.map))

    @property
    def vocabulary(self) -> int:
        return self.header.vocabulary

    @property
    def end_of_text(self) -> int:
        return self.header.end_of_text

    @property
    def fingerprint(self) -> str:
        return self.header.fingerprint

    @property
    def zstd19_bits_per_byte(self) -> float:
        return self.header.zstd19_bits_per_byte

    @property
    def train_bytes(self) -> int:
        return self.header.bytes["train"]

    @property
    def validation_bytes(self) -> int:
        return self.header.bytes["validation"]

    def tokens(self, split: Split) -> NDArray[np.integer]:
        """(tokens,) uint16 or uint32, memory-mapped, read-only. Raises DataError if the split is empty."""
        if not self.header.tokens[split]:
            raise DataError(
                f"{str(self.path)!r} has no {split} text: prepare more documents, or with another validation fraction"
            )
        return self._view(f"{split}/tokens", token_dtype(self.vocabulary))

    def documents(self, split: Split) -> NDArray[np.integer]:
        """(documents + 1,) int64, memory-mapped: where each document begins, and the end of the last."""
        return self._view(f"{split}/documents", np.dtype("<i8"))

    def counted(self, split: Split) -> NDArray[np.uint8] | None:
        """(ceil(tokens / 8),) uint8, memory-mapped: bit i % 8 of byte i // 8 is 1 if token i is a target; None: all."""
        if f"{split}/counted" not in self._datasets:
            return None
        return self._view(f"{split}/counted", np.dtype("u1")).view(np.uint8)

    def counted_of(self, split: Split, first: int, end: int) -> NDArray[np.bool_] | None:
        """(end - first,) bool, read now: which of these tokens are targets; None: all."""
        bits = self.counted(split)
        return None if bits is None else flags_of(bits, first, end)

    def check_length(self) -> None:
        """Raise CheckpointError if the file has been cut since it was opened: to read what is gone is a SIGBUS."""
        if (now := self._map.size()) < len(self._map):
            raise CheckpointError(
                f"{str(self.path)!r} was cut to {now:,} of {len(self._map):,} bytes while it is read; "
                "write it anew with `python -m hpcllm prepare`, under another name while a run reads it"
            )

    def verify_block_at(self, split: Split, token: int) -> None:
        """Compare the blocks that hold a token of a split, and its bit, with their checksums. For any thread.

        Raises CheckpointError, a fault of the run, if it has changed since it was written, or is cut.
        """
        self.check_length()
        self._verify_byte(f"{split}/tokens", token * self._datasets[f"{split}/tokens"].spec.item_bytes)
        if f"{split}/counted" in self._datasets:
            self._verify_byte(f"{split}/counted", token // 8)

    def _verify_byte(self, dataset: str, byte: int) -> None:
        stored = self._datasets[dataset]
        index = byte // stored.spec.chunk_bytes
        offset, size = stored.extent(index)
        if (now := checksum(memoryview(self._map)[offset : offset + size])) != int(stored.checksums[index]):
            raise CheckpointError(
                f"{str(self.path)!r}: bytes {offset:,} to {offset + size:,}, of /{stored.name}, have changed since "
                f"they were written: XXH3 {now:016x}, written as {int(stored.checksums[index]):016x}; "
                "`hpcllm checkpoint verify` finds all damage"
            )

    def _view(self, dataset: str, dtype: np.dtype[Any]) -> NDArray[np.integer]:
        stored = self._datasets[dataset]
        return np.frombuffer(self._map, dtype, stored.spec.bytes // dtype.itemsize, stored.offset)


def flags_of(bits: NDArray[np.uint8], first: int, end: int) -> NDArray[np.bool_]:
    """(end - first,) bool: bits first to end - 1, of which bit i % 8 of byte i // 8 is bit i."""
    flags = np.unpackbits(bits[first // 8 : -(-end // 8)], bitorder="little")
    return flags[first % 8 : first % 8 + end - first].astype(np.bool_)


def open_store(config: Config, comm: MPI.Intracomm | None) -> tuple[Config, TokenStore]:
    """Open the token store of a run and fill in the vocabulary of its config. Collective over comm; None: one process.

    Raises UserError if there is none, it is not sound, too short, or of a vocabulary that the model has no room for.
    """
    if not config.data.store:
        raise ConfigError("data.store is missing: the path of a token store, written by `python -m hpcllm prepare`")
    store = TokenStore.open(config.data.store, comm)
    _check_kind(config, store.header.kind)
    tokens = len(store.tokens("train"))
    if not store.header.counted.get("train", tokens):
        raise DataError(f"{config.data.store!r} has no training token that counts as a target; prepare other chats")
    log.debug("opened %s: %d training tokens, vocabulary %d", config.data.store, tokens, store.vocabulary)
    if sample_count(tokens, config.data.sequence_length) < 1:
        raise DataError(
            f"{config.data.store!r} has {tokens} training tokens, too few for one sample of "
            f"data.sequence_length = {config.data.sequence_length} and its last target; prepare more text"
        )
    vocabulary = config.model.vocabulary or store.vocabulary
    if vocabulary < store.vocabulary:
        raise ConfigError(
            f"model.vocabulary = {vocabulary} is smaller than that of {config.data.store!r}, {store.vocabulary}; "
            f"valid: {store.vocabulary} or more, or 0 to take the store's"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=vocabulary)), store


def _check_kind(config: Config, kind: str) -> None:
    """Raise ConfigError for a store that the run cannot learn from: half of preferences is what nobody wants."""
    if kind in (fitting := FITTING[config.finetuning.kind]):
        return
    key = f"finetuning.kind = {config.finetuning.kind!r}"
    raise ConfigError(
        f"{config.data.store!r} holds {kind}, which a run with {key} cannot use; valid: {', '.join(fitting)}"
        f"{'' if kind == 'preferences' else ' (`prepare --chat` of pairs)'}"
    )


def read_header(path: str | Path) -> Header:
    """Read and check the index and the attributes alone. Not collective. Raises DataError."""
    path = Path(path)
    _check_there(path)
    with _as_data_error(path), Checkpoint.open(path) as file:
        return header_of(file)


def header_of(file: Checkpoint) -> Header:
    """Check attributes, shapes and types of an open file. Raises CheckpointError if it is no store of ours."""
    attributes = file.attributes
    if attributes.get("format") != FORMAT:
        raise CheckpointError("it is no token store")
    if attributes.get("version") != VERSION:
        raise CheckpointError(f"its format version is {attributes.get('version')!r}, this program reads {VERSION}")
    vocabulary = _count(attributes, "vocabulary", LARGEST_VOCABULARY)
    numbers = {
        what: {split: _count(attributes, f"{split}_{what}") for split in SPLITS}
        for what in ("documents", "tokens", "bytes")
    }
    kind = attributes.get("kind", "text")
    if kind not in KINDS:
        raise CheckpointError(f"its kind is {str(kind)[:40]!r}; valid: {', '.join(KINDS)}")
    if kind == "preferences" and any(count % 2 for count in numbers["documents"].values()):
        raise CheckpointError("it tells of an odd number of documents; of preferences there are two a pair")
    if kind != "text":
        numbers["counted"] = {s: _count(attributes, f"{s}_counted", numbers["tokens"][s]) for s in SPLITS}
    zstd19 = attributes.get("zstd19_bits_per_byte", math.nan)
    header = Header(
        vocabulary=vocabulary,
        end_of_text=_count(attributes, "end_of_text", vocabulary - 1),
        fingerprint=str(attributes.get("fingerprint", ""))[:64],
        **numbers,
        zstd19_bits_per_byte=zstd19 if isinstance(zstd19, float) else math.nan,
        kind=str(kind),
        template=str(attributes.get("template", "")),
        template_variables=variables_of(attributes.get("template_variables", "")),
        sources=tuple(from_text(attributes.get("sources", ""), *(numbers["documents"][split] for split in SPLITS))),
    )
    has, wanted = file.specs, header.specs()
    tokenizer = has.pop(TOKENIZER, DatasetSpec((), ""))
    if tokenizer.dtype != "uint8" or len(tokenizer.shape) != 1 or tokenizer.bytes > LARGEST_TOKENIZER_BYTES:
        raise CheckpointError(
            f"/{TOKENIZER} has shape {tokenizer.shape} and type {tokenizer.dtype!r}; valid: up to "
            f"{LARGEST_TOKENIZER_BYTES:,} of uint8"
        )
    for name in sorted(has.keys() | wanted.keys()):
        if has.get(name) != wanted.get(name):
            raise CheckpointError(f"/{name[:80]} is {has.get(name)}; its attributes tell of {wanted.get(name)}")
    if file.is_packed:
        raise CheckpointError("it is packed; unpack it with `hpcllm checkpoint decompress`")
    return header


def variables_of(text: Attribute) -> dict[str, str]:
    """Parse the variables of a chat template, a JSON object of strings. Raises CheckpointError."""
    try:
        found = json.loads(str(text) or "{}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its template_variables cannot be read: {str(error)[:80]}") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError("its template_variables are no JSON object of strings")
    return found


def check_documents(bounds: NDArray[np.integer], tokens: int, split: Split) -> None:
    """Raise CheckpointError unless a run of `documents` rises, inside 0 to `tokens`."""
    if bounds[0] < 0 or bounds[-1] > tokens or not np.all(bounds[1:] > bounds[:-1]):
        raise CheckpointError(f"/{split}/documents does not rise from 0 to the {tokens:,} tokens")


def check_ids(ids: NDArray[np.integer], vocabulary: int, split: Split) -> None:
    """Raise CheckpointError if one of the token ids is outside the vocabulary."""
    if (largest := int(ids.max())) >= vocabulary:
        raise CheckpointError(f"/{split}/tokens holds id {largest}, the vocabulary is {vocabulary}")


def epochs(config: Config, store: TokenStore) -> float:
    """Return how many times a run reads the training tokens, or the pairs."""
    if store.header.kind == "preferences":
        return 2 * config.run.steps * config.data.global_batch / max(1, store.header.documents["train"])
    wanted = config.run.steps * config.data.global_batch * config.data.sequence_length
    return wanted / store.header.tokens["train"]


def epochs_note(epochs: float) -> str:
    """Warn of more epochs than help; empty for fewer. Source: Muennighoff et al. 2023, arXiv:2305.16264, section 6."""
    if epochs <= MOST_EPOCHS:
        return ""
    return (
        f"run.steps read the training tokens {epochs:,.1f} times; beyond {MOST_EPOCHS} times they teach ever less: "
        "prepare more text, or lower run.steps"
    )


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def document_fingerprint(
    split: Split, position: int, ids: NDArray[np.integer], counted: NDArray[np.bool_] | None = None
) -> int:
    """128 bits of one document at its position. Their sum is the corpus: any rank may add any part, in any order."""
    contents = f"{split} {position} ".encode() + ids.astype("<u4").tobytes()
    if counted is not None:
        contents += np.packbits(counted, bitorder="little").tobytes()
    return int.from_bytes(hashlib.blake2b(contents, digest_size=16).digest(), "little")


def store_fingerprint(tokenizer_json: str, sum_of_documents: int) -> str:
    corpus = (sum_of_documents % 2**128).to_bytes(16, "little")
    return hashlib.blake2b(corpus + tokenizer_json.encode("utf-8"), digest_size=16).hexdigest()


def is_store(path: Path) -> bool:
    """Return true if the file is a finished token store of ours, sound at its front; never raises."""
    try:
        with Checkpoint.open(path) as file:
            return bool(file.attributes.get("format") == FORMAT)
    except CheckpointError:
        return False


def _check_there(path: Path) -> None:
    try:
        path.stat()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"there is no token store {str(path)!r} ({why}); write one with `python -m hpcllm prepare`"
        ) from error


@contextmanager
def _as_data_error(path: Path) -> Iterator[None]:
    """Raise a CheckpointError of the block as a DataError, on every rank: the store is an input."""
    try:
        yield
    except CheckpointError as error:
        why = str(error).removeprefix(f"{path}: ")
        unusable = DataError(f"{str(path)!r} cannot be used: {why}; write it anew with `python -m hpcllm prepare`")
        unusable.everywhere = error.everywhere
        raise unusable from error


def _read(file: Checkpoint) -> tuple[Header, NDArray[np.uint32], str]:
    """Check the contents as far as open does. Raises CheckpointError."""
    header = header_of(file)
    for split in SPLITS:
        _probe(file, header, split)
    try:
        text = file.read_whole(TOKENIZER).tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"/{TOKENIZER} is not text: {error}") from error
    return header, file.read_whole(TOKEN_BYTES).astype(np.uint32), text


def _probe(file: Checkpoint, header: Header, split: Split) -> None:
    """Verify evenly spread blocks of a split, the first and the last among them."""
    tokens, documents = header.tokens[split], f"{split}/documents"
    if header.documents[split] > tokens:
        raise CheckpointError(f"it tells of {header.documents[split]:,} documents of {tokens:,} {split} tokens")
    blocks = _spread(file.datasets[documents])
    bounds = [file.read_block(documents, index) for index in blocks]
    if bounds[0][0] != 0 or bounds[-1][-1] != tokens:
        raise CheckpointError(f"/{documents} runs from {bounds[0][0]} to {bounds[-1][-1]}, not from 0 to {tokens}")
    for part in bounds:
        check_documents(part, tokens, split)
    if tokens:
        for index in _spread(file.datasets[f"{split}/tokens"]):
            check_ids(file.read_block(f"{split}/tokens", index), header.vocabulary, split)
        if header.kind != "text":
            for index in _spread(file.datasets[f"{split}/counted"]):
                file.read_block(f"{split}/counted", index)


def _spread(stored: Stored) -> list[int]:
    last = stored.spec.blocks - 1
    return sorted({last * step // (PROBED_BLOCKS - 1) for step in range(PROBED_BLOCKS)})


def _count(attributes: Mapping[str, Attribute], key: str, largest: int = 2**62) -> int:
    value = attributes.get(key)
    if type(value) is not int or not 0 <= value <= largest:
        raise CheckpointError(f"its attribute {key} is {str(value)[:40]!r}; valid: 0 to {largest}")
    return value
