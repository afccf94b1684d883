"""Records travel through JSON unchanged, and become tables and pictures."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.errors import ConfigError, DataError
from hpcllm.perf.picture import draw
from hpcllm.perf.records import (
    TRANSFER,
    Record,
    columns_of,
    finite,
    markdown,
    read_json,
    seconds_text,
    table_head,
    table_row,
    to_json,
    write_json,
)

PROMISED = {
    *("operation", "algorithm", "codec", "dtype", "ranks", "nodes", "bytes", "median_s", "min_s", "max_s"),
    *("algbw_gb_s", "busbw_gb_s", "rel_error", "ratio", "library"),
}


def record(**changes) -> Record:
    values = {
        "operation": "allreduce", "algorithm": "ring", "codec": "raw", "dtype": "float32", "ranks": 2, "nodes": 1,
        "bytes": 4096, "median_s": 1e-4, "min_s": 9e-5, "max_s": 2e-4, "spread": 0.1, "iterations": 5,
        "algbw_gb_s": 0.04096, "busbw_gb_s": 0.04096, "rel_error": 0.0, "ratio": 1.0, "library": "MPI 4",
    }  # fmt: skip
    return Record(**(values | changes))


def several() -> list[Record]:
    sizes = [1 << k for k in range(10, 20)]
    names = [("mpi", "raw"), ("native", "raw"), ("ring", "raw"), ("two_step", "int8:256")]
    return [
        record(bytes=size, algorithm=name, codec=codec, library=library, bound_s=size / 4e9, link_gb_s=4.0)
        for size in sizes
        for name, codec in names
        for library in ("Open MPI 5", "MPICH 5")
    ]


def test_json_is_a_list_of_flat_records_with_the_promised_keys():
    rows = json.loads(to_json([record(), record(bound_s=1.0)]))
    assert len(rows) == 2
    for row in rows:
        assert set(row) >= PROMISED
        assert all(isinstance(value, str | int | float | None) for value in row.values())


@pytest.mark.parametrize("records", [[], [record()], several()], ids=["none", "one", "many"])
def test_what_is_written_is_read_back(tmp_path, records):
    path = tmp_path / "a folder" / "records.json"
    path.parent.mkdir()
    path.write_text("an older file")
    write_json(path, records)
    assert read_json(path) == records
    assert [file.name for file in path.parent.iterdir()] == ["records.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", "[{}]", "[" * 100_000, "\xff", json.dumps([dataclasses.asdict(record()) | {"bytes": "4096"}]),
     json.dumps([dataclasses.asdict(record()) | {"median_s": None}]),
     json.dumps([dataclasses.asdict(record()) | {"median_s": 0}]),
     to_json([record()]).replace("0.0001", "NaN")],
    ids=range(10),
)  # fmt: skip
def test_a_file_that_is_none_of_ours_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=re.escape("x.json")):
        read_json(path)


def test_keys_of_a_later_version_are_left_out(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([dataclasses.asdict(record()) | {"colour": "blue"}]))
    assert read_json(path) == [record()]


def test_what_is_not_finite_is_null():
    assert [finite(value) for value in (1.5, float("nan"), float("inf"))] == [1.5, None, None]


def test_columns_do_not_move_as_rows_come():
    lines = [table_head(TRANSFER), *(table_row(row, TRANSFER) for row in several())]
    lines.append(table_row(record(median_s=12.34, bytes=3, rel_error=None, algbw_gb_s=123.4, ratio=31.25), TRANSFER))
    places = {line.index(line.split()[1]) for line in lines}  # where the algorithm begins
    assert len(places) == 1
    end = lines[0].index("min") + 3
    assert all(line[end : end + 2].strip() == "" for line in lines[1:])


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(1.234e-7, "0.123 us"), (9.99e-4, "999 us"), (0.01, "10.0 ms"), (1.5, "1.50 s"), (700, "700 s")],
)
def test_times_have_three_digits_and_a_unit(value_s, text):
    assert seconds_text(value_s) == text


@given(
    operation=st.sampled_from(["allreduce", "codec"]),
    median_s=st.floats(1e-7, 1e5),
    slowest=st.floats(1, 1e6),
    size=st.sampled_from([1, 12, 1 << 20, 512 << 20, 64 << 30]),
    rate_gb_s=st.floats(1e-13, 1e5),
    bound=st.none() | st.floats(1e-9, 20),
    ratio=st.floats(0.01, 99),
)
def test_a_row_of_the_narrow_table_fits_in_80_columns(operation, median_s, slowest, size, rate_gb_s, bound, ratio):
    times = {"median_s": median_s, "min_s": median_s, "max_s": median_s * slowest, "spread": slowest - 1}
    rates = {"algbw_gb_s": rate_gb_s, "busbw_gb_s": rate_gb_s, "moved_gb_s": rate_gb_s}
    bounds = {"bound_s": bound and bound * median_s, "memcpy_share": bound}
    algorithm = "decode" if operation == "codec" else "recursive_doubling"
    names = {"operation": operation, "algorithm": algorithm, "codec": "int8:1024:sr"[:11], "ratio": ratio}
    one = record(**names, **times, **rates, **bounds, bytes=size)
    columns = columns_of(one, wide=False)
    assert len(table_row(one, columns)) <= 80
    assert len(table_head(columns)) <= 80


def test_markdown_has_one_table_for_each_run_and_one_row_for_each_record():
    records = [*several(), record(operation="codec", threads=2, moved_gb_s=5.0, memcpy_share=0.5)]
    text = markdown(records)
    assert len(re.findall(r"(?m)^### ", text)) == 3
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == len(records) + 2 * 3
    assert "Open MPI 5" in text
    assert "50 %" in text


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_one(tmp_path, ending):
    path = tmp_path / f"a picture.{ending}"
    draw([*several(), record(operation="codec", bound_s=None)], path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") if ending == "png" else b"<svg" in data
    if ending == "svg":
        assert b"two_step int8:256 MPICH 5" in data
    assert len(data) > 10_000


def test_no_records_are_no_picture(tmp_path):
    with pytest.raises(ConfigError, match="no records"):
        draw([], tmp_path / "x.png")
