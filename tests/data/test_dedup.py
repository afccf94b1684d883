"""Duplicates, samples and passes: what ranks find out together is what one would find alone."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_mpi.parallel_assert import parallel_assert

from hpcllm.data.dedup import TokenizerSample, assign_splits, digest, first_occurrences, index_documents, split_key
from hpcllm.data.documents import Document
from hpcllm.data.store_writer import tokenize
from hpcllm.data.tokenizer import Encoder, train
from hpcllm.errors import CollectiveError, DataError
from hpcllm.mpi.collective_errors import on_all


def parts_of(items, comm, seed):
    """Cut at random places, the same on all ranks, so that some parts are empty."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, len(items) + 1, comm.size - 1))
    return np.split(np.arange(len(items)), cuts)[comm.rank]


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize(("documents", "kinds"), [(0, 1), (1, 1), (50, 1), (200, 5), (500, 300), (300, 10**9)])
def test_the_first_of_each_kind_stays(comm, documents, kinds):
    for seed in range(5):
        names = np.random.default_rng(seed).integers(0, kinds, (documents, 1), np.uint64) * np.array(
            [[1, 7]], np.uint64
        )
        mine = parts_of(names, comm, seed)
        got = first_occurrences(names[mine], comm)
        _, earliest = np.unique(names[:, 0], return_index=True)
        parallel_assert(np.array_equal(got, np.isin(mine, earliest)))


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("enough_bytes", [1, 300, 4000, 10**6])
def test_the_sample_does_not_depend_on_the_ranks(comm, enough_bytes):
    generator = np.random.default_rng(enough_bytes)
    texts = [f"{i} " + "x" * int(generator.integers(0, 60)) for i in generator.integers(0, 150, 300)]
    keys = [split_key(digest(text), 1) for text in texts]
    mine = parts_of(texts, comm, enough_bytes)
    sample = TokenizerSample(enough_bytes)
    for index, i in enumerate(mine):
        sample.offer(keys[i], index, texts[i])
    first = [i for i in range(len(texts)) if texts[i] not in texts[:i]]
    got = sample.gather(np.isin(mine, first), comm)
    want, held = [], 0
    for i in sorted(first, key=lambda i: keys[i]):
        if held < enough_bytes:
            want.append(i)
            held += len(texts[i])
    parallel_assert(got == ([texts[i] for i in sorted(want)] if comm.rank == 0 else []))


@pytest.mark.parallel([1, 2, 3])
def test_any_error_on_one_rank_is_raised_on_all(comm):
    def fail_on_last():
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(CollectiveError, match=f"rank {comm.size - 1}: ZeroDivisionError"):
        on_all(comm, fail_on_last)
    parallel_assert(on_all(comm, lambda: comm.rank) == comm.rank)


@pytest.mark.parametrize("second", [["a", "changed"], ["a"], [], ["a", "b", "c"]])
def test_documents_that_change_between_the_passes_are_noticed(comm, tmp_path, second):
    def documents(texts):
        return iter([Document(f"{i}.txt", text) for i, text in enumerate(texts)])

    index = index_documents(documents(["a", "b"]), 0, 0.5)
    assignment = assign_splits(index, 0.5, comm)
    encoder = Encoder(train(["a b"], 300))
    tokenized = tokenize(documents(["a", "b"]), index, assignment, encoder, tmp_path, 0)
    assert sum(spill.documents for spill in tokenized.spills.values()) == 2
    with pytest.raises(DataError, match="changed while it was read"):
        tokenize(documents(second), index, assignment, encoder, tmp_path, 1)
