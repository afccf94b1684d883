"""Which checkpoints of a run are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcllm.checkpoint.folder import DAMAGED, file_name, load_newest, newest_first, step_of
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.errors import CheckpointError, ConfigError


def fill(folder, write_alone, steps):
    return {step: write_alone(folder / file_name(step)) for step in steps}


def spoil(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("step", [0, 1, 1000, 99_999_999, 123_456_789_012])
def test_a_step_comes_back_from_its_name(tmp_path, step):
    assert step_of(tmp_path / file_name(step)) == step


@pytest.mark.parametrize(
    "name", ["step_1.h5", "step_00000001.h5.tmp-a-1-00000000", "xstep_00000001.h5", "step_00000001"]
)
def test_other_names_are_no_checkpoints(tmp_path, name):
    (tmp_path / name).touch()
    assert step_of(tmp_path / name) is None
    assert newest_first(tmp_path) == []


def found_in(folder: Path) -> tuple[Path | None, list[str]]:
    def load(checkpoint: Checkpoint) -> Path:
        for name in checkpoint.datasets:
            checkpoint.read_whole(name)
        return checkpoint.path

    return load_newest(folder, None, load)


def test_the_newest_is_by_step_and_not_by_time_or_letters(tmp_path, write_alone):
    paths = fill(tmp_path, write_alone, [100_000_000, 99_999_999, 5])
    assert found_in(tmp_path) == (paths[100_000_000], [])


def test_no_folder_and_no_checkpoint_are_no_error(tmp_path):
    assert found_in(tmp_path / "none") == (None, [])
    assert found_in(tmp_path) == (None, [])


def test_damaged_ones_are_passed_over_and_named(tmp_path, write_alone):
    paths = fill(tmp_path, write_alone, [1, 2, 3, 4])
    for step in (2, 4):
        spoil(paths[step])
    found, passed_over = found_in(tmp_path)
    assert found == paths[3]
    assert [line.split()[0] for line in passed_over] == [paths[4].name]
    assert not paths[4].exists()
    assert (tmp_path / f"{paths[4].name}{DAMAGED}").exists(), "it is not to count as one of the newest that stay"
    assert found_in(tmp_path) == (paths[3], [])


def test_nothing_begins_anew_where_no_checkpoint_is_sound(tmp_path, write_alone):
    paths = fill(tmp_path, write_alone, [1, 2, 3, 4])
    for path in paths.values():
        spoil(path)
    with pytest.raises(CheckpointError, match=r"none that can be loaded: step_00000004\.h5 .*and 1 more.* --restart"):
        found_in(tmp_path)
    assert all(path.exists() for path in paths.values())


def test_what_is_no_damage_ends_the_search(tmp_path, write_alone):
    paths = fill(tmp_path, write_alone, [1, 2])
    tried = []

    def load(checkpoint: Checkpoint) -> None:
        tried.append(checkpoint.path)
        raise ConfigError("another model")

    with pytest.raises(ConfigError, match="another model"):
        load_newest(tmp_path, None, load)
    assert tried == [paths[2]]


def test_damage_in_a_tensor_is_found_by_the_load_itself(tmp_path, write_alone):
    paths = fill(tmp_path, write_alone, [1, 2])
    with Checkpoint.open(paths[2]) as checkpoint, paths[2].open("r+b") as file:
        file.seek(checkpoint.datasets["model/bias"].offset)
        file.write(b"\xff" * 8)
    found, passed_over = found_in(tmp_path)
    assert found == paths[1]
    assert "step_00000002.h5 is passed over" in passed_over[0]
    assert "model/bias from (0,), shape (5,), has changed" in passed_over[0]
