"""Real measurements on 1 to 3 ranks with small arrays: records are complete and add up; --check sees what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hpcllm.codecs import find_codec
from hpcllm.collectives import group_of, operations
from hpcllm.collectives.group import make_group
from hpcllm.collectives.window import find_window
from hpcllm.errors import ConfigError
from hpcllm.perf import codec, collective, p2p
from hpcllm.perf.arguments import Options
from hpcllm.perf.arrays import Arrays
from hpcllm.perf.records import bus_factor, read_json
from hpcllm.perf.values import pattern, unroll

OPERATIONS = ["allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast"]
LAST = dict.fromkeys(OPERATIONS, "ring") | {"alltoall": "pairwise"}
SMALL = {"sizes": (12, 4096, 40_000), "codecs": ("raw",), "iterations": 2, "warmup": 1, "check": True}


def never() -> bool:
    return False


def options(**changes) -> Options:
    return Options(**(SMALL | changes))


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_records_add_up_and_the_file_is_the_table(comm, shared_path, capsys, operation, dtype):
    path = shared_path / "records.json"
    asked = options(
        json=path, dtype=dtype, codecs=("raw", "fp16"), algorithms=("mpi", "native", "auto", LAST[operation])
    )
    assert collective.run(operation, asked, comm, never) == 0
    shown = capsys.readouterr().out
    if comm.rank > 0:
        assert shown == ""
        return
    records = read_json(path)
    rows = [line.split() for line in shown.splitlines() if not line.startswith("#")][1:]
    assert [row[1:3] for row in rows] == [[r.algorithm, r.codec] for r in records]
    assert {r.bytes for r in records} == set(asked.sizes)
    assert all(r.chosen for r in records if r.algorithm == "auto")
    for r in records:
        assert (r.operation, r.dtype, r.ranks, r.iterations) == (operation, dtype, comm.size, 2)
        assert 0 < r.min_s <= r.median_s <= r.max_s
        assert r.algbw_gb_s == pytest.approx(r.bytes / r.median_s / 1e9)
        assert r.busbw_gb_s == pytest.approx(r.algbw_gb_s * bus_factor(operation, comm.size))
        assert r.rel_error < (0.02 if dtype == "bfloat16" else 1e-6 if r.codec == "raw" else 1e-2)
        assert (r.bound_s is None) == (comm.size == 1)


@pytest.mark.parallel([2, 3])
def test_the_ratio_is_that_of_the_wire_and_the_bound_that_of_the_codec(comm, shared_path):
    path = shared_path / "records.json"
    asked = options(json=path, codecs=("raw", "bf16"), algorithms=("ring",), bandwidth_gb_s=0.125, sizes=(1 << 20,))
    collective.run("allreduce", asked, comm, never)
    if comm.rank == 0:
        plain, half = read_json(path)
        assert (plain.ratio, half.ratio) == (1.0, pytest.approx(2.0))
        seconds = 2 * (comm.size - 1) / comm.size * (1 << 20) / 0.125e9
        assert (plain.bound_s, half.bound_s) == (pytest.approx(seconds), pytest.approx(seconds / 2))


def summed(x: torch.Tensor, group) -> None:
    """Right, and the same on all ranks."""
    total = x.clone()
    group.comm.Allreduce(x.numpy(), total.numpy())
    x.copy_(total)


def correct(x, group, codec) -> None:  # noqa: ARG001
    summed(x, group)


def does_nothing(x, group, codec) -> None:
    pass


def forgets_a_rank(x, group, codec) -> None:  # noqa: ARG001
    if group.rank == group.size - 1:
        x.zero_()
    summed(x, group)


def swaps_two_values(x, group, codec) -> None:  # noqa: ARG001
    summed(x, group)
    x[[0, 1]] = x[[1, 0]]


def loses_the_last_value(x, group, codec) -> None:  # noqa: ARG001
    summed(x, group)
    x[-1] = 0


def gives_nan(x, group, codec) -> None:  # noqa: ARG001
    summed(x, group)
    x[0] = torch.nan


def differs_in_the_last_bit(x, group, codec) -> None:  # noqa: ARG001
    summed(x, group)
    if group.rank == 0:
        torch.nextafter(x[:1], x[:1] + 1, out=x[:1])


WRONG = [does_nothing, forgets_a_rank, swaps_two_values, loses_the_last_value, gives_nan, differs_in_the_last_bit]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("function", [correct, *WRONG], ids=lambda function: function.__name__)
@pytest.mark.parametrize("name", ["raw", "bf16"])
def test_check_finds_a_wrong_algorithm_and_no_fault_in_a_right_one(
    comm, shared_path, capsys, monkeypatch, function, name
):
    monkeypatch.setitem(operations.ALGORITHMS["allreduce"], "suspect", function)
    path = shared_path / "records.json"
    asked = options(algorithms=("suspect",), codecs=(name,), json=path)
    code = collective.run("allreduce", asked, comm, never)
    assert code == (function is not correct)
    if comm.rank == 0:
        said = capsys.readouterr().err
        assert ("--check: suspect" in said) == (function is not correct)
        errors = [record.rel_error for record in read_json(path)]
        assert len(errors) == len(asked.sizes)
        assert (None in errors) == (function is gives_nan)


@pytest.mark.parallel([2, 3])
def test_a_result_that_stays_in_memory_is_not_taken_for_the_next_one_s(comm, monkeypatch):
    """`out` is the same array for all ways: one that writes nothing must not pass with what the one before it wrote."""
    monkeypatch.setitem(operations.ALGORITHMS["allgather"], "idle", lambda *_: None)
    assert collective.run("allgather", options(algorithms=("native", "idle")), comm, never) == 1


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_check_knows_which_rank_s_values_belong_where(comm, monkeypatch, operation):
    """Right on another rank's behalf: as if ranks were numbered the other way round."""

    def turned(x, *rest):
        operations.ALGORITHMS[operation]["native"](x, *rest[:-2], backwards, rest[-1])

    backwards = group_of(comm.Split(0, -comm.rank))
    monkeypatch.setitem(operations.ALGORITHMS[operation], "turned", turned)
    monkeypatch.setattr(collective, "PROBE_VALUES", 60)  # chunks of one length, as it is the others' that are written
    code = collective.run(operation, options(algorithms=("turned",), sizes=(4800,)), comm, never)
    assert code == (operation != "allreduce")  # a sum is the same backwards


