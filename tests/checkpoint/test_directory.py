"""Files made to harm: whatever stands in them, sealed rightly, they are refused by name or read as what they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from small_checkpoints import index_of, seal_as

from hpcllm.checkpoint.archive import compress
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.errors import CheckpointError

WEIGHT, BIAS = "model/blocks.0.weight", "model/bias"


def use(path: Path) -> dict[str, np.ndarray]:
    """Everything that can be read."""
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read_whole(name) for name in checkpoint.datasets}


def extents_of(path: Path) -> list[tuple[int, int]]:
    with Checkpoint.open(path) as checkpoint:
        return [(item.offset, item.spec.bytes) for item in checkpoint.datasets.values()]


def weight(dtype: Any = "float32", shape: Any = (37, 11), *place: Any) -> Callable[[dict], None]:
    """Says something else of a dataset; where no place is given it keeps its own."""

    def change(index: dict) -> None:
        index["datasets"][WEIGHT] = [dtype, list(shape) if isinstance(shape, tuple) else shape] + (
            list(place) or [index["datasets"][WEIGHT][2]]
        )

    return change


def renamed(name: str) -> Callable[[dict], None]:
    def change(index: dict) -> None:
        index["datasets"][name] = index["datasets"].pop(BIAS)

    return change


def put(key: str, value: Any) -> Callable[[dict], None]:
    def change(index: dict) -> None:
        index[key] = value

    return change


def inside(key: str, name: str, value: Any) -> Callable[[dict], None]:
    def change(index: dict) -> None:
        index[key][name] = value

    return change


def over_another(index: dict) -> None:
    index["datasets"][BIAS][2] = index["datasets"][WEIGHT][2] + 8


def over_its_checksums(index: dict) -> None:
    index["tables"]["checksums"] = index["datasets"][WEIGHT][2]


def dropped(key: str) -> Callable[[dict], None]:
    return lambda index: index.pop(key)


LIES: dict[str, tuple[Callable[[dict], Any], str]] = {
    "2^60 elements": (weight("float32", (1 << 60,)), "leave|no room|blocks"),
    "2^62 bytes of a type": (weight("float64", (1 << 30, 1 << 29)), "blocks"),
    "2^90 elements": (weight("float32", (1 << 30, 1 << 30, 1 << 30)), "fewer than 2\\^63 bytes"),
    "more rows than there are": (weight("float32", (38, 11)), "leave|overlap|damaged"),
    "40 dimensions": (weight("float32", (1,) * 40), "40 dimensions"),
    "no rows": (weight("float32", (0, 11)), "valid: 1 to"),
    "negative rows": (weight("float32", (-37, 11)), "valid: 1 to"),
    "a fraction of rows": (weight("float32", (37.0, 11)), "valid: 1 to"),
    "true rows": (weight("float32", (True, 11)), "valid: 1 to"),
    "a shape that is a number": (weight("float32", 407), "not a list"),
    "an unknown type": (weight("complex64"), "unknown type 'complex64'"),
    "a type that is a list": (weight(["float32"]), "not a str"),
    "before the file": (weight("float32", (37, 11), -8), "valid: 0 to"),
    "in the front": (weight("float32", (37, 11), 100), "overlap another one or leave"),
    "after the end": (weight("float32", (37, 11), 1 << 40), "overlap another one or leave"),
    "at 2^64": (weight("float32", (37, 11), 1 << 64), "valid: 0 to"),
    "at a text": (weight("float32", (37, 11), "8192"), "valid: 0 to"),
    "two places": (weight("float32", (37, 11), 8192, 8192), "dimensions|damaged"),
    "over another one": (over_another, "overlap another one"),
    "over its checksums": (over_its_checksums, "overlap another one"),
    "a name that climbs": (renamed("model/../../etc"), "cannot name a dataset"),
    "a name from the root": (renamed("/model"), "cannot name a dataset"),
    "no name": (renamed(""), "cannot name a dataset"),
    "a name for a terminal": (renamed("model/\x1b[2J"), "cannot name a dataset"),
    "half a character": (renamed("model/\ud800"), "cannot name a dataset"),
    "a long name": (renamed("n" * 1100), "cannot name a dataset"),
    "the name of a table": (renamed("checksums"), "cannot name a dataset"),
    "another name": (renamed("z"), "has changed"),  # the checksums are in the order of names
    "no place": (lambda index: index["datasets"][BIAS].pop(), "where it lies"),
    "an entry that is no list": (inside("datasets", BIAS, {"shape": [5]}), "not a list"),
    "an empty entry": (inside("datasets", BIAS, []), "damaged"),
    "datasets in a list": (put("datasets", []), "not a dict"),
    "no datasets": (dropped("datasets"), "KeyError"),
    "no tables": (dropped("tables"), "KeyError"),
    "no attributes": (dropped("attributes"), "KeyError"),
    "no checksums": (put("tables", {}), "has the tables"),
    "a table of its own": (inside("tables", "pickle", 4096), "has the tables"),
    "checksums after the end": (inside("tables", "checksums", 1 << 50), "begins at"),
    "checksums before the file": (inside("tables", "checksums", -8), "valid: 0 to"),
    "an archive that is none": (inside("tables", "packed", 4096), "where it lies|overlap"),
    "another size": (lambda index: index.update(file_bytes=index["file_bytes"] + 1), "cut or added to"),
    "a size of a text": (put("file_bytes", "all"), "valid: 0 to"),
    "an attribute that is a list": (inside("attributes", "run/step", [1]), "attribute 'run/step' is a list"),
    "an attribute that is null": (inside("attributes", "run/step", None), "is a NoneType"),
    "half a character in an attribute": (inside("attributes", "note", "\udc00"), "cannot be written as text"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused_with_the_reason(tmp_path, write_alone, lie):
    change, message = LIES[lie]
    path = write_alone(tmp_path / "x.h5")
    index, extents = index_of(path), extents_of(path)
    change(index)
    seal_as(path, json.dumps(index).encode(), extents)
    with pytest.raises(CheckpointError, match=message) as caught:
        use(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


ROWS: dict[str, tuple[tuple[int, int], str]] = {
    "after the end": ((1 << 40, 10), "overlap another one or leave"),
    "at the end of all numbers": ((2**64 - 8, 16), "overlap another one or leave"),
    "as long as all numbers": ((4096, 2**64 - 1), "overlap another one or leave"),
    "in the front": ((8, 10), "overlap another one or leave"),
    "over another one": ((-1, 10), "overlap another one"),
    "empty": ((0, 0), "has changed"),
    "as long as the file": ((4096, 20000), "overlap another one|is packed into"),
}


@pytest.mark.parametrize("lie", ROWS)
def test_a_table_of_packed_blocks_that_lies_is_refused(tmp_path, write_alone, lie):
    (offset, length), message = ROWS[lie]
    path = tmp_path / "x.h5"
    compress(write_alone(tmp_path / "plain.h5"), path, None)
    with Checkpoint.open(path) as checkpoint:
        rows = np.concatenate([item.packed for item in checkpoint.datasets.values()])
    index, content = index_of(path), bytearray(path.read_bytes())
    first_row = rows[0].copy()
    rows[0, :2] = (rows[1, 0] + 1 if offset < 0 else offset or first_row[0]), length
    place = index["tables"]["packed"]
    content[place : place + rows.nbytes] = rows.tobytes()
    path.write_bytes(content)
    seal_as(path, json.dumps(index).encode(), [(int(a), int(n)) for a, n, _ in rows])
    with pytest.raises(CheckpointError, match=message):
        use(path)


def test_a_block_in_place_of_another_is_refused(tmp_path, write_alone):
    path = tmp_path / "x.h5"
    compress(write_alone(tmp_path / "plain.h5"), path, None)
    index, content = index_of(path), bytearray(path.read_bytes())
    place = index["tables"]["packed"]
    content[place : place + 24], content[place + 24 : place + 48] = (
        content[place + 24 : place + 48],
        content[place : place + 24],
    )
    path.write_bytes(content)
    rows = np.frombuffer(content[place : place + 24 * len(index["datasets"])], "<u8").reshape(-1, 3)
    seal_as(path, json.dumps(index).encode(), [(int(a), int(n)) for a, n, _ in rows])
    with pytest.raises(CheckpointError, match=r"does not unpack|unpacks to|is packed into"):
        use(path)


TEXTS = {
    "nothing": b"",
    "no JSON": b"\x00\xff\xfe",
    "a number": b"1",
    "a number without an end": b'{"file_bytes":' + b"9" * 3000 + b"}",
    "nested without an end": b'{"datasets":' + b"[" * 3500,
    "not a number": b'{"file_bytes":NaN,"datasets":{},"tables":{"checksums":4096},"attributes":{}}',
    "a comment": b'{"file_bytes":/**/1}',
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_no_index_is_refused(tmp_path, write_alone, text):
    path = write_alone(tmp_path / "x.h5")
    seal_as(path, TEXTS[text], [])
    with pytest.raises(CheckpointError, match=r"x\.h5: its index is damaged"):
        use(path)


def test_the_largest_index_there_can_be_is_parsed_in_little_time(tmp_path, write_alone):
    """16 MiB of whatever costs most to parse: empty lists."""
    path, front = write_alone(tmp_path / "x.h5"), 1 << 24
    path.write_bytes(path.read_bytes().ljust(front + 8, b"\0"))
    seal_as(path, b'{"datasets":[' + b"[]," * ((front - 200) // 3) + b"0]}", [], front)
    assert refused_in_s(path, "KeyError|not a dict") < 20


def head(front: int) -> bytes:
    return b"hpcllm file 3: index of %08d bytes, xxh3 0123456789abcdef\n" % front


@pytest.mark.parametrize(
    "content",
    [b"", b"\x89HDF\r\n\x1a\n", head(4096), head(1), head(1 << 25), head(4096)[:-1] * 9, b"hpcllm checkpoint 1: " * 9],
)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "x.h5").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.h5"):
        use(tmp_path / "x.h5")


def test_plain_hdf5_is_refused(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.zeros(3)
    with pytest.raises(CheckpointError, match=r"x\.h5: is no file of ours, or not a complete one"):
        use(tmp_path / "x.h5")


def test_only_regular_files_are_opened(tmp_path, write_alone):
    os.mkfifo(tmp_path / "pipe.h5")
    (tmp_path / "zero.h5").symlink_to("/dev/zero")
    (tmp_path / "loop.h5").symlink_to(tmp_path / "loop.h5")
    (tmp_path / "gone.h5").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.h5").mkdir()
    for name in ("pipe.h5", "zero.h5", "loop.h5", "gone.h5", "folder.h5"):
        with pytest.raises(CheckpointError, match=f"cannot read .*{name}"):
            use(tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot read"):
        use(tmp_path / "a\0b.h5")
    (tmp_path / "elsewhere.h5").symlink_to(write_alone(tmp_path / "x.h5"))
    assert use(tmp_path / "elsewhere.h5").keys() == use(tmp_path / "x.h5").keys()


def test_a_file_without_an_end_is_refused_at_once(tmp_path, write_alone):
    """2^43 bytes that take no room: of tables, of a tensor whose checksums are in its way, of one whose are not."""
    path = write_alone(tmp_path / "x.h5")
    index = index_of(path) | {"file_bytes": 1 << 43}
    os.truncate(path, 1 << 43)
    write_front(path, index)
    assert refused_in_s(path, "bytes that are no tensor's") < 20
    index["datasets"]["z"] = ["uint8", [(1 << 43) - (1 << 30)], 1 << 30]
    index["tables"]["checksums"] = 1 << 31
    write_front(path, index)
    assert refused_in_s(path, "overlap another one") < 20
    index["tables"]["checksums"] = 1 << 20
    write_front(path, index)
    assert refused_in_s(path, "bytes that are no tensor's") < 20


def write_front(path: Path, index: dict) -> None:
    with path.open("r+b") as file:
        file.write((head(4096) + json.dumps(index).encode()).ljust(4096, b"\0"))


def test_what_takes_the_name_of_an_open_file_is_not_read(tmp_path, write_alone, tensors):
    path = write_alone(tmp_path / "x.h5")
    with Checkpoint.open(path) as checkpoint:
        other = tmp_path / "other.h5"
        other.write_bytes(bytes(path.stat().st_size))
        other.replace(path)
        for name, tensor in tensors.items():
            assert checkpoint.read_whole(name).tobytes() == tensor.tobytes()


def test_hdf5_tables_are_never_parsed(tmp_path, write_alone, tensors):
    """Random bytes in their place, sealed: the library that could choke on them is not asked, nor even loaded."""
    path, rng = write_alone(tmp_path / "x.h5"), np.random.default_rng(3)
    index, extents, before = index_of(path), extents_of(path), path.read_bytes()
    kept = [(0, 4096), (index["tables"]["checksums"], 8 * len(index["datasets"])), *extents]
    for _ in range(50):
        spoiled = bytearray(rng.integers(0, 256, len(before), dtype=np.uint8).tobytes())
        for offset, length in kept:
            spoiled[offset : offset + length] = before[offset : offset + length]
        path.write_bytes(spoiled)
        seal_as(path, json.dumps(index).encode(), extents)
        for name, found in use(path).items():
            assert found.tobytes() == tensors[name].tobytes()
    assert "h5py" not in said_by(path, "verify(); print(*sys.modules)").split()


FUZZ = """
import json, random
from small_checkpoints import index_of, seal_as
ODD = [0, 1, -1, 2**31, 2**60, 2**63 - 1, 2**63, 2**64, 0.5, 1e308, None, True, "", "x", [], {}, [[]], [1, 2], "packed"]
index, extents, whole = index_of(path), [(0, 0)], path.read_bytes()
with Checkpoint.open(path) as checkpoint:
    extents = [(item.offset, item.spec.bytes) for item in checkpoint.datasets.values()]
