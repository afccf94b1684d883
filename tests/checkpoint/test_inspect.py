"""What `inspect` says is what is in the file, without MPI or torch."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from small_checkpoints import own_attributes, write_slabs

from hpcllm.checkpoint import layout
from hpcllm.checkpoint.inspect import describe, tree_lines
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import whole


def described(path) -> dict:
    with Checkpoint.open(path) as checkpoint:
        return json.loads(json.dumps(describe(checkpoint)))


def text_of(path) -> str:
    return "\n".join(tree_lines(described(path)))


def test_the_description_agrees_with_the_tensors(tmp_path, write_alone, tensors, specs, monkeypatch):
    monkeypatch.setattr(layout, "BLOCK_BYTES", 160)
    path = write_alone(tmp_path / "x.h5")
    found = described(path)
    assert (found["file_bytes"], found["packed"], found["damage"]) == (path.stat().st_size, False, [])
    assert own_attributes(found["attributes"]) == {"run/step": 3, "note": "größer", "run/rate": 0.5}
    assert found["datasets"]["model/blocks.0.weight"]["blocks"] == -(-37 // 3)  # rows of 44 bytes
    for name, tensor in tensors.items():
        item = found["datasets"][name]
        assert (item["shape"], item["dtype"]) == (list(tensor.shape), specs[name].dtype)
        assert (item["bytes"], item["stored_bytes"], item["damaged"]) == (tensor.nbytes, tensor.nbytes, 0)
        if item["dtype"] in ("float32", "float64"):
            assert item["norm"] == pytest.approx(np.linalg.norm(tensor.astype("f8")), rel=1e-12)


def write_one(path, array, dtype, **attributes):
    spec = DatasetSpec(array.shape, dtype)
    return write_slabs(path, None, {"w": spec}, {whole("w", array.shape): array}, attributes).path


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 3.0e38, 2.0**-120])
def test_bfloat16_is_understood(tmp_path, value):
    bits = (np.array([value, value], "f4").view("u4") >> 16).astype("u2")
    rounded = (bits.astype("u4") << 16).view("f4").astype("f8")
    found = described(write_one(tmp_path / "x.h5", bits, "bfloat16"))["datasets"]["w"]
    assert found["norm"] == pytest.approx(np.linalg.norm(rounded), rel=1e-12)


def test_the_tree_shows_what_is_not_finite_and_leaves_the_terminal_alone(tmp_path):
    path = write_one(tmp_path / "x.h5", np.array([1, np.inf], "f4"), "float32", text="a\n\x1b[2Jb")
    lines = text_of(path).splitlines()
    assert any("w        float32 (2)   8 bytes   NOT FINITE" in line or "NOT FINITE" in line for line in lines)
    assert not any("\x1b" in line for line in lines)
    assert any(line.endswith(r"\x1b[2Jb") for line in lines)


def test_the_tree_has_every_name_and_how_it_was_written(tmp_path, write_alone, tensors):
    text = text_of(write_alone(tmp_path / "x.h5"))
    assert "step 3, by 1 rank, writer offsets" in text
    for name in [*tensors, "run/@step", "@note"]:
        assert all(part in text for part in name.split("/"))


def test_a_tensor_of_a_large_model_has_one_line_of_80_columns(tmp_path):
    shapes = {"blocks.31.attention.output.weight": (88, 32), "embedding.weight": (128, 16)}
    values = {name: np.full(shape, 1.2345678e-9, "f4") for name, shape in shapes.items()}
    specs = {f"optimizer/exp_avg_sq/{name}": DatasetSpec(shape, "float32") for name, shape in shapes.items()}
    slabs = {whole(f"optimizer/exp_avg_sq/{name}", value.shape): value for name, value in values.items()}
    found = described(write_slabs(tmp_path / "x.h5", None, specs, slabs, {}).path)
    for item in found["datasets"].values():
        item["stored_bytes"] -= 1  # as in an archive
    for columns in (0, 80):
        lines = [line for line in tree_lines(found, columns) if "float32" in line]
        assert len(lines) == 2
        assert all("norm" in line and ("stored in" in line) == (columns == 0) for line in lines)
    assert max(map(len, lines)) <= 80


def test_the_tree_counts_blocks_as_people_do(tmp_path):
    names = [f"model/blocks.{block}.weight" for block in (*range(12), 100)]
    specs = {name: DatasetSpec((1,), "float32") for name in names}
    write_slabs(tmp_path / "x.h5", None, specs, {whole(name, (1,)): np.ones(1, "f4") for name in names}, {})
    text = text_of(tmp_path / "x.h5")
    places = [text.index(name.removeprefix("model/")) for name in names]
    assert places == sorted(places)


def test_a_damaged_block_is_named_and_the_rest_is_shown(tmp_path, write_alone, tensors, monkeypatch):
    monkeypatch.setattr(layout, "BLOCK_BYTES", 160)
    path = write_alone(tmp_path / "x.h5")
    before = described(path)
    with Checkpoint.open(path) as checkpoint:
        offset, count = checkpoint.datasets["model/blocks.0.weight"].extent(5)
    data = bytearray(path.read_bytes())
    data[offset + count - 1] ^= 1
    path.write_bytes(data)
    found = described(path)
    assert [(item["dataset"], item["start"], item["shape"]) for item in found["damage"]] == [
        ("model/blocks.0.weight", [15, 0], [3, 11])
    ]
    assert (found["damage"][0]["offset"], found["damage"][0]["bytes"]) == (offset, count)
    for name in tensors.keys() - {"model/blocks.0.weight"}:
        assert found["datasets"][name] == before["datasets"][name]
    text = "\n".join(tree_lines(found))
    assert "1 of 13 blocks DAMAGED" in text
    assert f"damaged: bytes {offset}-{offset + count - 1}: model/blocks.0.weight from (15, 0), shape (3, 11)" in text


def test_neither_mpi_nor_torch_is_loaded(tmp_path, write_alone):
    path = write_alone(tmp_path / "x.h5")
    for command in (
        ["inspect", path],
        ["verify", path],
        ["diff", path, path],
        ["compress", path, tmp_path / "a.h5"],
        ["decompress", tmp_path / "a.h5", tmp_path / "b.h5"],
    ):
        program = (
            "import sys; from hpcllm.cli.main import main; code = main(['checkpoint', *sys.argv[1:]]); "
            "sys.exit(f'loaded: {found}' if (found := {'mpi4py.MPI', 'torch'} & set(sys.modules)) else code)"
        )
        done = subprocess.run([sys.executable, "-c", program, *map(str, command)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
