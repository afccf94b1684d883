"""A folder that does not hold what it says is refused by name, before anything is written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from mpi4py import MPI

from hpcllm.checkpoint.huggingface.convert import convert
from hpcllm.checkpoint.huggingface.folder import read_contents
from hpcllm.cli.main import main
from hpcllm.errors import HuggingFaceError
from tests.checkpoint.huggingface.ours import checkpoint_of
from tests.model.variants import VARIANTS

EMBEDDING, HEAD, QUERY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A folder in one file."""
    folder = tmp_path_factory.mktemp("good")
    convert(checkpoint_of(folder / "ours.h5", VARIANTS["llama"]), folder / "theirs", MPI.COMM_SELF)
    return folder / "theirs"


@pytest.fixture
def folder(good, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(good, tmp_path / "to break"))


def sharded(folder: Path, **weight_map: object) -> None:
    """The same tensors in two files, with an index; weight_map changes what it says."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        safetensors.torch.save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    table = {name: file for file, part in parts.items() for name in part} | weight_map
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def changed(folder: Path, change) -> None:
    """The single file with `change` done to its dict of tensors."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def config(folder: Path, **keys: object) -> None:
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | keys))


def rename(old: str, new: str):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def test_a_good_folder_is_read_whole_or_in_shards(folder):
    assert read_contents(folder).notes == ()
    whole = read_contents(folder)
    sharded(folder)
    assert read_contents(folder).tensor_map == whole.tensor_map


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "a config that is a list": (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
    "a config that is not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "a config that is not text": (lambda f: (f / "config.json").write_bytes(b"\xff"), "cannot read"),
    "a tokenizer that is not JSON": (
        lambda f: (f / "tokenizer.json").write_text("<html>"),
        "tokenizer.json is not JSON",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors and no"),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "pytorch_model.bin is pickled, and reading it would run",
    ),
    "a pipe instead of weights": (
        lambda f: ((f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors")),
        "not a plain file",
    ),
    "a missing tensor": (lambda f: changed(f, lambda t: t.pop(QUERY)), f"{QUERY} is missing"),
    "no embedding": (lambda f: changed(f, lambda t: t.pop(EMBEDDING)), f"{EMBEDDING} is missing"),
    "no output layer": (lambda f: changed(f, lambda t: t.pop(HEAD)), f"{HEAD} is missing"),
    "an extra tensor": (
        lambda f: changed(f, lambda t: t.update({"score.weight": torch.zeros(2)})),
        "score.weight is not of this model",
    ),
    "a bias too many": (
        lambda f: changed(f, lambda t: t.update({QUERY.replace("weight", "bias"): torch.zeros(24)})),
        "q_proj.bias is not of this model",
    ),
    "a misshapen tensor": (
        lambda f: changed(f, lambda t: t.update({QUERY: t[QUERY].t()[:3].contiguous()})),
        rf"{QUERY} has shape \(3, 24\), not \(24, 24\)",
    ),
    "a tensor of whole numbers": (
        lambda f: changed(f, lambda t: t.update({QUERY: t[QUERY].to(torch.int8)})),
        f"{QUERY} is I8; valid: F32",
    ),
    "more layers in the config": (lambda f: config(f, num_hidden_layers=5), r"model\.layers\.4\.\S+ is missing"),
    "fewer layers in the config": (lambda f: config(f, num_hidden_layers=3), r"model\.layers\.3\.\S+ is not of"),
    "another vocabulary": (lambda f: config(f, vocab_size=62), r"has shape \(61, 24\), not \(62, 24\)"),
    "another output layer than is tied": (lambda f: config(f, tie_word_embeddings=True), f"{HEAD} is another tensor"),
    "a damaged header": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x01" + (f / "model.safetensors").read_bytes()[1:]),
        "model.safetensors ",
    ),
    "a cut file": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-4]),
        "its tensors end at",
    ),
    "an index without a map": (
        lambda f: (sharded(f), (f / "model.safetensors.index.json").write_text("{}")),
        "no weight_map",
    ),
    "an index out of the folder": (lambda f: sharded(f, **{QUERY: "../good/theirs/model.safetensors"}), "puts .*into"),
    "an index to the root": (lambda f: sharded(f, **{QUERY: "/etc/passwd.safetensors"}), "puts .*into"),
    "an index to no file": (lambda f: sharded(f, **{QUERY: "three.safetensors"}), "three.safetensors"),
    "an index to a number": (lambda f: sharded(f, **{QUERY: 3}), "puts .*into '3'"),
    "an index to a pickle": (lambda f: sharded(f, **{QUERY: "one.bin"}), "puts .*into 'one.bin'"),
    "an index to another file": (
        lambda f: sharded(f, **{EMBEDDING: "one.safetensors", HEAD: "one.safetensors"}),
        "is in one.safetensors, but it is not",
    ),
    "an index with a tensor more": (lambda f: sharded(f, more="one.safetensors"), "'more' is in one.safetensors, but"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_folder_does_not_hold_is_refused_by_name(folder, case):
    break_it, said = BROKEN[case]
    break_it(folder)
    with pytest.raises(HuggingFaceError, match=said):
        read_contents(folder)


def test_a_tensor_in_two_files_is_refused(folder):
    sharded(folder)
    shutil.copy(folder / "one.safetensors", folder / "two.safetensors")
    with pytest.raises(HuggingFaceError, match=r"in one.safetensors and again in two.safetensors"):
        read_contents(folder)


def test_links_that_a_download_cache_makes_are_followed(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    assert read_contents(folder).kind == "llama"


def test_what_older_versions_wrote_beside_is_passed_over(folder):
    inverse = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(2) for i in range(4)}
    changed(folder, lambda t: t.update(inverse))
    assert read_contents(folder).kind == "llama"


def test_a_file_of_the_model_without_its_prefix_is_read(tmp_path):
    """As the first GPT-2 was published: no `transformer.`, masks beside the weights."""
    path = checkpoint_of(tmp_path / "ours.h5", VARIANTS["gpt2"])
    convert(path, tmp_path / "theirs", MPI.COMM_SELF)
    tensors = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 17, 17, dtype=torch.bool)
    safetensors.torch.save_file(bare, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    assert read_contents(tmp_path / "theirs").tensor_map["embedding.weight"].name == "wte.weight"


def test_an_output_layer_that_is_the_tied_embedding_is_passed_over(tmp_path):
    path = checkpoint_of(tmp_path / "ours.h5", VARIANTS["grouped, tied"])
    convert(path, tmp_path / "theirs", MPI.COMM_SELF)
    changed(tmp_path / "theirs", lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    assert read_contents(tmp_path / "theirs").model.tied
    changed(tmp_path / "theirs", lambda t: t[HEAD][3, 3].add_(1))
    with pytest.raises(HuggingFaceError, match="another tensor"):
        read_contents(tmp_path / "theirs")


@pytest.mark.parametrize("case", ["no config", "a missing tensor", "an index out of the folder"])
def test_the_command_refuses_with_exit_code_2_and_writes_nothing(folder, tmp_path, capsys, case):
    break_it, said = BROKEN[case]
    break_it(folder)
    assert main(["checkpoint", "convert", str(folder), str(tmp_path / "new.h5")]) == 2
    assert said.split(".")[0].split("puts")[0] in capsys.readouterr().err
    assert not list(tmp_path.glob("new.h5*"))


def test_unknown_keys_and_a_missing_tokenizer_are_told(folder):
    config(folder, odd_key=3)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")
    odd, words = read_contents(folder).notes
    assert "odd_key" in odd
    assert "tokenizer.model is another format" in words
