"""There and back on any number of ranks gives the same bits; neither way holds more than pieces in memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from mpi4py import MPI

from hpcllm.checkpoint import layout
from hpcllm.checkpoint.huggingface.convert import convert
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.cli.main import main
from hpcllm.config.schema import ModelConfig
from hpcllm.errors import CheckpointError, HuggingFaceError
from hpcllm.model.shapes import parameter_shapes
from hpcllm.system.job import SIZE_VARIABLES
from tests.checkpoint.huggingface.ours import TOKENIZER, checkpoint_of, values
from tests.model.variants import VARIANTS

SAID = ("gpt2", "llama", "grouped, tied", "neox", "qwen", "llama 3.1")


def contents(path: Path) -> dict[str, bytes]:
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read_whole(name).tobytes() for name in checkpoint.datasets}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(("variant", "dtype"), [(v, ("float32", "bfloat16")[n % 2]) for n, v in enumerate(SAID)])
def test_there_and_back_is_the_same_on_any_number_of_ranks(comm, shared_path, monkeypatch, variant, dtype):
    """Against one process that converts alone: the same files, byte for byte."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 1000)  # so that tensors of this size are in many blocks
    ours, theirs = shared_path / "ours.h5", shared_path / "theirs"
    if comm.rank == 0:
        checkpoint_of(ours, VARIANTS[variant], dtype)
        convert(ours, shared_path / "alone", MPI.COMM_SELF, shard_gb=2e-5)
    comm.Barrier()
    convert(ours, theirs, comm, shard_gb=2e-5)
    report = convert(theirs, shared_path / "again.h5", comm)
    assert report.bytes == sum(len(v) for v in contents(ours).values())
    if comm.rank == 0:
        assert len(list(theirs.glob("*.safetensors"))) > 1
        assert files(theirs) == files(shared_path / "alone")
        assert contents(shared_path / "again.h5") == contents(ours)
        assert not list(shared_path.glob("*.tmp-*"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_that_are_no_numbers_are_said_both_ways(tmp_path, monkeypatch, dtype):
    """Each way says how many tensors, and the bits come through as they are."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 1000)
    ours = checkpoint_of(tmp_path / "ours.h5", VARIANTS["llama"], dtype)
    assert convert(ours, tmp_path / "theirs", None).notes == ()
    weights = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    for name, value in (("model.norm.weight", torch.nan), ("model.embed_tokens.weight", torch.inf)):
        weights[name].view(-1)[-1] = value
    safetensors.torch.save_file(weights, tmp_path / "theirs" / "model.safetensors")
    told = "2 tensors with NaN or infinite values, which came through as they are: embedding.weight, final_norm.weight"
    for source, target in (("theirs", "again.h5"), ("again.h5", "theirs again")):
        (note,) = convert(tmp_path / source, tmp_path / target, None).notes
        assert note.startswith(told)


@pytest.mark.parallel([3])
def test_a_rank_that_cannot_read_ends_the_conversion_of_all(comm, shared_path, monkeypatch):
    if comm.rank == 0:
        convert(checkpoint_of(shared_path / "ours.h5", VARIANTS["llama"]), shared_path / "theirs", MPI.COMM_SELF)
    comm.Barrier()
    if comm.rank == 1:
        from hpcllm.checkpoint.huggingface import folder

        def fail(*_: object) -> None:
            raise HuggingFaceError("the disk is gone")

        monkeypatch.setattr(folder, "read_at", fail)
    with pytest.raises(HuggingFaceError, match="rank 1: the disk is gone"):
        convert(shared_path / "theirs", shared_path / "new.h5", comm)
    comm.Barrier()
    assert not list(shared_path.glob("new.h5*"))


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    return checkpoint_of(tmp_path_factory.mktemp("ours") / "model.h5", VARIANTS["neox"])


@pytest.mark.parametrize(("asked", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_type_that_is_asked_for_is_the_nearest(ours, tmp_path, asked, dtype):
    convert(ours, tmp_path / "theirs", MPI.COMM_SELF, dtype=asked)
    tensors = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    want = torch.from_numpy(values("model/embedding.weight", parameter_shapes(VARIANTS["neox"])["embedding.weight"]))
    assert torch.equal(tensors["gpt_neox.embed_in.weight"], want.to(dtype))
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["torch_dtype"] == str(dtype)[6:]
    convert(tmp_path / "theirs", tmp_path / "wide.h5", MPI.COMM_SELF, dtype="fp32")
    with Checkpoint.open(tmp_path / "wide.h5") as checkpoint:
        wide = torch.from_numpy(checkpoint.read_whole("model/embedding.weight"))
    assert torch.equal(wide, want.to(dtype).float())


def test_numbers_that_fp16_does_not_have_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tests.checkpoint.huggingface.ours.values", lambda _, shape, __: np.full(shape, 1e5, np.float32)
    )
    path = checkpoint_of(tmp_path / "large.h5", VARIANTS["llama"])
    with pytest.raises(HuggingFaceError, match=r"model/\S+ has values beyond fp16's largest, 65504"):
        convert(path, tmp_path / "theirs", MPI.COMM_SELF, dtype="fp16")
    assert [item.name for item in tmp_path.iterdir()] == ["large.h5"]


def test_ends_of_text_are_said(ours, tmp_path):
    convert(ours, tmp_path / "theirs", MPI.COMM_SELF)
    read = {name: json.loads(text) for name, text in files(tmp_path / "theirs").items() if name.endswith(".json")}
    assert read["generation_config.json"]["eos_token_id"] == 1
    assert read["tokenizer_config.json"]["eos_token"] == "</s>"
    assert files(tmp_path / "theirs")["tokenizer.json"].decode() == TOKENIZER


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no such folder", "new"], "there is no checkpoint 'no such folder'"),
        (["{ours}", "{ours}"], "is there already"),
        (["{ours}", "new.h5"], "new.h5 would be a folder"),
        (["{folder}", "new.h5"], "has no config.json"),
        (["{text}", "new"], "is no checkpoint: it does not begin"),
        (["{ours}", "new", "--architecture", "llama"], "llama: as config.json: hidden_act = 'gelu'"),
        (["{ours}", "new", "--architecture", "bert"], "'bert' is unknown; valid: gpt2, gpt_neox"),
        (["{ours}", "new", "--shard-gb", "0"], "--shard-gb: '0' is out of range"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_exit_code_2(ours, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("text")
    known = {"ours": ours, "folder": tmp_path, "text": tmp_path / "text"}
    assert main(["checkpoint", "convert", *(argument.format(**known) for argument in arguments)]) == 2
    assert said in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["text"]


def test_the_command_says_what_it_did(ours, tmp_path, capsys):
    assert main(["checkpoint", "convert", str(ours), str(tmp_path / "a b"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["architecture"], report["notes"]) == ("gpt_neox", [])
    assert report["parameters"] == sum(np.prod(s) for s in parameter_shapes(VARIANTS["neox"]).values())
    assert main(["checkpoint", "convert", str(tmp_path / "a b"), str(tmp_path / "back.h5")]) == 0
    assert re.search(r"gpt_neox, 0.\d+ M parameters", capsys.readouterr().out)
    assert main(["checkpoint", "inspect", str(tmp_path / "back.h5")]) == 0


def test_long_companions_are_carried_there_and_back(ours, tmp_path):
    """Longer than what HDF5 keeps in an attribute by the older way."""
    convert(ours, tmp_path / "theirs", MPI.COMM_SELF)
    template = json.dumps({"chat_template": "{{ messages }} größer " * 10_000}, ensure_ascii=False)
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(template)
    convert(tmp_path / "theirs", tmp_path / "carried.h5", MPI.COMM_SELF)
    convert(tmp_path / "carried.h5", tmp_path / "again", MPI.COMM_SELF)
    assert files(tmp_path / "again") == files(tmp_path / "theirs")


def test_a_damaged_checkpoint_writes_no_folder(ours, tmp_path):
    damaged = bytearray(ours.read_bytes())
    with Checkpoint.open(ours) as checkpoint:
        damaged[checkpoint.datasets["model/head.weight"].offset + 40] ^= 1
    (tmp_path / "damaged.h5").write_bytes(damaged)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "damaged.h5", tmp_path / "theirs", MPI.COMM_SELF)
    assert not list(tmp_path.glob("theirs*"))


@pytest.mark.full(reason="several starts of PyTorch, a tenth of a minute")
def test_one_process_converts_without_mpi(ours, tmp_path):
    program = (
        "import sys; from hpcllm.cli.main import main; code = main(['checkpoint', 'convert', *sys.argv[1:]]); "
        "sys.exit(code or 'mpi4py.MPI' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in SIZE_VARIABLES}
    for source, target in ((ours, tmp_path / "theirs"), (tmp_path / "theirs", tmp_path / "again.h5")):
        command = [sys.executable, "-c", program, str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
    assert contents(tmp_path / "again.h5") == contents(ours)


MEMORY = """
import re, sys
from pathlib import Path
from mpi4py import MPI
from hpcllm.checkpoint.huggingface import convert
status = Path("/proc/self/status")
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten: that of imports, and of the parent
kib = lambda key: int(re.search(key + r":\\s+(\\d+) kB", status.read_text())[1])
before = kib("VmRSS")
report = convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), MPI.COMM_SELF)
print(report.bytes, 1024 * (kib("VmHWM") - before))
"""


@pytest.mark.full(reason="a model of gigabytes; a quarter of a minute")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_the_model_is_never_in_memory_as_a_whole(tmp_path):
    """130 MB through a process that grows by far less, both ways."""
    model = ModelConfig(layers=32, hidden=256, heads=4, ffn=1024, vocabulary=1000, tied=True)
    source = checkpoint_of(tmp_path / "ours.h5", model)
    for name in ("theirs", "again.h5"):
        command = [sys.executable, "-c", MEMORY, str(source), str(tmp_path / name)]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
        written, grown = map(int, told.split())
        assert written > 120e6
        assert grown < 30e6, f"{name}: {grown / 1e6:.0f} MB for {written / 1e6:.0f} MB of weights"
        source = tmp_path / name
