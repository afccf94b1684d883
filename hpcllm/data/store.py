"""The token store: one HDF5 file that `prepare` writes and training memory-maps.

    /                     format, version, complete, vocabulary, end_of_text, seed, validation_fraction, fingerprint,
                          {train,validation}_{documents,tokens,bytes}, zstd19_bits_per_byte            (attributes)
    /train/tokens         (tokens,) uint16, uint32 beyond 65536 ids: document, end of text, document, end of text, ...
    /train/documents      (documents + 1,) int64: document i is tokens[documents[i] : documents[i + 1]], end included
    /validation/...       the same
    /tokenizer            (bytes,) uint8: the tokenizer.json
    /token_bytes          (vocabulary,) uint32: bytes of text that a token stands for, 0 for the end of text

Everything is contiguous, so a dataset is a byte range of the file: h5py finds it once, then the hot path is a plain
memory map. A file is checked before it is trusted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcllm.config.schema import Config
from hpcllm.data.sampler import sample_count
from hpcllm.errors import ConfigError, DataError
from hpcllm.mpi.collective_errors import on_root

if TYPE_CHECKING:
    from mpi4py import MPI

FORMAT = "hpcllm token store"
VERSION = 1
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
PROBED_TOKENS = 2**24  # ids checked at open: all of a small store, evenly spread blocks of a large one
PROBE_BLOCK = 2**14


@dataclass(frozen=True)
class Region:
    """Place of a dataset in the file; `offset` is in bytes."""

    offset: int
    count: int
    dtype: str

    @property
    def end(self) -> int:
        return self.offset + self.count * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TokenStore:
    """A checked store. Bytes are of normalised UTF-8, without ends of text.

    zstd19_bits_per_byte: what `zstd -19` needs for the (first 16 MiB of the) validation text, NaN if there is none.
    fingerprint: hexadecimal, the same for equal tokenizer and tokens, whatever wrote them.
    """

    path: Path
    vocabulary: int
    end_of_text: int
    token_bytes: NDArray[np.uint32]
    tokenizer_json: str
    fingerprint: str
    train_bytes: int
    validation_bytes: int
    zstd19_bits_per_byte: float
    regions: dict[str, Region]

    @classmethod
    def open(cls, path: str | Path, comm: MPI.Intracomm | None = None) -> TokenStore:
        """Check and open. With `comm`: rank 0 looks at the file, the others get its answer; collective over comm.

        Raises DataError, naming the file and what to do, if it is missing, foreign, unfinished or damaged.
        """
        return on_root(comm, lambda: _read(Path(path))) if comm else _read(Path(path))

    def tokens(self, split: Split) -> NDArray[np.integer]:
        """(tokens,) uint16 or uint32, memory-mapped, read-only. Raises DataError if the split is empty."""
        if not self.regions[f"{split}/tokens"].count:
            raise DataError(
                f"{str(self.path)!r} has no {split} text: prepare more documents, or with another validation fraction"
            )
        return self._map(f"{split}/tokens")

    def documents(self, split: Split) -> NDArray[np.integer]:
        """(documents + 1,) int64, memory-mapped: where each document begins, and the end of the last."""
        return self._map(f"{split}/documents")

    def _map(self, dataset: str) -> NDArray[np.integer]:
        region = self.regions[dataset]
        try:
            return np.memmap(self.path, region.dtype, "r", region.offset, (region.count,))
        except (OSError, ValueError) as error:
            raise DataError(f"{str(self.path)!r}: /{dataset} cannot be mapped: {error}") from error


def open_store(config: Config, comm: MPI.Intracomm | None) -> tuple[Config, TokenStore]:
    """Open the token store of a run and fill in the vocabulary of its config. Collective over comm; None: one process.

    Raises UserError if there is none, it is not sound, too short, or of a vocabulary that the model has no room for.
    """
    if not config.data.store:
        raise ConfigError("data.store is missing: the path of a token store, written by `python -m hpcllm prepare`")
    store = TokenStore.open(config.data.store, comm)
    tokens = len(store.tokens("train"))
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


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def document_fingerprint(split: Split, position: int, ids: NDArray[np.integer]) -> int:
    """128 bits of one document at its position. Their sum is the corpus: any rank may add any part, in any order."""
    place = f"{split} {position} ".encode()
    return int.from_bytes(hashlib.blake2b(place + ids.astype("<u4").tobytes(), digest_size=16).digest(), "little")


def store_fingerprint(tokenizer_json: str, sum_of_documents: int) -> str:
    corpus = (sum_of_documents % 2**128).to_bytes(16, "little")
    return hashlib.blake2b(corpus + tokenizer_json.encode("utf-8"), digest_size=16).hexdigest()


def is_store(path: Path) -> bool:
    """Return true if the file was written by hpcllm, finished or not; never raises."""
    try:
        with h5py.File(path, "r") as file:
            return bool(file.attrs.get("format") == FORMAT)
    except OSError:
        return False


def _read(path: Path) -> TokenStore:
    if not path.is_file():
        raise DataError(f"there is no token store {str(path)!r}; write one with `python -m hpcllm prepare`")
    try:
        with h5py.File(path, "r") as file:
            _check_ours(path, file)
            store = _parse(path, file)
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise _unusable(path, f"it cannot be read as a token store ({error})") from error
    _check_contents(store)
    return store


def _check_ours(path: Path, file: h5py.File) -> None:
    if file.attrs.get("format") != FORMAT:
        raise _unusable(path, "it is an HDF5 file, but not a token store")
    if file.attrs["version"] != VERSION:
        raise _unusable(path, f"its format version is {file.attrs['version']}, this program reads {VERSION}")
    if not file.attrs.get("complete"):
        raise _unusable(path, "its writer did not finish")


def _parse(path: Path, file: h5py.File) -> TokenStore:
    attributes = file.attrs
    return TokenStore(
        path=path,
        vocabulary=int(attributes["vocabulary"]),
        end_of_text=int(attributes["end_of_text"]),
        token_bytes=np.asarray(file["token_bytes"][...], np.uint32),
        tokenizer_json=bytes(file["tokenizer"][...]).decode("utf-8"),
        fingerprint=str(attributes["fingerprint"]),
        train_bytes=int(attributes["train_bytes"]),
        validation_bytes=int(attributes["validation_bytes"]),
        zstd19_bits_per_byte=float(attributes["zstd19_bits_per_byte"]),
        regions={
            name: _region(path, file[name], kinds)
            for split in SPLITS
            for name, kinds in ((f"{split}/tokens", ("<u2", "<u4")), (f"{split}/documents", ("<i8",)))
        },
    )


def _region(path: Path, dataset: h5py.Dataset, kinds: tuple[str, ...]) -> Region:
    if dataset.ndim != 1 or dataset.dtype.str not in kinds:
        raise _unusable(path, f"{dataset.name} has shape {dataset.shape} and type {dataset.dtype.str}, not {kinds}")
    offset = dataset.id.get_offset()
    if offset is None and dataset.size:
        raise _unusable(path, f"{dataset.name} is not contiguous in the file")
    region = Region(offset or 0, dataset.size, dataset.dtype.str)
    if region.end > os.path.getsize(path):
        raise _unusable(path, f"{dataset.name} ends at byte {region.end}, the file at {os.path.getsize(path)}")
    return region


def _check_contents(store: TokenStore) -> None:
    if store.token_bytes.shape != (store.vocabulary,) or not 0 <= store.end_of_text < store.vocabulary:
        raise _unusable(
            store.path,
            f"vocabulary {store.vocabulary}, end of text {store.end_of_text} and "
            f"{store.token_bytes.shape} token lengths do not fit together",
        )
    for split in SPLITS:
        _check_documents(store, split)
        largest = _largest_probed_id(store, split)
        if largest >= store.vocabulary:
            raise _unusable(store.path, f"/{split}/tokens holds id {largest}, the vocabulary is {store.vocabulary}")


def _check_documents(store: TokenStore, split: Split) -> None:
    count = store.regions[f"{split}/tokens"].count
    if not store.regions[f"{split}/documents"].count:
        raise _unusable(store.path, f"/{split}/documents is empty")
    bounds = store.documents(split)
    if bounds[0] != 0 or bounds[-1] != count or not np.all(bounds[1:] > bounds[:-1]):
        raise _unusable(store.path, f"/{split}/documents does not rise from 0 to the {count} tokens")


def _largest_probed_id(store: TokenStore, split: Split) -> int:
    if not store.regions[f"{split}/tokens"].count:
        return -1
    tokens = store.tokens(split)
    if len(tokens) <= PROBED_TOKENS:
        return int(tokens.max())
    starts = np.linspace(0, len(tokens) - PROBE_BLOCK, PROBED_TOKENS // PROBE_BLOCK).astype(np.int64)
    return max(int(tokens[start : start + PROBE_BLOCK].max()) for start in starts)


def _unusable(path: Path, why: str) -> DataError:
    return DataError(f"{str(path)!r} cannot be used: {why}; write it anew with `python -m hpcllm prepare`")
