"""Compiled kernels are kept where only their user can write, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcllm.codecs import kernels
from hpcllm.codecs.kernels import cache_folder

PROGRAM = """
import numpy as np
from hpcllm.codecs.kernels import kernel

@kernel
def total(values):
    result = 0
    for value in values:
        result += value
    return result

print(total(np.arange(1000)))
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    folder = tmp_path / "node disk"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def own_folder(parent: Path) -> Path:
    """Where kernels would be kept."""
    folder = Path(cache_folder())
    assert folder.parent == parent
    return folder


def test_the_folder_is_this_users_alone(parent):
    assert own_folder(parent).stat().st_mode & 0o777 == 0o700
    assert own_folder(parent) == own_folder(parent)


def test_a_folder_that_others_can_write_to_is_not_used(parent):
    own_folder(parent).chmod(0o770)
    assert cache_folder() == ""


def test_a_symbolic_link_is_not_followed(parent, tmp_path):
    folder = own_folder(parent)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert cache_folder() == ""
    folder.unlink()
    folder.symlink_to(tmp_path / "nowhere")
    assert cache_folder() == ""


def test_a_parent_in_which_others_rename_folders_is_not_used(parent):
    own_folder(parent)
    parent.chmod(0o777)
    assert cache_folder() == ""
    parent.chmod(0o1777)  # sticky: as /tmp is
    assert cache_folder()


def test_a_file_a_missing_parent_and_a_full_disk_are_no_folder(parent, monkeypatch):
    folder = own_folder(parent)
    monkeypatch.setattr(kernels, "LEAST_FREE_BYTES", 1 << 62)
    assert cache_folder() == ""
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(parent))
    folder.rmdir()
    folder.touch()
    assert cache_folder() == ""
    monkeypatch.setenv("TMPDIR", str(parent / "missing"))
    assert cache_folder() == ""


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="users are Unix's")
def test_another_users_folder_is_not_used(parent, monkeypatch):
    folder = own_folder(parent)
    monkeypatch.setattr(kernels.os, "getuid", lambda: os.geteuid() + 1)
    folder.rename(parent / folder.name.replace(f"-{os.geteuid()}-", f"-{os.geteuid() + 1}-"))
    assert cache_folder() == ""


def start(program: Path, environment: dict[str, str]) -> subprocess.Popen:
    inherited = {key: value for key, value in os.environ.items() if key not in ("HOME", "NUMBA_CACHE_DIR", "TMPDIR")}
    return subprocess.Popen(
        [sys.executable, program],
        env=inherited | environment | {"PYTHONPATH": str(Path(kernels.__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full(reason="kernels compiled several times; a quarter of a minute")
def test_ranks_that_start_together_or_have_no_folder_get_the_same(parent):
    """Two at once into a new folder, one with nowhere to write, then one from what the first two left."""
    program, own = parent / "program.py", {"TMPDIR": str(parent)}
    program.write_text(PROGRAM)
    processes = [start(program, place) for place in (own, own, {"NUMBA_CACHE_DIR": str(program / "in a file")})]
    answers = [process.communicate(timeout=100) for process in processes]
    assert any(parent.rglob("*.nbc"))
    answers.append(start(program, own).communicate(timeout=100))
    assert [out.split() for out, _ in answers] == [["499500"]] * 4, answers


def test_16_bit_values_are_widened_and_rounded_as_torch_does():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    ties = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype="u4").view("f4")).clone()
    ties[::2].view(torch.int32).bitwise_and_(-0x1000)  # many lie half way between two values of 16 bits
    for dtype in (torch.bfloat16, torch.float16):
        values = bits.view(dtype)
        assert same(copy_wide(values), values.float())
        assert same(copy_narrow(ties, dtype), ties.to(dtype))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    nan = torch.isnan(other)
    return torch.equal(torch.isnan(one), nan) and torch.equal(one[~nan], other[~nan])


def copy_wide(values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(values.numel())
    widen(kernels.array_of(values), kernels.array_of(out))
    return out


def copy_narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(values.numel(), dtype=dtype)
    narrow(kernels.array_of(values), kernels.array_of(out))
    return out


@kernels.kernel
def widen(values, out):
    for i in range(values.size):
        out[i] = kernels.widened(values[i])


@kernels.kernel
def narrow(values, out):
    for i in range(values.size):
        out[i] = kernels.narrowed(values[i], out[i])
