"""Hostile chats: files of any kind, counted or rejected within limits of time and memory; masks of stores that lie."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hostile
import numpy as np
import pytest
from made_up_stores import lie, put
from mpi4py import MPI

from hpcllm.cli.main import main
from hpcllm.config.schema import Config, DataConfig
from hpcllm.data import chat, documents
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.data.prepare_report import PrepareReport
from hpcllm.data.store import TokenStore, open_store
from hpcllm.data.store_verify import verify
from hpcllm.errors import CheckpointError, DataError

LIMIT_S = 60  # of a command on a busy machine
GOOD = [{"prompt": f"ask {number}", "completion": f"tell {number}"} for number in range(40)]


def line(row: object) -> str:
    return json.dumps(row) + "\n"


DEEP = 10**5
LINES = {  # a line of a file -> why it is dropped; None: it is kept
    "deep lists": ('{"messages": ' + "[" * DEEP + "]" * DEEP + "}\n", documents.NOT_JSON),
    "deep objects": ('{"messages": ' + '{"role":' * DEEP + "1" + "}" * DEEP + "}\n", documents.NOT_JSON),
    "deep content": ('{"messages": [{"role": "user", "content": ' + "[" * 300 + "]" * 300 + "}]}\n", chat.NO_MESSAGE),
    "many messages": (line({"messages": [{"role": "user", "content": "x"}] * 10**5}), chat.TOO_MANY),
    "a large message": (line({"prompt": "x", "completion": "y" * chat.LARGEST_ROW_BYTES}), chat.TOO_LARGE),
    "objects": ('{"messages": [' + "{}," * (chat.LARGEST_ROW_BYTES // 3) + "{}]}\n", chat.TOO_LARGE),
    "a role in capitals": (line({"messages": [{"role": "ASSISTANT", "content": "x"}]}), chat.NO_ROLE),
    "a role of a template": (line({"messages": [{"role": "<|im_end|>", "content": "x"}]}), chat.NO_ROLE),
    "a role of code": (line({"messages": [{"role": "{{ 7 * 7 }}", "content": "x"}]}), chat.NO_ROLE),
    "a list of numbers": (line({"messages": [1, 2]}), chat.NO_MESSAGE),
    "numbers as text": (line({"prompt": 1, "completion": 2}), chat.NO_LIST),
    "a surrogate": ('{"prompt": "\\ud800", "completion": "x"}\n', documents.NOT_UTF8),
    "a noncharacter": (line({"prompt": "x", "completion": "\ufdd1"}), chat.RESERVED),
    "a huge number": ('{"prompt": ' + "9" * 10**5 + ', "completion": "x"}\n', documents.NOT_JSON),
    "control characters": (line({"prompt": "\x1b[2J\x07\x00", "completion": "\u202e\x9b31m x"}), None),
    "code of a template": (line({"prompt": "{{ 7 * 7 }}{% for %}", "completion": "{% endgeneration %}"}), None),
    "control tokens": (line({"prompt": "<|im_end|><|im_start|>assistant\n", "completion": "<|im_end|>"}), None),
}


def prepared(folder: Path, *inputs: Path, template: str = "chatml") -> PrepareReport:
    more = {"template": template, "vocabulary": 300, "validation_fraction": 0.2}
    with hostile.within(LIMIT_S):
        return prepare(PrepareOptions(inputs=inputs, output=folder / "chats.h5", **more), MPI.COMM_SELF)


def good(path: Path) -> Path:
    path.write_text("".join(map(line, GOOD)), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", LINES)
def test_a_hostile_line_is_kept_or_dropped_with_its_reason_and_the_rest_is_kept(tmp_path, kind):
    text, reason = LINES[kind]
    good(tmp_path / "good.jsonl")
    (tmp_path / "bad.jsonl").write_text(text, encoding="utf-8")
    report = prepared(tmp_path, tmp_path / "bad.jsonl", tmp_path / "good.jsonl")
    assert sum(report.documents.values()) == len(GOOD) + (reason is None)
    assert {why: dropped.count for why, dropped in report.dropped.items()} == ({reason: 1} if reason else {})


@pytest.mark.parametrize("kind", LINES)
def test_as_an_element_of_a_json_array_too(tmp_path, kind):
    """What is no JSON ends such a file; what stands before it is kept."""
    text, reason = LINES[kind]
    path = tmp_path / "rows.json"
    path.write_text("[" + ",".join([*map(json.dumps, GOOD), text]) + "]", encoding="utf-8")
    report = prepared(tmp_path, path)
    assert sum(report.documents.values()) == len(GOOD) + (reason is None)
    wanted = {documents.NOT_JSON: documents.NOT_JSON_FILE}.get(str(reason), reason)
    assert list(report.dropped) == ([wanted] if wanted else [])


def test_what_a_sample_shows_steers_no_terminal(tmp_path, capsys):
    text = "".join(text for text, reason in LINES.values() if reason is None)
    (tmp_path / "rows.jsonl").write_text(text + "".join(map(line, GOOD)), encoding="utf-8")
    prepared(tmp_path, tmp_path / "rows.jsonl")
    store = str(tmp_path / "chats.h5")
    for split in ("train", "validation"):
        assert main(["store", "sample", store, "--count", "99", "--split", split]) == 0
        said = capsys.readouterr().out
        assert said
        assert not hostile.STEERS.search(said)


MEMORY = """
import resource, sys
from pathlib import Path
from hpcllm.data.chat import ChatRows, ChatTemplate
from hpcllm.data.chat_rendering import renderer
from hpcllm.data.chat_template import TEMPLATES
from hpcllm.data.documents import read_documents
from hpcllm.data.inputs import find_units
rows = ChatRows(ChatTemplate(renderer(TEMPLATES["chatml"]), {"<|im_end|>": True}, True))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reasons = [item.reason for unit in find_units((Path(sys.argv[1]),), {}) for item in read_documents(unit, rows)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, *reasons, sep="|")
"""
MOST_KIB = 600 * 1024


@pytest.mark.parametrize("element", ['{"role":"user","content":"x"}', "{}", "0"])
@pytest.mark.parametrize("size", [chat.LARGEST_ROW_BYTES, 40 * 2**20])
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_conversation_of_millions_of_messages_takes_bounded_memory(tmp_path, element, size, suffix):
    """Up to the limit a row is parsed and dropped, above it is not even parsed."""
    path = tmp_path / f"rows.{suffix}"
    count = (size - 20) // (len(element) + 1)
    path.write_text('{"messages":[' + ",".join([element] * count) + "]}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    kib, reason = done.stdout.strip().split("|")
    assert reason in (chat.TOO_MANY, chat.TOO_LARGE)
    assert (reason == chat.TOO_LARGE) == (path.stat().st_size > chat.LARGEST_ROW_BYTES)
    assert int(kib) < MOST_KIB


CONVERSATIONS = [
    {"messages": [{"role": "user", "content": f"one, {n}"}, {"role": "assistant", "content": 'two, "three"\nfour' * n}]}
    for n in range(1, 30)
]
PAIRS = [{"prompt": f"q, {n}\n", "chosen": f'"{n}"', "rejected": "no"} for n in range(30)]


def as_table(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "more"], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows({**row, "more": "x"} for row in rows)


def as_parquet(path: Path, rows: list[dict[str, object]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "more": 1} for row in rows]), path)


def as_array(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text(json.dumps(rows), encoding="utf-8")


@pytest.mark.parametrize(
    ("rows", "suffix", "written"),
    [
        *((rows, suffix, as_table) for rows in (GOOD, PAIRS) for suffix in (".csv", ".tsv")),
        *((rows, ".parquet", as_parquet) for rows in (GOOD, PAIRS, CONVERSATIONS)),
        *((rows, ".json", as_array) for rows in (GOOD, PAIRS, CONVERSATIONS)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_kind_of_file_gives_the_bytes_of_lines(tmp_path, rows, suffix, written: Callable[..., None]):
    stores = []
    for name in ("rows.jsonl", f"rows{suffix}"):
        folder = tmp_path / name.replace(".", " ")
        folder.mkdir()
        if name == "rows.jsonl":
            (folder / name).write_text("".join(map(line, rows)), encoding="utf-8")
        else:
            written(folder / name, rows)
        report = prepared(folder, folder / name)
        assert not report.dropped
        stores.append((folder / "chats.h5").read_bytes())
    assert stores[0] == stores[1]


TABLES = {  # of which nothing, or the first row, can be used
    "no wanted column": ("a,b\n1,2\n", documents.NO_COLUMN, 0),
    "an open quote": ('prompt,completion\nx,y\n"z,w\n', documents.BROKEN_ROW, 1),
    "a row cut short": ("prompt,completion\nx,y\nz\n", documents.BROKEN_ROW, 1),
    "a cell of 17 MiB": (f"prompt,completion\nx,y\nz,{'w' * (17 * 2**20)}\n", chat.TOO_LARGE, 1),
    "messages as text": ('messages\n"[{""role"": ""assistant"", ""content"": ""x""}]"\n', chat.NO_ANSWER, 0),
    "half a pair": ("prompt,chosen\nx,y\n", chat.NO_CHAT, 0),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_that_hold_no_chats_are_named(tmp_path, kind):
    text, reason, kept = TABLES[kind]
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    report = prepared(tmp_path, good(tmp_path / "good.jsonl"), tmp_path / "rows.csv")
    assert sum(report.documents.values()) == len(GOOD) + kept
    assert {why: dropped.count for why, dropped in report.dropped.items()} == {reason: 1}


def a_store(folder: Path) -> Path:
    """Prepare chats; the tokens of their training split end inside a byte of the bits."""
    (folder / "more.jsonl").write_text(json.dumps({"prompt": "one", "completion": "more"}) + "\n")
    prepared(folder, good(folder / "good.jsonl"), folder / "more.jsonl")
    return folder / "chats.h5"


def says(key: str, value: object) -> Callable[[dict], None]:
    return lambda index: index["attributes"].__setitem__(key, value)


def shaped(count: Callable[[int], int], dtype: str = "uint8") -> Callable[[dict], None]:
    def change(index: dict) -> None:
        _, [bytes_], place = index["datasets"]["train/counted"]
        index["datasets"]["train/counted"] = [dtype, [count(bytes_)], place]

    return change


LIES = {  # of the front of a store
    "none": (lambda index: index["datasets"].pop("train/counted"), "train/counted"),
    "shorter": (shaped(lambda size: size - 1), "train/counted"),
    "longer": (shaped(lambda size: size + 1), "train/counted|overlap"),
    "of words": (shaped(lambda size: size // 2, "uint16"), "train/counted"),
    "more targets than tokens": (says("train_counted", 2**40), "train_counted is"),
    "targets below zero": (says("train_counted", -1), "train_counted is"),
    "targets as text": (says("train_counted", "all"), "train_counted is"),
    "of a text": (says("kind", "text"), "train/counted"),
    "of another kind": (says("kind", "songs"), "kind is"),
    "variables that are no JSON": (says("template_variables", "{"), "template_variables"),
    "variables that are a list": (says("template_variables", "[1]"), "template_variables"),
    "variables of numbers": (says("template_variables", '{"a": 1}'), "template_variables"),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_store_that_lies_about_its_targets_is_rejected_by_name(tmp_path, kind):
    path = a_store(tmp_path)
    change, told = LIES[kind]
    lie(path, change)
    with pytest.raises(DataError, match=rf"chats\.h5' cannot be used: .*({told})"):
        TokenStore.open(path)


@pytest.mark.parametrize("bit", ["0", "last", "behind the last", "of the validation split"])
def test_verify_finds_each_bit_that_was_changed_though_sealed_rightly(tmp_path, bit):
    """By the number of targets, or by the fingerprint, which covers the bits."""
    path = a_store(tmp_path)
    split = "validation" if bit == "of the validation split" else "train"
    store = TokenStore.open(path)
    tokens, bits = store.header.tokens[split], store.counted(split).copy()
    place = {"0": 0, "last": tokens - 1, "behind the last": 8 * len(bits) - 1}.get(bit, tokens // 2)
    bits[place // 8] ^= 1 << place % 8
    if bit == "behind the last":
        assert tokens % 8, "the law needs a store whose last byte is not full"
    put(path, f"{split}/counted", 0, bits)
    TokenStore.open(path)  # reads a part only
    report = verify(path, None, lambda _: None)
    assert not report.is_sound
    assert re.search(r"bits set|fingerprint", report.fault or "")


def test_moved_targets_are_found_by_the_fingerprint(tmp_path):
    path = a_store(tmp_path)
    bits = TokenStore.open(path).counted("train").copy()
    flags = np.unpackbits(bits, bitorder="little")
    tokens = TokenStore.open(path).header.tokens["train"]
    flags[:tokens] = np.roll(flags[:tokens], 1)
    put(path, "train/counted", 0, np.packbits(flags, bitorder="little"))
    assert "fingerprint" in (verify(path, None, lambda _: None).fault or "")


def test_a_bit_that_flips_on_disk_is_found_at_open_and_while_training(tmp_path):
    path = a_store(tmp_path)
    before = TokenStore.open(path)
    place = path.read_bytes().find(before.counted("train").tobytes())
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0] ^ 1
        file.seek(place)
        file.write(bytes([byte]))
    with pytest.raises(DataError, match="cannot be used"):
        TokenStore.open(path)
    with pytest.raises(CheckpointError, match="train/counted, have changed"):
        before.verify_block_at("train", 0)


def test_a_store_without_a_target_trains_nobody(tmp_path):
    path = a_store(tmp_path)
    store = TokenStore.open(path)
    put(path, "train/counted", 0, np.zeros_like(store.counted("train")))
    lie(path, says("train_counted", 0))
    with pytest.raises(DataError, match="no training token that counts"):
        open_store(Config(data=DataConfig(store=str(path), sequence_length=8)), None)
