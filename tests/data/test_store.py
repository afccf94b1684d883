"""A store is trusted only after it has been checked; what is wrong is named with the file."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from pytest_mpi.parallel_assert import parallel_assert

from hpcllm.data import store_writer
from hpcllm.data.store import SPLITS, TokenStore, is_store, token_dtype
from hpcllm.data.store_writer import TokenSpill
from hpcllm.errors import DataError


def write_store(folder, output, vocabulary=300, documents=5):
    """A store straight from the writer: document i of a split has i + 1 tokens."""
    spills = {}
    for split in SPLITS:
        spills[split] = TokenSpill(folder / split, token_dtype(vocabulary))
        for i in range(documents):
            spills[split].append(np.full(i + 1, (vocabulary - 1) * (i % 2), np.uint32))
        spills[split].close()
    contents = store_writer.Contents(
        tokenizer_json="{}",
        token_bytes=np.ones(vocabulary, np.uint32),
        end_of_text=0,
        seed=0,
        validation_fraction=0.5,
        zstd19_bits_per_byte=2.0,
        fingerprint="00",
        documents=dict.fromkeys(SPLITS, documents),
        tokens={split: spills[split].tokens for split in SPLITS},
        bytes=dict.fromkeys(SPLITS, 100),
    )
    offsets = store_writer.create(folder / "aside", contents)
    for split in SPLITS:
        spills[split].write(folder / "aside", split, offsets, 0, 0)
        (folder / split).unlink()
    store_writer.finish(folder / "aside", output)


@pytest.mark.parametrize("vocabulary", [300, 2**16, 2**16 + 1])
@pytest.mark.parametrize("documents", [0, 1, 7])
def test_what_is_written_is_read(tmp_path, vocabulary, documents):
    write_store(tmp_path, tmp_path / "store.h5", vocabulary, documents)
    store = TokenStore.open(tmp_path / "store.h5")
    for split in SPLITS:
        lengths = np.arange(1, documents + 1)
        assert np.array_equal(store.documents(split), np.concatenate([[0], np.cumsum(lengths)]))
        if documents:
            want = np.repeat((vocabulary - 1) * (np.arange(documents) % 2), lengths)
            assert np.array_equal(store.tokens(split), want)
            assert store.tokens(split).dtype.itemsize == (2 if vocabulary <= 2**16 else 4)
        with h5py.File(tmp_path / "store.h5") as file:
            assert file[f"{split}/documents"].shape == (documents + 1,)


def replace(name, values):
    def change(file):
        del file[name]
        file[name] = values

    return change


HOSTILE = {
    "unfinished": lambda f: f.attrs.__setitem__("complete", False),
    "not ours": lambda f: f.attrs.__setitem__("format", "something else"),
    "from the future": lambda f: f.attrs.__setitem__("version", 99),
    "no vocabulary": lambda f: f.attrs.__delitem__("vocabulary"),
    "vocabulary is a word": lambda f: f.attrs.__setitem__("vocabulary", "many"),
    "other vocabulary": lambda f: f.attrs.__setitem__("vocabulary", 299),
    "end of text outside": lambda f: f.attrs.__setitem__("end_of_text", 300),
    "no tokens": lambda f: f.__delitem__("train/tokens"),
    "tokens are a group": lambda f: (f.__delitem__("train/tokens"), f.create_group("train/tokens")),
    "token id too large": lambda f: f["train/tokens"].__setitem__(3, 300),
    "tokens are floats": replace("train/tokens", np.zeros(15, "f4")),
    "tokens are big-endian": replace("train/tokens", np.zeros(15, ">u2")),
    "tokens have two axes": replace("train/tokens", np.zeros((3, 5), "<u2")),
    "documents do not rise": lambda f: f["train/documents"].__setitem__(2, 0),
    "documents end elsewhere": lambda f: f["validation/documents"].__setitem__(5, 14),
    "documents begin late": lambda f: f["train/documents"].__setitem__(0, 1),
    "no documents at all": replace("train/documents", np.zeros(0, "<i8")),
    "tokenizer is not text": replace("tokenizer", np.full(4, 0xFF, np.uint8)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_stores_are_rejected_by_name(tmp_path, kind):
    path = tmp_path / "store.h5"
    write_store(tmp_path, path)
    assert TokenStore.open(path).vocabulary == 300
    with h5py.File(path, "r+") as file:
        HOSTILE[kind](file)
    with pytest.raises(DataError, match=r"store\.h5"):
        TokenStore.open(path)


def test_compressed_tokens_are_rejected(tmp_path):
    path = tmp_path / "store.h5"
    write_store(tmp_path, path)
    with h5py.File(path, "r+") as file:
        del file["train/tokens"]
        file.create_dataset("train/tokens", data=np.zeros(15, "<u2"), chunks=(5,), compression="gzip")
    with pytest.raises(DataError, match="not contiguous"):
        TokenStore.open(path)


def test_a_file_cut_anywhere_is_rejected(tmp_path):
    path = tmp_path / "store.h5"
    write_store(tmp_path, path)
    whole = path.read_bytes()
    for cut in {0, 1, 100, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"store\.h5"):
            TokenStore.open(path)


def test_other_files_are_rejected(tmp_path):
    (tmp_path / "text.txt").write_text("hello")
    for path in (tmp_path / "text.txt", tmp_path / "missing.h5", tmp_path):
        assert not is_store(path)
        with pytest.raises(DataError):
            TokenStore.open(path)


@pytest.mark.parallel([1, 2, 3])
def test_all_ranks_open_or_none(comm, shared_path):
    if comm.rank == 0:
        write_store(shared_path, shared_path / "store.h5")
    store = TokenStore.open(shared_path / "store.h5", comm)
    parallel_assert(len(store.tokens("train")) == 15)
    with pytest.raises(DataError, match=r"missing\.h5"):
        TokenStore.open(shared_path / "missing.h5", comm)