@pytest.mark.parallel([1, 2, 3])
def test_one_rank_that_is_asked_to_stop_ends_the_measurement_with_what_there_is(comm, shared_path):
    path, asked = shared_path / "records.json", []

    def stopping() -> bool:
        asked.append(1)
        return comm.rank == comm.size - 1 and len(asked) > 8

    asked_for = options(sizes=tuple(4 << k for k in range(18)), json=path, algorithms=("mpi", "native"))
    code = collective.run("allreduce", asked_for, comm, stopping)
    assert code == 0
    sizes = {record.bytes for record in read_json(path)} if comm.rank == 0 else {4}
    assert 1 <= len(sizes) < 18


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithms": ("rnig",)}, "'rnig' is unknown; valid for allreduce: mpi, native, auto"),
        ({"algorithms": ("mpi",), "codecs": ("bf16",)}, "nothing to measure: mpi bf16 left out"),
        ({"sizes": (1 << 45,)}, "GB a rank"),
        ({"device": "gpu"}, "sees none"),
    ],
)
def test_what_cannot_be_measured_is_refused_on_all_ranks(comm, capsys, changes, said):
    if "device" in changes and torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError) as refused:
        collective.run("allreduce", options(**changes), comm, never)
    assert said in str(refused.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("file", ["no such folder/x.json", "."])
def test_a_file_that_cannot_be_written_is_refused_on_all_ranks(comm, shared_path, file):
    with pytest.raises(ConfigError, match="cannot write"):
        collective.run("allreduce", options(json=shared_path / file), comm, never)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_arrays_in_shared_memory_are_given_back(comm, operation):
    arrays = Arrays(operation, 1000, torch.float32, group_of(comm), shared=True)
    places = [(array.data_ptr(), array.nbytes) for array in (arrays.x, arrays.out)]
    assert all(find_window(*place)[0] for place in places)
    arrays.free()
    assert not any(find_window(*place)[0] for place in places)


@pytest.mark.parallel([2, 3])
def test_arrays_in_shared_memory_are_measured(comm, shared_path):
    path = shared_path / "records.json"
    asked = options(memory="shared", algorithms=("native", "node_window"), json=path)
    assert collective.run("allreduce", asked, comm, never) == 0
    if comm.rank == 0:
        assert {record.memory for record in read_json(path)} == {"shared"}


@pytest.mark.parallel([1, 2, 3])
def test_p2p_measures_the_first_and_the_last_rank(comm, shared_path, capsys):
    path = shared_path / "records.json"
    asked = options(json=path, codecs=("raw", "bf16"))
    if comm.size == 1:
        with pytest.raises(ConfigError, match="mpirun -n 2"):
            p2p.run("p2p", asked, comm, never)
        return
    assert p2p.run("p2p", asked, comm, never) == 0
    assert f"rank 0 and rank {comm.size - 1}" in capsys.readouterr().out or comm.rank > 0
    if comm.rank == 0:
        records = read_json(path)
        assert {(r.algorithm, r.codec) for r in records} == {
            (algorithm, name) for algorithm in ("pingpong", "stream") for name in asked.codecs
        }
        assert all(r.algbw_gb_s == pytest.approx(r.bytes / r.median_s / 1e9) for r in records)
        assert all(r.rel_error == (0 if r.codec == "raw" else pytest.approx(1.7e-3, rel=0.9)) for r in records)


@pytest.mark.parallel([3])
def test_with_two_nodes_the_link_is_that_between_them(comm, shared_path):
    """Ranks 0 and 1 count as one node, rank 2 as another."""
    group = make_group(comm, comm.Split(comm.rank // 2))
    path = shared_path / "records.json"
    assert p2p._peers(group) == [(2, 2), (1, 1)]
    assert p2p.measure_link(group) > 0
    asked = options(json=path, algorithms=("mpi", "two_level"), sizes=(1 << 20,), bandwidth_gb_s=0.125)
    assert collective.run("allreduce", asked, group, never) == 0
    if comm.rank == 0:
        for r in read_json(path):
            assert (r.ranks, r.nodes) == (3, 2)
            assert r.bound_s == pytest.approx((1 << 20) / 0.125e9)  # once out of a node and once in
    assert p2p.run("p2p", options(json=path, sizes=(4096,)), group, never) == 0
    if comm.rank == 0:
        assert [(r.algorithm, r.nodes) for r in read_json(path)] == [
            *(("pingpong", 2), ("stream", 2)), *(("pingpong", 1), ("stream", 1)),
        ]  # fmt: skip


@pytest.mark.parallel([1, 2])
def test_codecs_are_measured_beside_a_copy(comm, shared_path):
    path, size = shared_path / "records.json", 1 << 16
    asked = options(json=path, codecs=("raw", "bf16"), sizes=(size,), check=False)
    torch.set_num_threads(3)
    assert codec.run("codec", asked, comm, never) == 0
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    if comm.rank > 0:
        return
    for r in read_json(path):
        written = size if r.algorithm == "memcpy" else size // 2
        assert r.moved_gb_s == pytest.approx((size + written) / r.median_s / 1e9)
        assert r.ratio == size / written
        if r.algorithm == "memcpy":
            assert r.memcpy_share == pytest.approx(1)


@pytest.mark.parametrize("n", [1, 255, 256, 100_003])
@pytest.mark.parametrize("name", ["bf16", "int8:256"])
def test_bytes_and_errors_of_a_codec_are_those_of_its_encoding(n, name):
    values, decoded, found = torch.empty(n), torch.zeros(n), find_codec(name, torch.float32)
    unroll(pattern(0, torch.float32), 0, values)
    memcpy, encode, decode = codec.make_jobs(values, decoded, [find_codec("raw", torch.float32), found])
    assert memcpy.moved_bytes == 2 * values.nbytes
    for job in (encode, decode):
        assert job.encoded_bytes == found.encoded_bytes(n)
        assert job.moved_bytes == values.nbytes + job.encoded_bytes
    decoded.zero_()
    encode.run()
    decode.run()
    assert float((decoded - values).norm() / values.norm()) == pytest.approx(decode.rel_error, rel=1e-3, abs=1e-9)
    memcpy.run()
    assert torch.equal(decoded, values)


@pytest.mark.parallel([2])
def test_the_sizes_of_the_file_are_those_of_the_command_line(comm, shared_path):
    path = shared_path / "records.json"
    collective.run("broadcast", options(json=path, algorithms=("mpi",)), comm, never)
    if comm.rank == 0:
        assert [row["bytes"] for row in json.loads(path.read_text())] == list(SMALL["sizes"])
        assert np.isfinite([row["median_s"] for row in json.loads(path.read_text())]).all()
