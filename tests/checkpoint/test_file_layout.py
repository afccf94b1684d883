"""Lustre does not run here: an `lfs` that records what it was asked, and one that refuses, stand on PATH."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import whole
from hpcllm.checkpoint.writer import prepare, write
from hpcllm.config.schema import CheckpointConfig

RECORDS = """#!/bin/sh
printf '%s|' "$@" > "{log}"
for file; do :; done
[ ! -e "$file" ] || exit 17
: > "$file"
"""
REFUSES = """#!/bin/sh
echo "error on ioctl 0x4008669a for '$6' (3): Inappropriate ioctl for device" >&2
exit 25
"""


@pytest.fixture
def write_striped(tmp_path, monkeypatch):
    def function(lfs: str, settings: CheckpointConfig) -> str:
        """Writes a file with this `lfs` on PATH; returns the note."""
        tools = tmp_path / "a bin"
        tools.mkdir()
        if lfs:
            (tools / "lfs").write_text(lfs.format(log=tmp_path / "log") if "{log}" in lfs else lfs)
            (tools / "lfs").chmod(0o755)
        monkeypatch.setenv("PATH", str(tools))
        values = np.arange(5000, dtype="f4")
        slab = whole("w", (5000,))
        plan = prepare(None, {"w": DatasetSpec((5000,), "float32")}, [slab])
        report = write(tmp_path / "a folder" / "x.h5", None, plan, {slab: values}.__getitem__, {}, settings)
        with Checkpoint.open(report.path) as checkpoint:
            assert np.array_equal(checkpoint.read_whole("w"), values)
        assert os.listdir(tmp_path / "a folder") == ["x.h5"]
        return report.note

    return function


@pytest.mark.parametrize(("count", "mib"), [(8, 16), (-1, 4)])
def test_lfs_is_asked_for_the_file_before_it_is_there(tmp_path, write_striped, count, mib):
    assert write_striped(RECORDS, CheckpointConfig(stripe_count=count, stripe_mib=mib)) == ""
    *asked, file, end = (tmp_path / "log").read_text().split("|")
    assert asked == ["setstripe", "-c", str(count), "-S", f"{mib}M"]
    assert file.startswith(f"{tmp_path / 'a folder' / 'x.h5'}.tmp-")
    assert end == ""


def test_without_a_wish_lfs_is_not_asked(tmp_path, write_striped):
    assert write_striped(RECORDS, CheckpointConfig()) == ""
    assert not (tmp_path / "log").exists()


def test_where_it_cannot_be_the_file_is_written_and_a_note_says_why(write_striped):
    note = write_striped(REFUSES, CheckpointConfig(stripe_count=4))
    assert note.startswith("checkpoint.stripe_count = 4 has no effect: ")
    assert note.endswith("Inappropriate ioctl for device")


def test_where_there_is_no_lfs_the_file_is_written_and_a_note_says_so(write_striped):
    assert "there is no `lfs` on PATH" in write_striped("", CheckpointConfig(stripe_count=4))
