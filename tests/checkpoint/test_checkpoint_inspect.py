"""What `inspect` says is what is in the file, without MPI or torch."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from mpi4py import MPI

from hpcllm.checkpoint import inspect
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.writer import write
from hpcllm.errors import CheckpointError


def test_the_description_agrees_with_the_tensors(tmp_path, write_alone, tensors, specs, monkeypatch):
    monkeypatch.setattr(inspect, "_PIECE_ELEMENTS", 20)  # many pieces
    path = write_alone(tmp_path / "x.h5")
    found = json.loads(json.dumps(inspect.describe(path)))
    assert found["file_bytes"] == path.stat().st_size
    assert found["attributes"] == {"run/step": 3, "note": "größer", "run/rate": 0.5}
    for name, tensor in tensors.items():
        item = found["datasets"][name]
        assert (item["shape"], item["dtype"]) == (list(tensor.shape), specs[name].dtype)
        assert (item["bytes"], item["slabs"]) == (tensor.nbytes, 1)
        if item["dtype"] in ("float32", "float64"):
            assert item["norm"] == pytest.approx(np.linalg.norm(tensor.astype("f8")), rel=1e-12)


def write_rows(path, array, dtype):
    slabs = {Slab("w", (row,), (1,)): array[row : row + 1] for row in range(len(array))}
    return write(path, MPI.COMM_SELF, {"w": DatasetSpec(array.shape, dtype)}, slabs, {"run/text": "a\n\x1b[2Jb"}).path


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 3.0e38, 2.0**-120])
def test_bfloat16_is_understood(tmp_path, value):
    bits = (np.array([value, value], "f4").view("u4") >> 16).astype("u2")
    rounded = (bits.astype("u4") << 16).view("f4").astype("f8")
    found = inspect.describe(write_rows(tmp_path / "x.h5", bits, "bfloat16"))["datasets"]["w"]
    assert found["norm"] == pytest.approx(np.linalg.norm(rounded), rel=1e-12)


def test_the_tree_shows_what_is_not_finite_and_leaves_the_terminal_alone(tmp_path):
    lines = inspect.tree_lines(write_rows(tmp_path / "x.h5", np.array([1, np.inf], "f4"), "float32"))
    assert any("w float32 (2)   8 bytes   NOT FINITE   2 slabs" in line for line in lines)
    assert not any("\x1b" in line for line in lines)
    assert any(line.endswith(r"\x1b[2Jb") for line in lines)


def test_the_tree_has_every_name(tmp_path, write_alone, tensors):
    text = "\n".join(inspect.tree_lines(write_alone(tmp_path / "x.h5")))
    for name in [*tensors, "run/@step", "@note"]:
        assert all(part in text for part in name.split("/"))


def test_the_tree_counts_blocks_as_people_do(tmp_path):
    names = [f"model/blocks.{block}.weight" for block in (*range(12), 100)]
    slabs = {Slab(name, (0,), (1,)): np.ones(1, "f4") for name in names}
    write(tmp_path / "x.h5", MPI.COMM_SELF, {name: DatasetSpec((1,), "float32") for name in names}, slabs, {})
    text = "\n".join(inspect.tree_lines(tmp_path / "x.h5"))
    places = [text.index(name.removeprefix("model/")) for name in names]
    assert places == sorted(places)


def test_a_damaged_file_is_not_described(tmp_path, write_alone):
    path = write_alone(tmp_path / "x.h5")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"x\.h5"):
        inspect.tree_lines(path)


def test_neither_mpi_nor_torch_is_loaded(tmp_path, write_alone):
    path = write_alone(tmp_path / "x.h5")
    program = (
        "import sys; from pathlib import Path; from hpcllm.checkpoint.inspect import describe; "
        "describe(Path(sys.argv[1])); print({'mpi4py', 'torch'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
