"""Our header is the library's, byte for byte; a header that no library would write is refused, whatever is in it."""

from __future__ import annotations

import io
import json
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.checkpoint.huggingface.safetensors import lay_out, read_header
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.errors import HuggingFaceError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)
SPECS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
    st.builds(DatasetSpec, SHAPES, st.sampled_from(sorted(DTYPES))),
    min_size=1,
    max_size=6,
)


@given(SPECS)
def test_the_front_of_a_file_is_what_the_library_writes(specs):
    front, offsets = lay_out(specs)
    tensors = {name: torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for name, spec in specs.items()}
    theirs = safetensors.torch.save(tensors, metadata={"format": "pt"})
    assert theirs[: len(front)] == front
    assert len(theirs) == len(front) + sum(spec.bytes for spec in specs.values())
    entries = read_header(io.BytesIO(theirs), len(theirs))
    assert {name: entry.offset for name, entry in entries.items()} == offsets
    assert {name: (entry.shape, entry.bytes) for name, entry in entries.items()} == {
        name: (spec.shape, spec.bytes) for name, spec in specs.items()
    }


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**fields: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields}


GOOD = file_of(one(), bytes(8))
HOSTILE = {
    "nothing": (b"", "0 bytes"),
    "no header": (GOOD[:8], "header"),
    "a length beyond the file": (file_of(one(), bytes(8), 2**63), "header of 9223372036854775808 bytes"),
    "a length of all bits": (b"\xff" * 16, "header"),
    "not JSON": (file_of(b"{" * 40), "not JSON"),
    "nested without end": (file_of(b'{"a":' * 5000 + b"}" * 5000), "not JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not JSON"),
    "a list": (file_of([]), "a list"),
    "a name twice": (file_of(b'{"w":1,"w":2}'), "'w' is there twice"),
    "a tensor that is a number": (file_of({"w": 7}, bytes(8)), "'w' as 7"),
    "an unknown type": (file_of(one(dtype="F4096"), bytes(8)), "F4096"),
    "a type that is a list": (file_of(one(dtype=["F32"]), bytes(8)), "'w'"),
    "a shape below zero": (file_of(one(shape=[-2]), bytes(8)), "'w'"),
    "a shape of fractions": (file_of(one(shape=[2.0]), bytes(8)), "'w'"),
    "a shape of truths": (file_of(one(shape=[True, 2]), bytes(8)), "'w'"),
    "more dims than any": (file_of(one(shape=[1] * 5000 + [2]), bytes(8)), "'w'"),
    "a product beyond 64 bits": (file_of(one(shape=[2**62, 2**62]), bytes(8)), "'w'"),
    "offsets that go back": (file_of(one(data_offsets=[8, 0]), bytes(8)), "'w'"),
    "three offsets": (file_of(one(data_offsets=[0, 8, 8]), bytes(8)), "'w'"),
    "offsets of another size": (file_of(one(data_offsets=[0, 16]), bytes(16)), "'w' bytes 0 to 16"),
    "a tensor beyond the file": (file_of(one(data_offsets=[8, 16]), bytes(8)), "leaves 8 bytes"),
    "a file that was cut": (GOOD[:-1], "its tensors end at"),
    "a tail": (GOOD + b"x", "its tensors end at"),
    "two tensors in one place": (file_of(one() | {"v": one()["w"]}, bytes(8)), "overlaps"),
    "a hole": (file_of(one() | {"v": one(data_offsets=[12, 20])["w"]}, bytes(20)), "leaves 4 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_no_library_writes_is_refused_by_name(case):
    content, said = HOSTILE[case]
    with pytest.raises(HuggingFaceError, match=said):
        read_header(io.BytesIO(content), len(content))


@given(st.integers(0, len(GOOD) - 9), st.integers(0, 255))
def test_a_changed_byte_of_a_header_gives_the_tensor_or_a_refusal(at, byte):
    content = bytearray(GOOD)
    content[at] = byte
    try:
        entries = read_header(io.BytesIO(bytes(content)), len(content))
    except HuggingFaceError:
        return
    first = 8 + struct.unpack("<Q", content[:8])[0]
    assert all(first <= entry.offset and entry.offset + entry.bytes <= len(content) for entry in entries.values())


def test_a_good_file_is_read():
    assert np.prod(read_header(io.BytesIO(GOOD), len(GOOD))["w"].shape) == 2
