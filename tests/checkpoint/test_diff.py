"""What `diff` finds is what was changed: no more, no less, and by how much."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoints import write_slabs

from hpcllm.checkpoint import layout
from hpcllm.checkpoint.archive import compress
from hpcllm.checkpoint.diff import difference
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import whole
from hpcllm.errors import CheckpointError

CONFIG = '[run]\nname = "a"\nseed = 1\n[mesh]\ndp = 2\n[optimizer]\nlearning_rate = 0.1\n'


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch):
    monkeypatch.setattr(layout, "BLOCK_BYTES", 96)


def write(path, tensors, attributes=None, dtypes=None):
    specs = {name: DatasetSpec(t.shape, (dtypes or {}).get(name, t.dtype.name)) for name, t in tensors.items()}
    slabs = {whole(name, tensor.shape): tensor for name, tensor in tensors.items()}
    return write_slabs(path, None, specs, slabs, attributes or {}).path


def found_between(a, b, tolerance=None):
    with Checkpoint.open(a) as one, Checkpoint.open(b) as other:
        found = difference(one, other, tolerance)
    assert found.as_dict(a, b)["same"] == found.is_none
    assert found.lines(a, b)[-1].startswith("the same") == found.is_none
    return found


def as_bfloat16(values):
    return (values.astype("f4").view("u4") >> 16).astype("u2"), "bfloat16"


def numbers_of(bits):
    return (bits.astype("u4") << 16).view("f4")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("seed", range(4))
def test_changed_elements_are_counted_and_measured_as_numpy_does(tmp_path, dtype, seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(3, 12, int(rng.integers(1, 4))))
    before = rng.integers(1, 100, shape) / (1 if "int" in dtype else 7)
    after = np.where(rng.random(shape) < (0, 0.02, 0.3, 1)[seed], before + 3, before)
    if dtype == "bfloat16":
        a, b = as_bfloat16(before)[0], as_bfloat16(after)[0]
        one, other = numbers_of(a).astype("f8"), numbers_of(b).astype("f8")
    else:
        a, b = before.astype(dtype), after.astype(dtype)
        one, other = a.astype("f8"), b.astype("f8")
    dtypes = {"w": dtype}
    paths = [write(tmp_path / f"{k}.h5", {"w": t, "same": a}, dtypes=dtypes) for k, t in (("a", a), ("b", b))]
    found = found_between(*paths)
    differs = a != b
    if not differs.any():
        assert found.is_none
        return
    assert list(found.tensors) == ["w"]
    item = found.tensors["w"]
    assert (item.elements, item.differing) == (a.size, np.count_nonzero(differs))
    assert item.first == tuple(np.argwhere(differs)[0])
    assert item.max_absolute == np.abs(one - other).max()
    assert item.max_relative == (np.abs(one - other) / np.maximum(np.abs(one), np.abs(other)))[differs].max()


@settings(max_examples=40)
@given(st.floats(width=32), st.floats(width=32), st.sampled_from([0.0, 1e-3, 1.0]))
def test_a_tolerance_allows_what_it_says(tmp_path_factory, a, b, tolerance):
    folder = tmp_path_factory.mktemp("pair")
    paths = [write(folder / f"{k}.h5", {"w": np.array([v], "f4")}) for k, v in (("a", a), ("b", b))]
    x, y = np.float64(a), np.float64(b)
    with np.errstate(all="ignore"):
        close = x == y or (np.isnan(x) and np.isnan(y)) or abs(x - y) <= tolerance * (1 + max(abs(x), abs(y)))
        close = x == y or (bool(close) and not np.isinf(x - y))
    assert found_between(*paths, tolerance).is_none == bool(close)
    same_bits = np.array([a], "f4").tobytes() == np.array([b], "f4").tobytes()
    assert found_between(*paths).is_none == same_bits


@pytest.mark.parametrize(("b", "same"), [(np.inf, True), (-np.inf, False), (1e30, False), (np.nan, False)])
def test_infinities_are_only_close_to_themselves(tmp_path, b, same):
    paths = [write(tmp_path / f"{k}.h5", {"w": np.array([v], "f4")}) for k, v in (("a", np.inf), ("b", b))]
    found = found_between(*paths, 1.0)
    assert found.is_none == same
    if not same:
        assert found.tensors["w"].max_absolute is None
        assert "not finite" in "\n".join(found.lines(*paths))


def test_names_shapes_and_types_are_compared(tmp_path):
    common = {"same": np.arange(50.0), "shape": np.zeros((2, 3)), "type": np.arange(40, dtype="f4")}
    a = write(tmp_path / "a.h5", common | {"gone": np.zeros(2)})
    changed = {"shape": np.zeros((3, 2)), "type": np.arange(40, dtype="f8"), "new": np.zeros(2)}
    found = found_between(a, write(tmp_path / "b.h5", common | changed))
    assert (found.only_a, found.only_b, list(found.specs)) == (["gone"], ["new"], ["shape", "type"])
    assert found.tensors == {}  # the numbers of `type` are the same
    changed["type"] = np.arange(40.0) + np.eye(1, 40, 23)[0]
    found = found_between(a, write(tmp_path / "c.h5", common | changed))
    assert (found.tensors["type"].differing, found.tensors["type"].first) == (1, (23,))


def test_attributes_and_run_file_count_and_how_it_was_written_does_not(tmp_path):
    tensors = {"w": np.zeros(3)}
    facts = {"run/step": 3, "run/config": CONFIG, "run/written_at": "monday", "run/versions/torch": "2"}
    a = write(tmp_path / "a.h5", tensors, facts)
    elsewhere = {"run/written_at": "friday", "run/versions/torch": "3", "run/mesh/dp": 4, "written/ranks": 9}
    moved = CONFIG.replace("dp = 2", "dp = 4")
    found = found_between(a, write(tmp_path / "b.h5", tensors, facts | elsewhere | {"run/config": moved}))
    assert found.is_none
    assert found.written["run/config/mesh.dp"] == (2, 4)
    assert found.written["run/mesh/dp"] == (None, 4)
    other = CONFIG.replace("seed = 1", "seed = 2").replace("learning_rate = 0.1\n", "")
    found = found_between(a, write(tmp_path / "c.h5", tensors, facts | {"run/step": 4, "run/config": other}))
    assert found.facts == {
        "run/step": (3, 4), "run/config/run.seed": (1, 2), "run/config/optimizer.learning_rate": (0.1, None)
    }  # fmt: skip
    found = found_between(a, write(tmp_path / "d.h5", tensors, facts | {"run/config": "no [toml"}))
    assert not found.is_none


def test_an_archive_is_the_same_as_what_it_was_made_of(tmp_path, tensors):
    plain = write(tmp_path / "a.h5", tensors, {"run/step": 3})
    compress(plain, tmp_path / "b.h5", None)
    found = found_between(plain, tmp_path / "b.h5")
    assert found.is_none
    assert not any(dataclasses.asdict(found).values())


def test_a_damaged_file_is_not_the_same(tmp_path, tensors):
    plain = write(tmp_path / "a.h5", tensors)
    damaged = bytearray(plain.read_bytes())
    with Checkpoint.open(plain) as checkpoint:
        damaged[checkpoint.datasets["model/bias"].offset] ^= 1
    (tmp_path / "b.h5").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="model/bias"):
        found_between(plain, tmp_path / "b.h5")
