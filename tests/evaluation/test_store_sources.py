"""Sources of a store: told alike by any number of ranks, and each measured as if it were a store of its own."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from small_models import checkpoint_of

from hpcllm.cli.main import main
from hpcllm.config.schema import ModelConfig
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.data.sources import Run, from_text, joined, name_inputs, source_of, to_text
from hpcllm.data.store import TokenStore
from hpcllm.errors import CheckpointError

WORDS = {"a text": ["the", "sum", "of", "ranks", "is", "one"], "code": ["for", "i", "in", "range", "(", "n", ")", "+="]}
LENGTHS = {"a text": 60, "code": 40}


def write_inputs(folder: Path) -> None:
    """Two folders of two files of short documents, and a file beside them."""
    draw = random.Random(3)
    for name, words in WORDS.items():
        (folder / name).mkdir()
        for number in range(2):
            rows = [{"text": " ".join(draw.choices(words, k=9))} for _ in range(LENGTHS[name])]
            (folder / name / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def store_of(inputs: list[Path], output: Path, comm, tokenizer: Path | None = None) -> TokenStore:
    options = PrepareOptions(
        inputs=tuple(inputs), output=output, vocabulary=280, validation_fraction=0.3, tokenizer=tokenizer
    )
    prepare(options, comm)
    return TokenStore.open(output)


@pytest.mark.parallel([1, 2, 3])
def test_any_ranks_tell_the_same_sources(comm, shared_path):
    if comm.rank == 0:
        write_inputs(shared_path)
    comm.Barrier()
    inputs = [shared_path / "code" / "0.jsonl", shared_path / "a text", shared_path / "code" / "1.jsonl"]
    store = store_of(inputs, shared_path / "all.h5", comm)
    sources = store.header.sources
    assert [run.name for run in sources] == ["code", "a text", "code"]
    for place, split in ((1, "train"), (2, "validation")):
        assert sum(run[place] for run in sources) == store.header.documents[split]
    comm.Barrier()
    if comm.rank == 0:
        alone = store_of(inputs, shared_path / "alone.h5", MPI.COMM_SELF)
        assert alone.header.sources == sources
        each = [store_of([given], shared_path / "one.h5", MPI.COMM_SELF, shared_path / "all.h5") for given in inputs]
        assert not any(one.header.sources for one in each)
        kept = [(one.header.documents["train"], one.header.documents["validation"]) for one in each]
        assert [sum(pair) for pair in kept] >= [run.train + run.validation for run in sources]


@pytest.mark.parallel([1, 2, 3])
def test_a_source_has_the_figures_of_a_store_of_its_own(comm, shared_path, capfd):
    """Documents that do not see each other: what a row holds beside them changes nothing."""
    names = list(WORDS)
    if comm.rank == 0:
        write_inputs(shared_path)
        store = store_of([shared_path / name for name in names], shared_path / "all.h5", MPI.COMM_SELF)
        for name in names:
            store_of([shared_path / name], shared_path / f"{name}.h5", MPI.COMM_SELF, shared_path / "all.h5")
        model = ModelConfig(layers=2, hidden=24, heads=4, ffn=16, vocabulary=store.vocabulary, max_sequence=48)
        data = {"sequence_length": 48, "packing": "best-fit", "document_mask": True}
        checkpoint_of(shared_path, model, tokenizer=store.tokenizer_json, data=data).rename(shared_path / "model.h5")
    comm.Barrier()
    files = [str(shared_path / f"{name}.h5") for name in ("all", *names)]
    words = [part for file in files for part in ("--task", file)]
    assert main(["evaluate", str(shared_path / "model.h5"), *words, "--json", "--batch-tokens", "200"]) == 0
    out = capfd.readouterr().out
    if comm.rank:
        return
    whole, *others = json.loads(out)["tasks"]
    assert list(whole["groups"]) == names
    for name, other in zip(names, others, strict=True):
        assert "groups" not in other
        for figure, value in other["figures"].items():
            assert whole["groups"][name]["figures"][figure]["value"] == pytest.approx(value["value"], rel=1e-5), figure
    losses = [group["figures"]["loss"]["value"] for group in whole["groups"].values()]
    assert min(losses) < whole["figures"]["loss"]["value"] < max(losses)


runs = st.lists(st.builds(Run, st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 3)), max_size=12)


@given(runs, runs)
def test_joined_runs_count_the_same_documents_however_they_were_cut(one, other):
    whole = joined([*one, *other])
    assert joined([*joined(one), *joined(other)]) == whole
    assert all(a.name != b.name for a, b in itertools.pairwise(whole))
    for name in "abc":
        assert [sum(run[at] for run in whole if run.name == name) for at in (1, 2)] == [
            sum(run[at] for run in (*one, *other) if run.name == name) for at in (1, 2)
        ]
    assert from_text(to_text(whole), sum(run.train for run in whole), sum(run.validation for run in whole)) == whole


@pytest.mark.parametrize(
    "text",
    ["{", "3", "[3]", '[["a", 1]]', '[["a", 1, 2, 3]]', '[[1, 1, 1]]', '[["a", -1, 2]]', '[["a", true, 1]]',
     '[["a", 1, 2]]', "[" * 100_000, json.dumps([["a", 0, 0]] * 1001), json.dumps([["a" * 201, 1, 1]])],
)  # fmt: skip
def test_sources_that_are_damaged_are_rejected(text):
    with pytest.raises(CheckpointError, match="its sources"):
        from_text(text, 1, 1)


def test_inputs_are_named_by_their_folders(tmp_path, monkeypatch):
    for folder in ("x/web", "y/web", "code"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    names = name_inputs([Path("x/web"), Path("y/web"), Path("code/a.txt"), Path("b.txt")])
    assert list(names.values()) == [str(tmp_path / "x/web"), str(tmp_path / "y/web"), "code", tmp_path.name]
    assert source_of("x/web/deep/a.txt", names) == str(tmp_path / "x/web")
    assert source_of("code/a.txt", names) == "code"
