"""`python -m hpcllm checkpoint`: what is named is found, what is damaged is listed, and exit codes say which."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal

import numpy as np
import pytest

from hpcllm.checkpoint import layout
from hpcllm.checkpoint.inspect import verify_file
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.cli import checkpoint as command
from hpcllm.cli.main import main
from hpcllm.system.job import SIZE_VARIABLES


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch):
    monkeypatch.setattr(layout, "BLOCK_BYTES", 160)
    for name in SIZE_VARIABLES:  # so that the command of a test is one process, whoever started the tests
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_folder(tmp_path, write_alone):
    """Two checkpoints, and what a killed writer left."""
    folder = tmp_path / "a run"
    for step in (1, 20):
        write_alone(folder / "checkpoints" / f"step_{step:08d}.h5")
    (folder / "checkpoints" / "step_00000030.h5.tmp-node-1-0123abcd").write_text("")
    return folder


def told(capsys, *arguments, code=0):
    """What a command prints, as JSON where asked for; and what it says beside."""
    assert main(["checkpoint", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    return (json.loads(out) if "--json" in arguments else out), err


def flip(path, *names) -> list[tuple[str, list[int]]]:
    """Damage the first and the last block of some datasets; returns where these blocks begin."""
    data, places = bytearray(path.read_bytes()), []
    with Checkpoint.open(path) as checkpoint:
        for name in names:
            stored = checkpoint.datasets[name]
            for index in {0, stored.spec.blocks - 1}:
                data[stored.extent(index)[0]] ^= 16
                places.append((name, list(stored.block(index).start)))
    path.write_bytes(data)
    return sorted(places)


@pytest.mark.parametrize("folder", [".", "checkpoints"])
def test_of_a_folder_the_newest_is_meant_and_said(run_folder, capsys, folder):
    found, said = told(capsys, "inspect", run_folder / folder, "--json")
    assert found["path"].endswith("step_00000020.h5")
    assert "its newest checkpoint is step_00000020.h5" in said
    assert [item["path"][-4:] for item in told(capsys, "verify", run_folder / folder, "--json")[0]] == ["0.h5"]
    assert len(told(capsys, "verify", run_folder / folder, "--all", "--json")[0]) == 2
    assert "the same" in told(capsys, "diff", run_folder, run_folder / "checkpoints" / "step_00000001.h5")[0]


def test_verify_lists_all_damage_of_all_files(run_folder, capsys, tmp_path, write_alone):
    damaged = run_folder / "checkpoints" / "step_00000020.h5"
    places = flip(damaged, "model/blocks.0.weight", "größe", "scalar")
    assert len(places) == 5
    cut = write_alone(tmp_path / "cut.h5")
    cut.write_bytes(cut.read_bytes()[:-1])
    (tmp_path / "no.h5").write_text("something else")
    paths = [run_folder, run_folder / "checkpoints" / "step_00000001.h5", cut, tmp_path / "no.h5"]
    reports, _ = told(capsys, "verify", *paths, "--json", code=1)
    assert [report["sound"] for report in reports] == [False, True, False, False]
    assert sorted((item["dataset"], item["start"]) for item in reports[0]["damage"]) == places
    assert "was cut" in reports[2]["fault"]
    text = " ".join(told(capsys, "verify", *paths, code=1)[0].split())
    assert text.count("DAMAGED") == 3
    assert text.count("has changed since it was written") == 5
    assert text.count("blocks are as they were written") == 1


def test_inspect_and_diff_of_damage_have_exit_code_1(run_folder, capsys):
    sound, damaged = (run_folder / "checkpoints" / f"step_{step:08d}.h5" for step in (1, 20))
    flip(damaged, "model/bias")
    assert "model/bias from" in told(capsys, "inspect", damaged, code=1)[0]
    assert "model/bias from" in told(capsys, "diff", sound, damaged, code=1)[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "was cut" in told(capsys, "inspect", damaged, code=1)[1]


def test_there_and_back_by_the_commands(run_folder, tmp_path, capsys):
    archives = tmp_path / "archives"
    archives.mkdir()
    report, _ = told(capsys, "compress", run_folder, archives, "--level", "3", "--json")
    assert report["target"] == str(archives / "step_00000020.h5")
    assert report["target_bytes"] == (archives / "step_00000020.h5").stat().st_size
    assert "stored in" in told(capsys, "inspect", archives)[0]
    assert "an archive" in told(capsys, "inspect", archives)[0]
    assert "ratio" in told(capsys, "decompress", archives, tmp_path / "back.h5")[0]
    assert (tmp_path / "back.h5").read_bytes() == (run_folder / "checkpoints" / "step_00000020.h5").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "nothing.h5"], "there is no checkpoint 'nothing.h5'"),
        (["verify", "{run}", "nothing.h5"], "there is no checkpoint 'nothing.h5'"),
        (["verify", "empty"], "empty has no checkpoint"),
        (["diff", "{run}", "{run}", "--tolerance", "nan"], "--tolerance: 'nan' is out of range"),
        (["compress", "{run}", "{run}/checkpoints"], "is there already"),
        (["compress", "{run}", "{run}/checkpoints/step_00000001.h5"], "is there already"),
        (["compress", "{run}", "new.h5", "--level", "20"], "--level: '20' is out of range"),
        (["decompress", "{run}", "new.h5"], "is no archive"),
    ],
)
def test_what_cannot_be_meant_is_one_line_with_exit_code_2(run_folder, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    out, err = told(capsys, *(argument.format(run=run_folder) for argument in arguments), code=2)
    assert said in err
    assert out == ""
    assert [line for line in err.splitlines() if line.startswith("hpcllm: error: ")] == err.splitlines()[-1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a run", "empty"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("packs", [True, False])
def test_a_signal_in_the_middle_leaves_nothing_half_written(run_folder, tmp_path, monkeypatch, number, code, packs):
    """Ctrl-C, and what `timeout` and batch systems send."""
    source = run_folder if packs else tmp_path / "archive.h5"
    main(["checkpoint", "compress", str(run_folder), str(tmp_path / "archive.h5")])
    before, handler, seen = sorted(tmp_path.iterdir()), signal.getsignal(number), []

    @contextlib.contextmanager
    def progress(*_):
        def advance(_):
            seen.extend(set(tmp_path.iterdir()) - set(before))
            os.kill(os.getpid(), number)

        yield advance

    monkeypatch.setattr(command, "_progress", progress)
    arguments = ["compress" if packs else "decompress", str(source), str(tmp_path / "new.h5")]
    try:
        ended = main(["checkpoint", *arguments])
    except SystemExit as left:
        ended = left.code
    assert ended == code
    assert seen  # it was in the middle
    assert sorted(tmp_path.iterdir()) == before
    assert signal.getsignal(number) == handler


@pytest.mark.parametrize("arguments", [["inspect", ""], ["diff", "", "x"], ["compress", "", "y"], ["verify", ""]])
def test_an_empty_name_is_not_the_current_folder(run_folder, monkeypatch, capsys, arguments):
    """As of an unset variable of a shell."""
    monkeypatch.chdir(run_folder)
    assert main(["checkpoint", *arguments]) == 2
    assert "an empty name" in capsys.readouterr().err


@pytest.mark.parallel([2, 3])
def test_ranks_find_the_same_damage_together(comm, shared_path, write_alone):
    path = shared_path / "x.h5"
    if comm.rank == 0:
        flip(write_alone(path), "model/blocks.0.weight", "größe")
        shutil.copy(path, shared_path / "alone.h5")
    comm.Barrier()
    read = []
    together = verify_file(path, comm, read.append)
    alone = verify_file(shared_path / "alone.h5", None, lambda _: None)
    key = [(item.dataset, item.start, item.offset, item.bytes) for item in together.damage]
    assert key == [(item.dataset, item.start, item.offset, item.bytes) for item in alone.damage]
    assert len(key) == 4
    each = np.array(comm.allgather(sum(read)))
    assert each.sum() == alone.bytes  # every block by one rank
    assert each.max() <= alone.bytes / comm.size + 160
