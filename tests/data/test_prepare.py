"""prepare: the same bits from any number of ranks, nothing lost, nothing broken left behind."""

from __future__ import annotations

import glob
import json
import os
import resource
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from pytest_mpi.parallel_assert import parallel_assert

from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.data.store import SPLITS, TokenStore, document_fingerprint, store_fingerprint
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import DataError, HpcllmError


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def decoded(store, split):
    encoder, bounds = Encoder(store.tokenizer_json), store.documents(split)
    tokens = store.tokens(split) if bounds[-1] else np.empty(0, np.uint16)
    for start, end in pairwise(bounds):
        assert tokens[end - 1] == store.end_of_text
        yield encoder.decode(tokens[start : end - 1]).decode()


def options_for(corpus, output, **more):
    return PrepareOptions(inputs=corpus.inputs, output=output, **{"vocabulary": 400, "validation_fraction": 0.3} | more)


@pytest.mark.parallel([1, 2, 3, 4])
def test_any_number_of_ranks_writes_the_bits_of_one(comm, shared_path, corpus_maker):
    from mpi4py import MPI

    corpus = comm.bcast(corpus_maker(shared_path) if comm.rank == 0 else None)
    together = prepare(options_for(corpus, shared_path / "together.h5"), comm)
    if comm.rank == 0:
        alone = prepare(options_for(corpus, shared_path / "alone.h5"), MPI.COMM_SELF)
        same = (shared_path / "alone.h5").read_bytes() == (shared_path / "together.h5").read_bytes()
        same = same and alone.dropped == together.dropped and alone.skipped == together.skipped
    parallel_assert(comm.bcast(same if comm.rank == 0 else None))
    parallel_assert(comm.bcast(together) == together)


@pytest.mark.parallel([1, 3])
def test_the_store_holds_the_documents_in_order(comm, shared_path, corpus_maker):
    corpus = comm.bcast(corpus_maker(shared_path) if comm.rank == 0 else None)
    report = prepare(options_for(corpus, shared_path / "store.h5"), comm)
    store = TokenStore.open(shared_path / "store.h5", comm)
    held = {split: list(decoded(store, split)) for split in SPLITS}
    parallel_assert(all(held.values()))
    for split in SPLITS:
        members = set(held[split])
        parallel_assert(held[split] == [text for text in corpus.documents if text in members])
        parallel_assert(report.bytes[split] == sum(len(text.encode()) for text in held[split]))
        parallel_assert(report.bytes[split] == int(store.token_bytes[store.tokens(split)].sum()))
        parallel_assert(report.tokens[split] == len(store.tokens(split)))
    parallel_assert(sum(map(len, held.values())) == len(corpus.documents))
    parallel_assert({reason: d.count for reason, d in report.dropped.items()} == corpus.dropped)
    parallel_assert(report.skipped == {"file of unknown suffix": 1, "hidden file or folder": 1})


def test_header_figures_can_be_recomputed_from_the_contents(comm, tmp_path, corpus_maker):
    prepare(options_for(corpus_maker(tmp_path), tmp_path / "store.h5"), comm)
    store = TokenStore.open(tmp_path / "store.h5")
    total = 0
    for split in SPLITS:
        bounds = store.documents(split)
        for i, (start, end) in enumerate(pairwise(bounds)):
            total += document_fingerprint(split, i, store.tokens(split)[start:end])
    assert store.fingerprint == store_fingerprint(store.tokenizer_json, total)
    text = "".join(decoded(store, "validation")).encode()
    assert store.zstd19_bits_per_byte == 8 * len(zstandard.compress(text, 19)) / len(text)
    assert store.validation_bytes == len(text)


def test_a_document_stays_in_its_split_when_others_come(comm, tmp_path):
    texts = [f"text number {i}" for i in range(300)]
    splits = []
    for name, chosen in (("few", texts[100:200]), ("all", texts[::-1])):
        rows = write_jsonl(tmp_path / f"{name}.jsonl", chosen)
        prepare(
            PrepareOptions(inputs=(rows,), output=tmp_path / f"{name}.h5", vocabulary=300, validation_fraction=0.2),
            comm,
        )
        store = TokenStore.open(tmp_path / f"{name}.h5")
        splits.append({split: set(decoded(store, split)) for split in SPLITS})
    few, every = splits
    for split in SPLITS:
        assert few[split] == every[split] & set(texts[100:200])
    assert 30 <= len(every["validation"]) <= 90  # 60 expected, sigma 7


def test_a_store_brings_its_tokenizer_to_the_next(comm, tmp_path, corpus_maker):
    corpus = corpus_maker(tmp_path)
    prepare(options_for(corpus, tmp_path / "first.h5"), comm)
    report = prepare(options_for(corpus, tmp_path / "second.h5", tokenizer=tmp_path / "first.h5"), comm)
    assert (tmp_path / "first.h5").read_bytes() == (tmp_path / "second.h5").read_bytes()
    assert not report.tokenizer_trained


