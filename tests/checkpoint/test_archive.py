"""An archive is the same bits in fewer bytes: back again byte for byte, read by anyone's HDF5, never trusted."""

from __future__ import annotations

import resource
import tracemalloc

import h5py
import hdf5plugin  # noqa: F401  registers the filter
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import write_slabs

from hpcllm.checkpoint import layout
from hpcllm.checkpoint.archive import compress, decompress
from hpcllm.checkpoint.inspect import verify_file
from hpcllm.checkpoint.layout import STORED_AS, DatasetSpec, filter_mask, pack, unpack
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import whole
from hpcllm.errors import CheckpointError, DataError

LIMIT = 400  # bytes of a block, so that small tensors have many


@pytest.fixture
def many_blocks(monkeypatch):
    monkeypatch.setattr(layout, "BLOCK_BYTES", LIMIT)


def is_sound(path, comm=None) -> bool:
    return verify_file(path, comm, lambda _: None).is_sound


def all_types(seed: int) -> tuple[dict[str, DatasetSpec], dict[str, np.ndarray]]:
    """Random shapes of every type that there is; some compress, some do not."""
    rng = np.random.default_rng(seed)
    specs, tensors = {}, {}
    for name, stored in STORED_AS.items():
        shape = tuple(int(n) for n in rng.integers(1, 30, int(rng.integers(0, 4))))
        random = rng.integers(0, 256, (*shape, stored.itemsize), dtype=np.uint8).view(stored).reshape(shape)
        smooth = rng.standard_normal(shape).astype(np.float32).astype(stored)
        specs[f"model/{name}"] = DatasetSpec(shape, name)
        tensors[f"model/{name}"] = random if seed % 2 else smooth
    return specs, tensors


def write_alone(path, specs, tensors, attributes):
    return write_slabs(path, None, specs, {whole(n, t.shape): t for n, t in tensors.items()}, attributes).path


@pytest.mark.parametrize("level", [1, 19])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("many_blocks")
def test_an_archive_holds_the_same_bits_and_gives_back_the_same_file(tmp_path, seed, level):
    specs, tensors = all_types(seed)
    attributes = {"run/step": 7, "note": "größer\n", "run/rate": 0.1, "run/mesh/dp": 2, "is": True, "run/a/b/c": "x"}
    plain = write_alone(tmp_path / "plain.h5", specs, tensors, attributes)
    report = compress(plain, tmp_path / "archive.h5", None, level)
    assert (report.source_bytes, report.target_bytes) == tuple(
        (tmp_path / name).stat().st_size for name in ("plain.h5", "archive.h5")
    )
    assert is_sound(tmp_path / "archive.h5")
    with Checkpoint.open(plain) as one, Checkpoint.open(tmp_path / "archive.h5") as other:
        assert one.attributes == other.attributes
        assert list(one.datasets) == list(other.datasets)
        for name, tensor in tensors.items():
            assert one.datasets[name].spec == other.datasets[name].spec == specs[name]
            assert other.read_whole(name).tobytes() == tensor.tobytes()
            np.testing.assert_array_equal(one.datasets[name].checksums, other.datasets[name].checksums)
    decompress(tmp_path / "archive.h5", tmp_path / "again.h5", None)
    assert (tmp_path / "again.h5").read_bytes() == plain.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.h5", "archive.h5", "plain.h5"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("many_blocks")
def test_plain_h5py_reads_an_archive_with_the_plugin_of_hdf5(tmp_path, seed):
    specs, tensors = all_types(seed)
    compress(write_alone(tmp_path / "plain.h5", specs, tensors, {"run/step": 7}), tmp_path / "archive.h5", None)
    with h5py.File(tmp_path / "archive.h5") as file:
        assert file["run"].attrs["step"] == 7
        for name, tensor in tensors.items():
            assert file[name][()].reshape(tensor.shape).tobytes() == tensor.tobytes()
            assert file[name].attrs.get("dtype", tensor.dtype.name) == specs[name].dtype


def test_numbers_of_a_model_get_smaller(tmp_path):
    """Normal numbers in 16 bits: sign and mantissa stay, most of the exponent goes."""
    values = np.random.default_rng(0).standard_normal((1000, 1000)).astype(np.float32)
    specs = {"b": DatasetSpec(values.shape, "bfloat16"), "f": DatasetSpec(values.shape, "float32")}
    tensors = {"b": (values.view(np.uint32) >> 16).astype(np.uint16), "f": values}
    compress(write_alone(tmp_path / "plain.h5", specs, tensors, {}), tmp_path / "archive.h5", None)
    with Checkpoint.open(tmp_path / "archive.h5") as archive:
        ratio = {name: spec.bytes / int(archive.datasets[name].packed[:, 1].sum()) for name, spec in specs.items()}
    assert ratio["b"] > 1.4
    assert ratio["f"] > 1.15


