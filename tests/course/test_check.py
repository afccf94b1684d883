"""Real checks of files: what a student may hand in, from right to hanging, ends in points and the right hint."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from hpcllm.cli.main import main

ROOT = Path(__file__).parents[2]
RIGHT = (ROOT / "course/latency/right/plain.py").read_text()
MARK = f"left behind by {os.getpid()}"


def instead(code: str) -> str:
    """The right file, but that one_way does this."""
    return f"{RIGHT}\n\ndef one_way(comm, size_bytes, rounds):\n    {code}\n"


LOOP = instead("while comm.rank >= 0: pass")
EVERYBODY_RECEIVES = instead(
    "return 0.0 if comm.size == 1 else comm.Recv(bytearray(size_bytes), source=(comm.rank + 1) % comm.size)"
)
ENDS_THE_PROCESS = instead("import os; os._exit(0)")
ASKS_FOR_MEMORY = instead("return [bytearray(1 << 28) for _ in range(100)]")
LEAVES_A_CHILD = f"""
import subprocess, sys
program = "import time; time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", program, "{MARK}"], start_new_session=True)
raise KeyError("mine")
"""


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """This process is none of the ranks of a job."""
    for name in [name for name in os.environ if name.startswith(("PMI_", "PMIX_", "OMPI_COMM_"))]:
        monkeypatch.delenv(name)


def check(tmp_path: Path, text: str, *words: str) -> tuple[int, dict]:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "latency.py").write_text(text)
    code = main(["course", "check", "--folder", str(folder), "--json", str(tmp_path / "grade.json"), *words])
    return code, json.loads((tmp_path / "grade.json").read_text())


def hint(grade: dict) -> str:
    return next((part["hint_key"] for part in grade["parts"] if part["hint_key"]), "")


@pytest.mark.timeout(300)
def test_a_right_file_gets_its_points_and_a_picture(tmp_path, capsys):
    code, grade = check(tmp_path, RIGHT, "--plot", str(tmp_path / "races.svg"))
    assert code == 0
    assert grade["laws_hold"]
    assert all(part["earned"] == part["points"] for part in grade["parts"] if part["stage"] == "predictions")
    assert all(part["rows"] for part in grade["parts"] if part["stage"] == "races")
    assert "yours" in (tmp_path / "races.svg").read_text()
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert grade["machine"]["sha256"]
    assert len(grade["code_sha256"]) == 64


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("text", "key"),
    [
        (EVERYBODY_RECEIVES, "deadlock"),
        (LOOP, "endless"),
        (ENDS_THE_PROCESS, "crash"),
        (ASKS_FOR_MEMORY, "memory"),
        ("one_way = 1", "missing"),
    ],
    ids=["deadlock", "endless", "crash", "memory", "missing"],
)
def test_whatever_a_file_does_the_check_ends_with_a_hint(text, key, tmp_path):
    code, grade = check(tmp_path, text)
    assert (code, hint(grade), grade["earned"]) == (1, key, 0)


@pytest.mark.timeout(300)
def test_grade_makes_a_table_and_leaves_no_process(tmp_path, monkeypatch, capsys):
    (tmp_path / "=one").mkdir()
    (tmp_path / "=one" / "latency.py").write_text(LEAVES_A_CHILD)
    monkeypatch.chdir(tmp_path)
    assert main(["course", "grade", "=one", "--csv", "grades.csv"]) == 0
    rows = list(csv.DictReader((tmp_path / "grades.csv").read_text().splitlines()))
    found = [(row["folder"], row["lab"], row["points"], row["hint"]) for row in rows]
    assert found == [("'=one", "latency", "0", "exception")]  # a spreadsheet takes no name for a formula
    assert "exception" in capsys.readouterr().out
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if MARK.encode() in read(path)]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("target", ["/dev/zero", "/proc/self/mem", "missing"])
def test_what_is_no_regular_file_is_no_file_of_a_lab(target, tmp_path, capsys):
    (tmp_path / "latency.py").symlink_to(target)
    assert main(["course", "check", "--folder", str(tmp_path)]) == 2
    assert "hpcllm: error" in capsys.readouterr().err