def test_a_single_document_leaves_a_split_empty_and_says_so(comm, tmp_path):
    rows = write_jsonl(tmp_path / "one.jsonl", ["the only document"])
    for fraction, full, empty in ((0.0, "train", "validation"), (0.999999, "validation", "train")):
        report = prepare(PrepareOptions(inputs=(rows,), output=tmp_path / "one.h5", validation_fraction=fraction), comm)
        assert len(report.warnings) == 1
        assert f"the {empty} split is empty" in "\n".join(report.lines())
        store = TokenStore.open(tmp_path / "one.h5")
        assert len(store.tokens(full)) == report.tokens[full]
        with pytest.raises(DataError, match=f"no {empty} text"):
            store.tokens(empty)
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parallel([1, 2, 3])
def test_user_mistakes_are_rejected_by_all_ranks(comm, shared_path):
    if comm.rank == 0:
        (shared_path / "text.txt").write_text("hello")
        (shared_path / "foreign.h5").write_text("precious")
        (shared_path / "empty").mkdir()
        (shared_path / "white.txt").write_text("  \n")
        os.mkfifo(shared_path / "pipe.txt")
    comm.Barrier()
    good = {"inputs": (shared_path / "text.txt",), "output": shared_path / "out.h5"}
    for wrong in (
        {"inputs": (shared_path / "missing.txt",)},
        {"inputs": (shared_path / "empty",)},
        {"inputs": (shared_path / "white.txt",)},
        {"inputs": (shared_path / "pipe.txt",)},
        {"output": shared_path / "no such folder" / "out.h5"},
        {"output": shared_path / "foreign.h5"},
        {"output": shared_path / "empty"},
        {"tokenizer": shared_path / "missing.json"},
        {"tokenizer": shared_path / "text.txt"},
        {"vocabulary": 256},
        {"validation_fraction": 1.0},
        {"validation_fraction": float("nan")},
        {"seed": -1},
    ):
        with pytest.raises(DataError):
            prepare(PrepareOptions(**good | wrong), comm)
    comm.Barrier()
    names = sorted(path.name for path in shared_path.iterdir())
    parallel_assert(names == ["empty", "foreign.h5", "pipe.txt", "text.txt", "white.txt"])
    parallel_assert((shared_path / "foreign.h5").read_text() == "precious")


@pytest.mark.parallel([1, 2, 3])
def test_a_full_disk_on_one_rank_fails_on_all_and_keeps_the_old_store(comm, shared_path):
    if comm.rank == 0:
        write_jsonl(shared_path / "rows.jsonl", [f"{i} " + "word " * 200 for i in range(200)])
        for i in range(2 * comm.size):
            (shared_path / f"{i}.txt").write_text(f"{i} " + "other words " * 4000)
    comm.Barrier()
    inputs = (shared_path / "rows.jsonl", *(shared_path / f"{i}.txt" for i in range(2 * comm.size)))
    options = PrepareOptions(inputs=inputs, output=shared_path / "store.h5", vocabulary=300)
    prepare(options, comm)
    before = (shared_path / "store.h5").read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(HpcllmError, match=f"rank {comm.size - 1}: cannot write in .*hpcllm test.*File too large"):
            prepare(options, comm)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    parallel_assert((shared_path / "store.h5").read_bytes() == before)
    parallel_assert(not glob.glob(str(shared_path / ".*.partial")))


def test_a_killed_run_leaves_no_store_and_the_next_one_cleans_up(comm, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [f"{i} " + "word and word " * 300 for i in range(5000)])
    program = (
        "import sys; from pathlib import Path; from mpi4py import MPI\n"
        "from hpcllm.data.prepare import PrepareOptions, prepare\n"
        "prepare(PrepareOptions(inputs=(Path(sys.argv[1]),), output=Path(sys.argv[2])), MPI.COMM_SELF)"
    )
    output = tmp_path / "store.h5"
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_"))}
    victim = subprocess.Popen([sys.executable, "-c", program, rows, output], env=alone)
    limit_s = time.monotonic() + 60
    while not (left := glob.glob(str(tmp_path / ".*.partial"))) and time.monotonic() < limit_s:
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert left
    assert not output.exists()
    write_jsonl(rows, ["short now"])
    prepare(PrepareOptions(inputs=(rows,), output=output), comm)
    assert TokenStore.open(output).train_bytes + TokenStore.open(output).validation_bytes == len("short now")
    assert not glob.glob(str(tmp_path / ".*.partial"))