@given(st.binary(min_size=1, max_size=300), st.sampled_from([1, 2, 4, 8]), st.integers(0, 5), st.booleans())
def test_a_chunk_gives_back_its_block(values, item_bytes, more, is_smooth):
    block = (values[:1] if is_smooth else values) * item_bytes * (40 if is_smooth else 1)
    chunk_bytes = len(block) + more * item_bytes
    stored = pack(block, item_bytes, chunk_bytes, 1)
    assert len(stored) <= chunk_bytes
    out = bytearray(len(block))
    unpack(stored, memoryview(out), item_bytes, chunk_bytes)
    assert out == block
    assert (filter_mask(len(stored), chunk_bytes) == 0) == (len(stored) < chunk_bytes)


NO_CHUNKS = {  # made when they are asked for: every rank of every group imports this file
    "bomb": lambda: zstandard.compress(bytes(1 << 30)),  # that says what it is
    "hidden bomb": lambda: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 30)),
    "too small": lambda: zstandard.compress(bytes(999)),
    "more": lambda: zstandard.compress(bytes(1000)) + b"more",
    "cut": lambda: zstandard.compress(bytes(1000))[:-1],
    "empty": lambda: b"",
    "garbage": lambda: b"no frame of zstd",
}


@pytest.mark.parametrize("name", NO_CHUNKS)
def test_a_chunk_that_we_did_not_make_is_refused_in_bounded_memory(name):
    stored = NO_CHUNKS[name]()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            unpack(stored, memoryview(bytearray(1000)), 4, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("many_blocks")
def test_every_flipped_bit_is_found(tmp_path):
    specs, tensors = all_types(0)
    path = tmp_path / "archive.h5"
    compress(write_alone(tmp_path / "plain.h5", specs, tensors, {"run/step": 7}), path, None)
    whole_file, rng = path.read_bytes(), np.random.default_rng(1)
    with Checkpoint.open(path) as archive:
        chunks = [tuple(map(int, row)) for stored in archive.datasets.values() for row in stored.packed[:, :2]]
    places = [offset + int(rng.integers(length)) for offset, length in chunks[::4]]
    places += [int(rng.integers(len(whole_file))) for _ in range(30)]
    for number, place in enumerate(places):
        damaged = bytearray(whole_file)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        assert not is_sound(path)
        if number % 8 == 0:
            with pytest.raises(CheckpointError):
                decompress(path, tmp_path / "again.h5", None)
    assert not list(tmp_path.glob("again*"))


def test_what_is_not_meant_is_refused(tmp_path, write_alone):
    plain = write_alone(tmp_path / "plain.h5")
    compress(plain, tmp_path / "archive.h5", None)
    with pytest.raises(DataError, match="is an archive already"):
        compress(tmp_path / "archive.h5", tmp_path / "new.h5", None)
    with pytest.raises(DataError, match="is no archive"):
        decompress(plain, tmp_path / "new.h5", None)
    with pytest.raises(CheckpointError, match="cannot create"):
        compress(plain, plain / "new.h5", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.h5", "plain.h5"]


def test_a_file_system_that_takes_no_more_ends_the_work_with_nothing_left(tmp_path):
    """Here by a limit on the size of files, which the kernel enforces as it does a full disk."""
    values = np.random.default_rng(0).standard_normal((1000, 1000))
    plain = write_alone(tmp_path / "plain.h5", {"w": DatasetSpec(values.shape, "float64")}, {"w": values}, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"archive\.h5.*: File too large$"):
            compress(plain, tmp_path / "archive.h5", None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.h5"]
    compress(plain, tmp_path / "archive.h5", None)
    assert is_sound(tmp_path / "archive.h5")


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.usefixtures("many_blocks")
def test_ranks_together_write_the_file_that_one_process_writes(comm, shared_path):
    specs, tensors = all_types(2)
    if comm.rank == 0:
        write_alone(shared_path / "plain.h5", specs, tensors, {"run/step": 7})
        compress(shared_path / "plain.h5", shared_path / "alone.h5", None)
    comm.Barrier()
    compress(shared_path / "plain.h5", shared_path / "archive.h5", comm)
    assert (shared_path / "archive.h5").read_bytes() == (shared_path / "alone.h5").read_bytes()
    decompress(shared_path / "archive.h5", shared_path / "again.h5", comm)
    assert (shared_path / "again.h5").read_bytes() == (shared_path / "plain.h5").read_bytes()


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("way", [compress, decompress])
@pytest.mark.usefixtures("many_blocks")
def test_damage_that_one_rank_finds_ends_the_work_of_all(comm, shared_path, way):
    specs, tensors = all_types(2)
    source = shared_path / ("plain.h5" if way is compress else "archive.h5")
    if comm.rank == 0:
        write_alone(shared_path / "plain.h5", specs, tensors, {})
        compress(shared_path / "plain.h5", shared_path / "archive.h5", None)
        with Checkpoint.open(source) as checkpoint:
            stored = checkpoint.datasets["model/float32"]
            offset, _ = stored.extent(stored.spec.blocks - 1)
        damaged = bytearray(source.read_bytes())
        damaged[offset] ^= 1
        source.write_bytes(damaged)
    comm.Barrier()
    with pytest.raises(CheckpointError, match="model/float32"):
        way(source, shared_path / "new.h5", comm)
    comm.Barrier()
    assert not list(shared_path.glob("new*"))
