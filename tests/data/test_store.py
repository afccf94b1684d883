"""A store is trusted only after it has been checked; what is wrong is named with the file."""

from __future__ import annotations

import os
import random
import time

import h5py
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from made_up_stores import lie, put, write_store
from pytest_mpi.parallel_assert import parallel_assert

from hpcllm.cli.main import main
from hpcllm.data.loader import Loader
from hpcllm.data.packing import SplitArrays, make_rows
from hpcllm.data.sampler import Sampler
from hpcllm.data.store import LARGEST_TOKENIZER_BYTES, SPLITS, TokenStore, epochs_note, is_store, read_header
from hpcllm.data.store_verify import verify
from hpcllm.data.store_watch import StoreWatch
from hpcllm.errors import CheckpointError, DataError

SEEDS = range(300)
TOKENS = 3 * 2**21  # of a document that spans three blocks


def quietly(_):
    """Progress that nobody looks at."""


@pytest.mark.parametrize("vocabulary", [300, 2**16, 2**16 + 1])
@pytest.mark.parametrize("documents", [0, 1, 7])
def test_what_is_written_is_read(tmp_path, vocabulary, documents):
    path = write_store(tmp_path / "store.h5", vocabulary, documents)
    store = TokenStore.open(path)
    assert read_header(path) == store.header
    with h5py.File(path) as file:  # any HDF5 library reads the same
        assert file.attrs["fingerprint"] == store.fingerprint
        for split in SPLITS:
            lengths = np.arange(1, documents + 1)
            assert np.array_equal(store.documents(split), np.concatenate([[0], np.cumsum(lengths)]))
            assert np.array_equal(file[f"{split}/documents"], store.documents(split))
            if documents:
                want = np.repeat((vocabulary - 1) * (np.arange(documents) % 2), lengths)
                assert np.array_equal(store.tokens(split), want)
                assert np.array_equal(file[f"{split}/tokens"], want)
                assert store.tokens(split).dtype.itemsize == (2 if vocabulary <= 2**16 else 4)


def test_the_time_of_day_is_not_in_the_file(tmp_path):
    first = write_store(tmp_path / "first.h5").read_bytes()
    time.sleep(1.1)  # HDF5 counts in seconds
    assert write_store(tmp_path / "second.h5").read_bytes() == first


def says(key, value):
    return lambda index: index["attributes"].__setitem__(key, value)


def place(name, *entry):
    return lambda index: index["datasets"].__setitem__(name, list(entry))


def pointing_at_tokens(index):
    index["datasets"]["tokenizer"] = ["uint8", [2], index["datasets"]["train/tokens"][2]]


