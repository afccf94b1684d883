"""One file: what is in it, that no damage goes unseen, and that a wrong request or a killed writer costs nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from small_checkpoints import own_attributes, verify, write_slabs

from hpcllm.checkpoint.layout import CHECKSUMS, DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint, map_ahead
from hpcllm.checkpoint.slabs import Slab, whole
from hpcllm.errors import CheckpointError


def load(path: Path) -> dict[str, np.ndarray]:
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read_whole(name) for name in checkpoint.datasets}


def verify_file(path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        verify(checkpoint)


def test_plain_h5py_sees_the_tensors(tmp_path, write_alone, tensors):
    path = write_alone(tmp_path / "a folder" / "step_00000003.h5")
    with h5py.File(path) as file:
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(file[name][()], tensor)
        assert file["optimizer/exp_avg/blocks.0.weight"].attrs["dtype"] == "bfloat16"
        assert file["run"].attrs["step"] == 3
        assert file.attrs["note"] == "größer"
        assert file.attrs["complete"]
        assert len(file[CHECKSUMS]) == len(tensors)


def test_we_read_what_we_wrote(tmp_path, write_alone, tensors, specs):
    path = write_alone(tmp_path / "x.h5")
    for name, found in load(path).items():
        assert found.tobytes() == tensors[name].tobytes()
        assert (found.shape, found.dtype) == (tensors[name].shape, tensors[name].dtype)
    with Checkpoint.open(path) as checkpoint:
        assert {name: item.spec for name, item in checkpoint.datasets.items()} == specs
        assert own_attributes(checkpoint.attributes) == {"run/step": 3, "note": "größer", "run/rate": 0.5}
    assert os.listdir(tmp_path) == ["x.h5"]


def test_every_flipped_bit_is_found_by_verify_and_by_loading(tmp_path, write_alone):
    path = write_alone(tmp_path / "x.h5")
    original, rng = path.read_bytes(), np.random.default_rng(1)
    for bit in rng.integers(0, 8 * len(original), 200):
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        for reading in (verify_file, load):
            with pytest.raises(CheckpointError, match=r"x\.h5"):
                reading(path)


def test_every_truncation_and_every_addition_is_found(tmp_path, write_alone):
    path = write_alone(tmp_path / "x.h5")
    original, rng = path.read_bytes(), np.random.default_rng(2)
    for changed in [original[:n] for n in [0, 1, 70, 4095, *rng.integers(0, len(original), 60)]] + [original + b"\0"]:
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"x\.h5"):
            Checkpoint.open(path)


def test_damage_in_a_tensor_names_file_and_dataset(tmp_path, write_alone, tensors):
    path = write_alone(tmp_path / "x.h5")
    for name in tensors:
        write_alone(path)
        with Checkpoint.open(path) as checkpoint, path.open("r+b") as file:
            offset = checkpoint.datasets[name].offset
            file.seek(offset)
            value = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([value ^ 16]))
        with Checkpoint.open(path) as checkpoint:
            for reading in (verify, lambda of, name=name: of.read_whole(name)):
                with pytest.raises(CheckpointError, match=rf"x\.h5: {name} .*has changed"):
                    reading(checkpoint)
            intact = next(other for other in tensors if other != name)
            assert checkpoint.read_whole(intact).tobytes() == tensors[intact].tobytes()


def test_a_file_cut_while_it_is_open_is_noticed(tmp_path, write_alone):
    path = write_alone(tmp_path / "x.h5")
    with Checkpoint.open(path) as checkpoint:
        os.truncate(path, checkpoint.datasets["model/blocks.0.weight"].offset + 8)
        with pytest.raises(CheckpointError, match="it was cut"):
            checkpoint.read_whole("model/blocks.0.weight")


def test_what_is_not_there_is_named(tmp_path, write_alone):
    with pytest.raises(CheckpointError, match=r"none\.h5"):
        Checkpoint.open(tmp_path / "none.h5")
    with pytest.raises(CheckpointError, match="cannot read"):
        Checkpoint.open(tmp_path)
    with Checkpoint.open(write_alone(tmp_path / "x.h5")) as checkpoint:
        with pytest.raises(CheckpointError, match="model/none is not in the file"):
            checkpoint.read_whole("model/none")
        with pytest.raises(CheckpointError, match=r"model/bias has shape \(5,\)"):
            checkpoint.read(Slab("model/bias", (3,), (3,)))


BAD_WRITES = {
    "an unknown type": ({"w": DatasetSpec((2,), "complex64")}, {}, {}, "valid: float16"),
    "no elements": ({"w": DatasetSpec((2, 0), "float32")}, {}, {}, "no elements"),
    "a name that climbs": ({"a/../w": DatasetSpec((2,), "float32")}, {}, {}, "cannot name"),
    "our own table": ({CHECKSUMS: DatasetSpec((2,), "float32")}, {}, {}, "cannot name"),
    "a slab of nothing": ({}, {whole("w", (2,)): np.zeros(2, "f4")}, {}, "without the spec"),
    "a slab outside": (
        {"w": DatasetSpec((2,), "float32")},
        {Slab("w", (1,), (2,)): np.zeros(2, "f4")},
        {},
        "does not lie inside",
    ),
    "another type": (
        {"w": DatasetSpec((2,), "float32")},
        {whole("w", (2,)): np.zeros(2, "f8")},
        {},
        "has float64",
    ),
    "strides": (
        {"w": DatasetSpec((2,), "float32")},
        {whole("w", (2,)): np.zeros(4, "f4")[::2]},
        {},
        "C-contiguous",
    ),
    "a hole": (
        {"w": DatasetSpec((3,), "float32")},
        {Slab("w", (0,), (2,)): np.zeros(2, "f4")},
        {},
        r"element \(2,\) is held 0 times",
    ),
    "an attribute that is a list": ({}, {}, {"a": [{}]}, "attribute 'a' is a list"),
    "an attribute inside a dataset": (
        {"w": DatasetSpec((1,), "float32")},
        {whole("w", (1,)): np.zeros(1, "f4")},
        {"w/a": 1},
        "cannot finish",
    ),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_a_wrong_request_leaves_what_was_there(tmp_path, write_alone, case):
    datasets, slabs, attributes, message = BAD_WRITES[case]
    path = write_alone(tmp_path / "x.h5")
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=message):
        write_slabs(path, None, datasets, slabs, attributes)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.h5"]


def test_a_checkpoint_larger_than_the_disk_is_refused_with_numbers(tmp_path, write_alone):
    path = write_alone(tmp_path / "x.h5")
    before = path.read_bytes()
    space = os.statvfs(tmp_path)
    too_many = space.f_bavail * space.f_frsize + (1 << 30)
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(too_many)  # takes no room, and memory only where it is read
    slabs = {whole("w", (too_many,)): np.memmap(tmp_path / "sparse", dtype="u1", mode="r")}
    with pytest.raises(CheckpointError, match=r"[\d,]+ bytes free, but the checkpoint needs [\d,]+"):
        write_slabs(path, None, {"w": DatasetSpec((too_many,), "uint8")}, slabs, {})
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["sparse", "x.h5"]


WRITER = """
import sys
from pathlib import Path
import numpy as np
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.slabs import whole
from small_checkpoints import write_slabs
shape = (96 << 20,)
slabs = {whole("w", shape): np.ones(shape, "u1")}
write_slabs(Path(sys.argv[1]), None, {"w": DatasetSpec(shape, "uint8")}, slabs, {})
"""


def test_a_writer_killed_at_work_leaves_the_old_file(tmp_path, write_alone):
    path = write_alone(tmp_path / "step_00000001.h5")
    before = path.read_bytes()
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
        while not (found := list(tmp_path.glob("*.tmp-*"))) or found[0].stat().st_blocks * 512 < 1 << 20:
            assert writer.poll() is None, "the writer ended before it was killed"
            time.sleep(0.0005)
        writer.send_signal(signal.SIGKILL)
    assert list(tmp_path.glob("*.tmp-*"))
    assert path.read_bytes() == before
    verify_file(path)


def test_work_ahead_that_is_left_half_way_may_be_closed_by_one_of_its_own_threads():
    left, closed, errors = threading.Event(), threading.Event(), []

    def work(item: int) -> int:
        if item:
            assert left.wait(10)
            try:
                ahead.close()  # as the collector of garbage does where such a thread happens to start it
            except Exception as error:
                errors.append(error)
            closed.set()
        return item

    ahead = map_ahead(work, range(100))
    assert next(ahead) == 0
    left.set()
    assert closed.wait(10)
    assert not [error for error in errors if not isinstance(error, ValueError)]  # another of them is closing it
