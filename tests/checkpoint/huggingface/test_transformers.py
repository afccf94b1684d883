"""What `transformers` computes, ours computes with its weights; what we write, it loads, and computes the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from mpi4py import MPI

from hpcllm.checkpoint.huggingface.convert import convert
from hpcllm.checkpoint.huggingface.export import make_texts
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.state import facts
from hpcllm.config.schema import from_tables
from hpcllm.data import tokenizer as bpe
from hpcllm.inference.complete import BatchSettings
from hpcllm.inference.generate import Place, TextSettings, continue_prompt, load_decoder
from hpcllm.model.sampling import Sampling
from tests.checkpoint.huggingface import families
from tests.checkpoint.huggingface.ours import checkpoint_of
from tests.model.variants import VARIANTS

GREEDY = TextSettings(Sampling(temperature=0.0), BatchSettings(tokens=9))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", params=families.FAMILIES)
def there(request, tmp_path_factory) -> tuple[str, torch.Tensor, Path, Path]:
    """Name, logits, its own folder, our checkpoint of it."""
    folder = tmp_path_factory.mktemp("of transformers")
    model = families.make(request.param)
    model.save_pretrained(folder / "theirs")
    report = convert(folder / "theirs", folder / "ours.h5", MPI.COMM_SELF)
    assert report.parameters == sum(p.numel() for p in model.parameters())
    assert not [note for note in report.notes if "words" not in note]  # every key of a new config.json is known
    return request.param, families.logits(model, families.tokens()), folder / "theirs", folder / "ours.h5"


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


def test_logits_are_those_of_transformers(there):
    _, theirs, _, path = there
    with Checkpoint.open(path) as checkpoint, torch.no_grad():
        close(load_decoder(checkpoint)(families.tokens()), theirs)


def test_the_export_loads_in_transformers_and_computes_the_same(there, tmp_path):
    _, theirs, _, path = there
    convert(path, tmp_path / "again", MPI.COMM_SELF)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    assert torch.equal(families.logits(model, families.tokens()), theirs)


def test_a_config_that_we_made_means_the_same_to_transformers(there, tmp_path):
    """As for a model that never came from there."""
    _, theirs, _, path = there
    convert(path, tmp_path / "again", MPI.COMM_SELF)
    with Checkpoint.open(path) as checkpoint:
        model = from_tables(facts(checkpoint).config).model
    _, texts = make_texts({}, "", model, "", "float32", keeps_types=True)
    for name, text in texts.items():
        (tmp_path / "again" / name).write_text(text)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    close(families.logits(again, families.tokens()), theirs)


def test_there_and_back_is_the_same_file(there, tmp_path):
    """Bit for bit, header and order too: what its own library wrote. And config.json says the same."""
    _, _, folder, path = there
    convert(path, tmp_path / "again", MPI.COMM_SELF)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_text() == (folder / name).read_text()


def test_back_and_there_is_the_same_checkpoint(there, tmp_path):
    _, _, _, path = there
    convert(path, tmp_path / "again", MPI.COMM_SELF)
    convert(tmp_path / "again", tmp_path / "again.h5", MPI.COMM_SELF)
    with Checkpoint.open(path) as before, Checkpoint.open(tmp_path / "again.h5") as after:
        assert set(before.datasets) == set(after.datasets)
        for name in before.datasets:
            assert before.read_whole(name).tobytes() == after.read_whole(name).tobytes(), name
        assert before.attributes["run/config"] == after.attributes["run/config"]


def test_our_tokenizer_is_loaded_too(tmp_path):
    """A model trained here, with a tokenizer trained here: words in, the same tokens, the same words out."""
    tokenizer = bpe.train(["alpha beta gamma delta " * 20], 280)
    encoder = bpe.Encoder(tokenizer)
    model = dataclasses.replace(VARIANTS["llama"], vocabulary=encoder.vocabulary)
    convert(checkpoint_of(tmp_path / "ours.h5", model, tokenizer=tokenizer), tmp_path / "theirs", MPI.COMM_SELF)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    text = "alpha  Beta\n  gämma 🚀"
    assert theirs.encode(text) == encoder.encode([text])[0].tolist()[:-1]
    assert theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == encoder.end_of_text
    told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").generation_config
    assert told.eos_token_id == encoder.end_of_text
    convert(tmp_path / "theirs", tmp_path / "again.h5", MPI.COMM_SELF)
    said = ["".join(continue_prompt(tmp_path / name, text, GREEDY, Place())) for name in ("ours.h5", "again.h5")]
    assert said[0] == said[1] != ""