HOSTILE = {
    "not ours": (says("format", "something else"), "no token store"),
    "from the future": (says("version", 99), "version is 99"),
    "no vocabulary": (lambda index: index["attributes"].pop("vocabulary"), "vocabulary is 'None'"),
    "vocabulary is a word": (says("vocabulary", "many"), "vocabulary is 'many'"),
    "vocabulary of 2^40": (says("vocabulary", 2**40), "valid: 0 to 16777216"),
    "other vocabulary": (says("vocabulary", 299), "token_bytes"),
    "end of text outside": (says("end_of_text", 300), "valid: 0 to 299"),
    "no tokens": (lambda index: index["datasets"].pop("train/tokens"), "train/tokens|damaged|checksums"),
    "tokens are floats": (lambda index: index["datasets"]["train/tokens"].__setitem__(0, "float16"), "train/tokens"),
    "tokens have two axes": (lambda index: index["datasets"]["train/tokens"].__setitem__(1, [3, 5]), "train/tokens"),
    "more documents than tokens": (says("train_documents", 2**50), "train/documents"),
    "a document too many": (says("train_documents", 6), "train/documents"),
    "negative tokens": (says("train_tokens", -1), "train_tokens is '-1'"),
    "a tokenizer of 8 GiB": (place("tokenizer", "uint8", [2**33], 4096), "2,053 blocks need"),
    "a tokenizer elsewhere": (pointing_at_tokens, "overlap"),
    "another dataset": (lambda index: index["datasets"].__setitem__("more", ["uint8", [1], 4096]), "overlap|more"),
    "a link": (place("tokenizer", "external", [2], 4096), "unknown type"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_stores_are_rejected_by_name(tmp_path, kind):
    path = write_store(tmp_path / "store.h5")
    assert TokenStore.open(path).vocabulary == 300
    change, told = HOSTILE[kind]
    lie(path, change)
    with pytest.raises(DataError, match=rf"store\.h5' cannot be used: .*({told})"):
        TokenStore.open(path)


FOREIGN = {  # sealed rightly: nothing but the values is wrong
    "documents do not rise": ("train/documents", 2, np.array([0], "<i8"), "does not rise"),
    "documents end elsewhere": ("validation/documents", 5, np.array([14], "<i8"), "runs from 0 to 14"),
    "documents begin late": ("train/documents", 0, np.array([1], "<i8"), "runs from 1"),
    "token id too large": ("train/tokens", 3, np.array([300], "<u2"), "holds id 300"),
    "tokenizer is not text": ("tokenizer", 0, np.full(2, 0xFF, np.uint8), "not text"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_contents_that_do_not_fit_together_are_rejected(tmp_path, kind):
    path = write_store(tmp_path / "store.h5")
    *change, told = FOREIGN[kind]
    put(path, *change)
    with pytest.raises(DataError, match=rf"store\.h5' cannot be used: .*{told}"):
        TokenStore.open(path)


def test_a_tokenizer_beyond_the_limit_is_not_read(tmp_path):
    path = write_store(tmp_path / "store.h5")
    size = path.stat().st_size
    os.truncate(path, size + LARGEST_TOKENIZER_BYTES + 4096)  # sparse: it costs the sender nothing

    def far(index):
        index["file_bytes"] = size + LARGEST_TOKENIZER_BYTES + 4096
        index["datasets"]["tokenizer"] = ["uint8", [LARGEST_TOKENIZER_BYTES + 1], size]
        index["tables"]["checksums"] = size + LARGEST_TOKENIZER_BYTES + 8

    lie(path, far)
    with pytest.raises(DataError, match=r"store\.h5' cannot be used: /tokenizer has .*valid: up to 67,108,864"):
        TokenStore.open(path)


def mutant(whole, seed):
    """A file cut, with bytes flipped, or with a stretch of it moved."""
    generator, data = random.Random(seed), bytearray(whole)
    kind = seed % 4
    if kind == 0:
        return bytes(data[: generator.randrange(len(data))])
    if kind == 1:
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    elif kind == 2:
        for _ in range(16):
            data[generator.randrange(4096)] = generator.randrange(256)
    else:
        start, end = sorted(generator.randrange(len(data)) for _ in range(2))
        data[start:end] = data[start:end][::-1] + b"x" * generator.randrange(3)
    return bytes(data)


def test_no_mutant_is_taken_for_the_store(tmp_path):
    path = write_store(tmp_path / "store.h5")
    whole = path.read_bytes()
    for seed in SEEDS:
        path.write_bytes(mutant(whole, seed))
        if path.read_bytes() == whole:
            continue
        start_s = time.monotonic()
        with pytest.raises(DataError, match=r"store\.h5' cannot be used") as told:
            TokenStore.open(path)
        assert "\n" not in str(told.value)
        assert time.monotonic() - start_s < 5


def test_other_files_are_rejected(tmp_path):
    (tmp_path / "text.txt").write_text("hello")
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["tokenizer"] = h5py.ExternalLink("/etc/hostname", "/")
    for path in (*(tmp_path / name for name in ("text.txt", "missing.h5", "pipe", "foreign.h5", "x" * 300)), tmp_path):
        assert not is_store(path)
        with pytest.raises(DataError):
            TokenStore.open(path)


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def offset_of(path, dataset):
    from hpcllm.checkpoint.reader import Checkpoint

    with Checkpoint.open(path) as file:
        return file.datasets[dataset].offset


def test_a_bit_that_flips_while_training_is_found_where_it_was_read(tmp_path):
    path = write_store(tmp_path / "store.h5", documents=1, tokens=TOKENS)
    watch = StoreWatch(TokenStore.open(path), "train", every_s=0.0)
    flip(path, offset_of(path, "train/tokens") + TOKENS)  # in the second of three blocks
    for token in (0, TOKENS - 1):  # the first and the last one are sound
        saw(watch, token)
    with pytest.raises(CheckpointError, match=r"store\.h5.*bytes .* of /train/tokens, have changed"):
        saw(watch, TOKENS // 2)


def test_a_store_that_is_cut_while_it_is_read_is_said(tmp_path):
    """Without the look before, the batch is a SIGBUS: the rank dies, and nothing is said of the store."""
    path = write_store(tmp_path / "store.h5", documents=1, tokens=TOKENS)
    store = TokenStore.open(path)
    rows = make_rows(SplitArrays(store.tokens("train"), store.documents("train")), 8, "stream", masked=True)
    watch, sampler = StoreWatch(store, "train"), Sampler(rows.count, 0)
    loader = Loader(rows, sampler, 4, 0, 4, 1, torch.device("cpu"), watch)
    assert loader.take(0).inputs.shape == (1, 4, 8)
    os.truncate(path, 4096)
    watch._length_due_s = 0.0
    with pytest.raises(CheckpointError, match=r"store\.h5' was cut to 4,096 of [\d,]+ bytes while it is read"):
        loader.take(4)
    with pytest.raises(CheckpointError, match="was cut"):
        store.verify_block_at("train", 0)


def saw(watch, token):
    """Let a batch be verified, as a run does that goes on."""
    known = watch.verified
    watch.saw(token)
    limit_s = time.monotonic() + 30
    while watch.verified == known and time.monotonic() < limit_s:
        watch.every_s = watch._due_s = 1e30
        watch.saw(token)
    watch.every_s, watch._due_s = 0.0, 0.0


@pytest.mark.parallel([1, 2, 3])
def test_verify_finds_what_a_checksum_taken_afterwards_cannot(comm, shared_path):
    path = shared_path / "store.h5"
    if comm.rank == 0:
        write_store(path)
    comm.Barrier()
    parallel_assert(verify(path, comm, quietly).is_sound)
    comm.Barrier()
    if comm.rank == 0:
        put(path, "train/tokens", 4, np.array([7], "<u2"))
    comm.Barrier()
    report = verify(path, comm, quietly)
    parallel_assert("fingerprint" in report.fault)
    if comm.rank == 0:
        flip(path, offset_of(path, "train/tokens"))
    comm.Barrier()
    parallel_assert(len(verify(path, comm, quietly).damage) == 1)


def test_verify_is_a_command(tmp_path, capsys):
    path = write_store(tmp_path / "store.h5")
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert "are as they were written" in capsys.readouterr().out
    flip(path, offset_of(path, "validation/tokens"))
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert "validation/tokens" in capsys.readouterr().out


@pytest.mark.parallel([1, 2, 3])
def test_all_ranks_open_or_none(comm, shared_path):
    if comm.rank == 0:
        write_store(shared_path / "store.h5")
    store = TokenStore.open(shared_path / "store.h5", comm)
    parallel_assert(len(store.tokens("train")) == 15)
    with pytest.raises(DataError, match=r"missing\.h5"):
        TokenStore.open(shared_path / "missing.h5", comm)


@given(st.floats(0, 1e9))
@example(4.0)
@example(4.1)
def test_more_than_four_epochs_are_warned_of(epochs):
    assert bool(epochs_note(epochs)) == (epochs > 4)