rng, refused = random.Random(7), 0


def places(value):
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


for number in range(COUNT):
    path.write_bytes(whole)
    text = json.dumps(index)
    if number % 2:
        changed = json.loads(text)
        for _ in range(rng.choice([1, 1, 2, 3])):
            holder, key = rng.choice(list(places(changed)))
            action = rng.randrange(4)
            if action == 0:
                holder[key] = rng.choice(ODD)
            elif action == 1 and isinstance(holder[key], int):
                holder[key] += rng.choice([-8, -1, 1, 4, 4096])
            elif action == 2:
                del holder[key]
            elif isinstance(holder, dict):
                holder[rng.choice(["a", "a/b", "packed", key + "x"])] = holder[key]
        text = json.dumps(changed)
    else:
        letters = list(text)
        for _ in range(rng.choice([1, 2, 5])):
            letters[rng.randrange(len(letters))] = rng.choice('[]{},:"0123456789-eE.\\\\ntfu\\x00')
        text = "".join(letters)
    seal_as(path, text.encode("utf-8", "surrogatepass"), extents)
    try:
        verify()
    except CheckpointError:
        refused += 1
print("refused", refused)
"""


def test_no_index_crashes_or_hangs_a_process_of_little_memory(tmp_path, write_alone):
    path = write_alone(tmp_path / "x.h5")
    refused = int(said_by(path, FUZZ.replace("COUNT", "1500")).split()[-1])
    assert 1000 < refused < 1500  # the others only named an attribute otherwise, or changed nothing


PROGRAM = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.errors import CheckpointError

path = Path(sys.argv[1])


def verify():
    with Checkpoint.open(path) as checkpoint:
        for name in checkpoint.datasets:
            checkpoint.read_whole(name)


"""


def refused_in_s(path: Path, message: str) -> float:
    """Seconds that such a process took to refuse a file, with that reason."""
    program = """
    import time
    began_s = time.monotonic()
    try:
        verify()
    except CheckpointError as error:
        print(time.monotonic() - began_s, error)
    """
    seconds, reason = said_by(path, program).split(" ", 1)
    assert re.search(message, reason)
    return float(seconds)


def said_by(path: Path, program: str) -> str:
    """What a program says that looks at a file in a process of its own, with limits."""
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(program), str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout
