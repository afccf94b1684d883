"""Whatever a file does, and whoever ends a check in the middle: a hint within limits, and nothing is left behind."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcllm.course import processes, runner
from hpcllm.course.catalogue import LABS
from hpcllm.course.lab import LawError
from hpcllm.course.processes import descendants, remove_shared
from hpcllm.course.untouched import Untouched
from tests.course.hostile_files import HOSTILE, RIGHT, at_load, in_function

ROOT = Path(__file__).parents[2]
CHECK = [sys.executable, "-m", "hpcllm.course", "check", "--json"]
SHORT_LOADING = "from hpcllm.course import runner, __main__; runner.LOAD_S = 8.0; raise SystemExit(__main__.main())"
STARTS_S = 60.0
ENDS_S = 20.0  # for a check that was told to end


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """No job's, with a place for temporary files of its own, and a mark by which its processes are found."""
    scratch = tmp_path / "t"
    scratch.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_", "OMPI_COMM_", "SLURM_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), "COURSE_MARK": str(tmp_path), **more}


def left_behind(tmp_path: Path) -> list[str]:
    """Processes that were started with the mark, and temporary files but those of `import mpi4py.MPI` with Open MPI."""
    mark = f"COURSE_MARK={tmp_path}\0".encode()
    found = [str(path) for path in (tmp_path / "t").iterdir() if not path.name.startswith("ompi.vm.")]
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                found.append((path.parent / "cmdline").read_text())
        except OSError:
            continue
    return found


def folder_with(tmp_path: Path, data: bytes) -> Path:
    folder = tmp_path / "my lab"
    folder.mkdir()
    (folder / "latency.py").write_bytes(data)
    return folder


def hint(text: str) -> str:
    """The first hint but that of the race, which a right file can lose on a busy machine."""
    parts = [part for part in json.loads(text)["parts"] if part["stage"] != "races"]
    return next((part["hint_key"] for part in parts if part["hint_key"]), "")


LONG = pytest.mark.full(reason="ends by a limit of time; one of them is in test_check.py")
CASES = [
    pytest.param(name, marks=LONG if set(hints) & {"endless", "deadlock"} else ())
    for name, (_, hints) in HOSTILE.items()
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", CASES)
def test_whatever_a_file_does_ends_in_a_hint_and_leaves_nothing(name, tmp_path):
    data, hints = HOSTILE[name]
    folder = folder_with(tmp_path, data)
    words = [sys.executable, "-c", SHORT_LOADING, *CHECK[3:], "--folder", str(folder)]
    done = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True)
    assert hint(done.stdout) in hints
    assert not left_behind(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["latency.py"]


@pytest.fixture
def hanging(tmp_path) -> Iterator[subprocess.Popen[str]]:
    """A check in the middle of a file that ignores signals."""
    data, _ = HOSTILE["ignores signals"]
    words = [*CHECK, "--folder", str(folder_with(tmp_path, data))]
    process = subprocess.Popen(
        words, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + STARTS_S
    while not list((tmp_path / "t").glob("*/rank_3.jsonl")) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(0.5)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGINT] * 3, [signal.SIGTERM], [signal.SIGHUP]], ids=str)
def test_a_check_that_is_told_to_end_leaves_nothing(numbers, hanging, tmp_path):
    assert len(descendants(hanging.pid)) >= runner.RANKS
    for number in numbers:
        hanging.send_signal(number)
        time.sleep(0.1)
    hanging.wait(ENDS_S)
    assert hanging.returncode in (128 + numbers[0], -numbers[0])  # Python's own end by a second Ctrl-C
    assert not left_behind(tmp_path)


@pytest.mark.timeout(200)
def test_the_processes_of_a_check_that_was_killed_end_too(hanging, tmp_path):
    hanging.kill()
    hanging.wait(ENDS_S)
    deadline_s = time.monotonic() + ENDS_S
    while len(left_behind(tmp_path)) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert len(left_behind(tmp_path)) == 1, "the folder: nobody was there to remove it"


@pytest.mark.timeout(200)
def test_a_check_needs_neither_home_nor_terminal_nor_input(tmp_path):
    surroundings = environment(tmp_path)
    for name in ("HOME", "TERM", "USER", "LOGNAME", "LANG"):
        surroundings.pop(name, None)
    words = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *CHECK, "--folder", str(folder_with(tmp_path, RIGHT.encode()))]
    done = subprocess.run(words, env=surroundings, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert (done.returncode, hint(done.stdout)) == (0, "")


@pytest.mark.timeout(300)
def test_a_class_with_broken_folders_is_one_table(tmp_path):
    right, raises = RIGHT.encode(), in_function("raise KeyError")
    files = [right, raises, b"", b"\xff", at_load("1 / 0"), HOSTILE["kill -9"][0], HOSTILE["Abort"][0], right]
    for number, data in enumerate(files):
        (tmp_path / f"student {number}").mkdir()
        (tmp_path / f"student {number}" / "latency.py").write_bytes(data)
    (tmp_path / "student 8" / "latency.py").mkdir(parents=True)
    (tmp_path / "student 9").mkdir()
    (tmp_path / "student 10").write_bytes(b"a file")
    words = [*CHECK[:3], "grade", *(f"student {number}" for number in range(12)), "--csv", "g.csv", "--json", "g.json"]
    done = subprocess.run(words, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    rows = list(csv.DictReader((tmp_path / "g.csv").read_text().splitlines()))
    facts = json.loads((tmp_path / "g.json").read_text())
    assert [row["folder"] for row in rows] == [fact["folder"] for fact in facts] == words[4:16]
    assert [row["lab"] for row in rows] == ["latency"] * 8 + ["none"] * 4
    assert [row["hint"].replace("clock", "") for row in rows[:8]] == [  # clock: the race, on a busy machine
        "",
        "exception",
        "missing",
        *["exception"] * 2,
        "crash",
        "not_yours",
        "",
    ]
    assert all("error" in fact and fact["earned"] == 0 for fact in facts[8:])
    assert all(f"student {number}" in done.stdout for number in range(12))
    assert not left_behind(tmp_path)


def test_a_replaced_function_is_found_and_named(monkeypatch):
    untouched = Untouched()
    untouched.check()
    monkeypatch.setattr(time, "perf_counter", time.monotonic)
    with pytest.raises(LawError, match=r"time\.perf_counter"):
        untouched.check()


@pytest.mark.timeout(200)
def test_the_memory_that_killed_ranks_share_is_removed(tmp_path, monkeypatch):
    noted: set[str] = set()

    def noting(paths: set[str]) -> None:
        noted.update(paths)
        remove_shared(paths)

    monkeypatch.setattr(processes, "remove_shared", noting)
    folder = folder_with(tmp_path, HOSTILE["kill -9"][0])
    outcome = runner.run_check(LABS["latency"], folder / "latency.py", "seed", lambda _: None)
    assert outcome.fault is not None
    assert outcome.fault["hint"] == "crash"
    assert noted
    assert not [path for path in noted if Path(path).exists()]
