"""Reading: units cover every document once, damage is named, normal forms stay as they are."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections import Counter

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcllm.data.dedup import digest, split_key
from hpcllm.data.documents import DAMAGED, NOT_UTF8, TOO_LARGE, Document, Problem, TextRows, normalise, read_documents
from hpcllm.data.inputs import Unit, find_units, share
from hpcllm.errors import DataError

TEXTS = [f"line {i} " + "é" * (i % 50) + "." for i in range(400)]


COMPRESS = {"gz": gzip.compress, "zst": zstandard.compress, "bz2": bz2.compress, "xz": lzma.compress}


def jsonl(texts):
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def read(path, **more):
    return [item for unit in find_units([path], Counter()) for item in read_documents(unit, TextRows("text"), **more)]


def texts_of(items):
    return [item.text for item in items if isinstance(item, Document)]


def test_names_that_steer_terminals_are_escaped_and_circles_of_links_passed_over(tmp_path):
    name = b"new\nline\x1b[31m \xff.txt"
    with open(bytes(tmp_path) + b"/" + name, "wb") as file:
        file.write(b"\xff")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "up").symlink_to("..")
    [problem] = read(tmp_path)
    assert problem.origin.isprintable()
    assert r"new\nline\x1b[31m \xff.txt" in problem.origin


@given(st.text())
@example("\r\0\n\r\r\n x\u0000")
@example("e\u0301\u2000")
def test_normalising_twice_changes_nothing(text):
    once = normalise(text)
    assert normalise(once) == once
    assert "\0" not in once
    assert "\r\n" not in once
    assert once == once.rstrip()


def test_leading_indentation_stays():
    assert normalise("    x = 1\r\n\ty\r\n \r\n") == "    x = 1\n\ty"


@given(st.text(max_size=20), st.integers(0, 2**63 - 1))
def test_keys_depend_on_text_and_seed(text, seed):
    assert split_key(digest(text), seed) == split_key(digest(text), seed)
    assert split_key(digest(text), seed) != split_key(digest(text + "."), seed)
    assert split_key(digest(text), seed) != split_key(digest(text), (seed + 1) % 2**63)


@settings(deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=12),
    st.integers(1, 60),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
)
def test_ranges_of_a_jsonl_hold_each_line_once_and_in_order(tmp_path_factory, texts, range_bytes, line_end, ends):
    path = tmp_path_factory.mktemp("ranges") / "rows.jsonl"
    data = line_end.join(json.dumps({"text": f"{i}{text}"}).encode() for i, text in enumerate(texts))
    path.write_bytes(data + (line_end if ends and texts else b""))
    units = find_units([path], Counter(), range_bytes)
    items = [item for unit in units for item in read_documents(unit, TextRows("text"))]
    assert texts_of(items) == [normalise(f"{i}{text}") for i, text in enumerate(texts)]
    assert [item for item in items if isinstance(item, Problem)] == []
    assert sum(unit.size for unit in units) == path.stat().st_size


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_shares_are_contiguous_and_off_by_less_than_a_unit(sizes, ranks):
    units = [Unit(f"{i}", 0, size) for i, size in enumerate(sizes)]
    shares = share(units, ranks)
    assert [unit for part in shares for unit in part] == units
    fair = sum(size + 1 for size in sizes) / ranks
    assert all(sum(unit.size + 1 for unit in part) <= fair + max(sizes) + 1 for part in shares if part)


@pytest.mark.parametrize(("kind", "compress"), COMPRESS.items())
def test_of_a_compressed_file_cut_anywhere_a_prefix_is_kept_and_the_damage_named(tmp_path, kind, compress):
    whole = compress(jsonl(TEXTS[:200])) + compress(jsonl(TEXTS[200:]))
    path = tmp_path / f"rows.jsonl.{kind}"
    path.write_bytes(whole)
    assert texts_of(read(path)) == TEXTS
    seams = {0, len(compress(jsonl(TEXTS[:200])))}
    for cut in {1, 2, 9, len(whole) // 4, len(whole) // 2, *seams, len(whole) - 9, len(whole) - 1} - {0}:
        path.write_bytes(whole[:cut])
        items = read(path)
        kept = texts_of(items)
        assert kept == TEXTS[: len(kept)]
        assert [item.reason for item in items if isinstance(item, Problem)] == ([] if cut in seams else [DAMAGED])


@pytest.mark.parametrize(("kind", "compress"), COMPRESS.items())
def test_a_compressed_file_with_a_wrong_byte_never_raises(tmp_path, kind, compress):
    whole = bytearray(compress(jsonl(TEXTS)))
    path = tmp_path / f"rows.jsonl.{kind}"
    for place in range(0, len(whole), 7):
        whole[place] ^= 0x55
        path.write_bytes(whole)
        for item in read(path):
            assert isinstance(item, (Document, Problem))
        whole[place] ^= 0x55


@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "txt.zst", "txt.xz", "txt.bz2", "jsonl", "jsonl.zst"])
def test_what_is_too_large_is_dropped_before_it_fills_the_memory(tmp_path, suffix):
    data = jsonl(["x" * 5000, "small"])
    compress = COMPRESS.get(suffix.split(".")[-1], bytes)
    (tmp_path / f"big.{suffix}").write_bytes(compress(data))
    items = read(tmp_path / f"big.{suffix}", largest_bytes=2000)
    assert [item.reason for item in items if isinstance(item, Problem)] == [TOO_LARGE]
    assert texts_of(items) == (["small"] if "jsonl" in suffix else [])


@pytest.mark.parametrize("row", ['"' + "line\n" * 999 + '"', '"a\nb",' * 999 + "end"], ids=["one field", "many fields"])
def test_a_row_of_many_lines_is_too_large_however_short_each_is(tmp_path, row):
    (tmp_path / "big.csv").write_text(f"text,id\nsmall,1\n{row}\nlost,2\n")
    items = read(tmp_path / "big.csv", largest_bytes=2000)
    assert [item.reason for item in items if isinstance(item, Problem)] == [TOO_LARGE]
    assert texts_of(items) == ["small"]


@pytest.mark.parametrize(
    ("kind", "compressor"),
    [
        ("txt.zst", zstandard.ZstdCompressor(level=19).compressobj()),
        ("txt.bz2", bz2.BZ2Compressor(9)),
        ("json.xz", lzma.LZMACompressor()),
        ("csv.xz", lzma.LZMACompressor()),
    ],
)
def test_a_bomb_costs_no_memory(tmp_path, kind, compressor):
    import tracemalloc

    pieces = [b'["' if "json" in kind else b'text\n"', *[b"0" * 2**20] * (200 if "zst" in kind else 24)]
    bomb = b"".join(map(compressor.compress, pieces)) + compressor.flush()
    path = tmp_path / f"bomb.{kind}"
    path.write_bytes(bomb)
    tracemalloc.start()
    items = read(path, largest_bytes=2**20)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [item.reason for item in items] == [TOO_LARGE]
    assert len(bomb) < 2**17
    assert peak_bytes < 80 * 2**20


def test_windows_files_lose_their_mark_and_foreign_encodings_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello\r\n")
    (tmp_path / "b.txt").write_bytes("hello".encode("utf-16"))
    items = read(tmp_path)
    assert texts_of(items) == ["hello"]
    assert [item.reason for item in items[1:]] == [NOT_UTF8]


def test_without_inputs_the_standard_library_is_read():
    units = find_units([], Counter())
    assert 2e6 < sum(unit.size for unit in units) < 1e8
    assert [unit.path for unit in units] == list(dict.fromkeys(unit.path for unit in units))
    assert not any("/site-packages/" in unit.path or "/test/" in unit.path for unit in units)


def test_a_circle_of_links_ends(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "up").symlink_to(tmp_path)
    (tmp_path / "folder" / "a.txt").write_text("a")
    skipped = Counter()
    assert len(find_units([tmp_path], skipped)) == 1
    assert sum(skipped.values()) == 1
    (tmp_path / "folder" / "a.txt").unlink()
    with pytest.raises(DataError, match="nothing to read"):
        find_units([tmp_path], Counter())


ROWS = ["one", "two\nlines", 'a "quote", and a comma', "naïve 中文", "x" * 70_000, "\U0001f680" * 3]


def as_csv(texts, delimiter=","):
    out = io.StringIO()
    table = csv.writer(out, delimiter=delimiter)
    table.writerows([["id", "text"], *([i, text] for i, text in enumerate(texts))])
    return out.getvalue().encode()


def as_parquet(texts):
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    pyarrow.parquet.write_table(table, out, row_group_size=4)
    return out.getvalue()


TABLES = {
    "json": lambda texts: json.dumps([{"text": text} for text in texts], indent=1).encode(),
    "csv": as_csv,
    "tsv": lambda texts: as_csv(texts, "\t"),
    "parquet": as_parquet,
    "ndjson": jsonl,
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("compression", ["", *COMPRESS])
def test_a_row_of_a_table_is_a_document(tmp_path, kind, compression):
    if kind == "parquet" and compression:
        pytest.skip("Parquet compresses its columns itself")
    path = tmp_path / f"rows.{kind}{'.' if compression else ''}{compression}"
    path.write_bytes(COMPRESS.get(compression, bytes)(TABLES[kind](ROWS)))
    assert texts_of(read(path)) == ROWS


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_of_a_table_cut_anywhere_or_changed_a_prefix_is_kept_and_the_rest_named(tmp_path, kind):
    generator, whole = random.Random(1), TABLES[kind](TEXTS[:90])
    path = tmp_path / f"rows.{kind}"
    for trial in range(60):
        data = bytearray(whole)
        if trial % 2:
            del data[generator.randrange(1, len(data)) :]
        else:
            data[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(data)
        items = read(path)
        assert all(isinstance(item, (Document, Problem)) for item in items)
        kept = texts_of(items)
        if trial % 2 and kind != "csv":  # a CSV cut at the end of a row is one of fewer rows
            assert kept == TEXTS[: len(kept)]
            assert any(isinstance(item, Problem) for item in items)


@given(st.binary(max_size=60) | st.text(alphabet='[]{},:" \\\\utex1e-n\n').map(str.encode))
@settings(deadline=None)
def test_bytes_of_any_kind_are_read_or_named(tmp_path_factory, data):
    for kind in ("json", "csv", "tsv", "jsonl"):
        path = tmp_path_factory.getbasetemp() / f"any.{kind}"
        path.write_bytes(data)
        assert all(isinstance(item, (Document, Problem)) for item in read(path))


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.json", b'{"text": "x"} {"text": "y"}', "no JSON array"),
        ("a.json", b'[{"text": "x"}, 5]', "field missing"),
        ("a.json", b"[" * 100_000, "no JSON array"),
        ("a.csv", b"name,body\n1,2\n", "table without the field"),
        ("a.csv", b'text\nfine\n"open', "table that breaks off"),
        ("a.parquet", b"PAR1 no", "table that breaks off"),
    ],
)
def test_what_is_no_such_table_is_named(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    assert any(item.reason.startswith(reason) for item in read(tmp_path / name) if isinstance(item, Problem))


@pytest.mark.parametrize("name", ["a.bin", "a.docx", "a.txt.zip", "model.safetensors"])
def test_an_unknown_suffix_is_rejected_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"text")
    with pytest.raises(DataError, match=rf"{name}' has the unknown suffix '\..*valid: .*\.parquet.*\.xz"):
        find_units([tmp_path / name], Counter())


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(as_parquet(["x"]))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        find_units([tmp_path], Counter())
