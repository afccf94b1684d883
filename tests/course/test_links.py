"""Links of the course: rates are kept, nothing stays behind, and a machine that cannot make links says so."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from hpcllm.cli.main import main
from hpcllm.course import links
from hpcllm.course.links import NAMESPACES, SLEEPS, OnLink, bytes_per_s, crossing

RIGHT = Path(__file__).parents[2] / "course/codec/right/plain.py"
CAN_MAKE_LINKS = subprocess.run(["sh", str(links.SCRIPT), "probe"], capture_output=True).returncode == 0


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """This process is none of the ranks of a job, nor in one of Slurm."""
    for name in [name for name in os.environ if name.startswith(("PMI_", "PMIX_", "OMPI_COMM_", "SLURM_"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("text", "value"), [("100mbit", 12.5e6), ("2.5gbit", 312.5e6), ("800kbit", 1e5)])
def test_rates_are_bits_a_second(text, value):
    assert bytes_per_s(text) == value


@pytest.mark.parametrize("text", ["", "100", "mbit", "-1mbit", "0mbit", "1e3mbit", "100mbit,fast"])
def test_other_rates_are_rejected_with_what_would_be_valid(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["course", "links", f"--rates={text}"]) == 2
    assert "valid:" in capsys.readouterr().err


def rows(*gains: float) -> list[OnLink]:
    return [OnLink(str(k), 10.0 ** (6 + k), gain, 1.0, 1.0) for k, gain in enumerate(gains)]


def test_the_crossing_is_where_the_gain_falls_to_one():
    assert crossing(rows(4, 2, 0.5)) == pytest.approx(10**7.5)
    assert crossing(rows(4, 2, 1.01)) == math.inf
    assert crossing(rows(0.9, 0.5)) == 0
    assert crossing(list(reversed(rows(3, 1.5, 1 / 1.5)))) == pytest.approx(10**7.5)


def measured(tmp_path: Path, rate: str) -> dict:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "codec.py").write_text(RIGHT.read_text())
    output = tmp_path / "links.json"
    assert main(["course", "links", "--folder", str(folder), "--rates", rate, "--json", str(output)]) == 0
    return dict(json.loads(output.read_text()))


@pytest.mark.timeout(300)
@pytest.mark.skipif(not CAN_MAKE_LINKS, reason="no network namespaces here, neither by root nor by users")
def test_sums_on_slow_links_take_as_long_as_their_bytes_and_encoded_ones_pay(tmp_path, capsys):
    found = measured(tmp_path, "80mbit")
    assert found["links"] == NAMESPACES
    (row,) = found["rows"]
    wire_s = 2 * 3 / 4 * (4 << 20) / 10e6
    assert 0.9 * wire_s < row["plain_s"]
    assert row["ours_s"] < row["plain_s"] / 2
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.timeout(300)
def test_without_namespaces_ranks_sleep_and_the_page_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(links, "SCRIPT", tmp_path / "links.sh")
    (tmp_path / "links.sh").write_text("echo 'hpcllm: not here' >&2; exit 2")
    found = measured(tmp_path, "80mbit")
    assert (found["links"], found["because"]) == (SLEEPS, "hpcllm: not here")
    assert found["rows"][0]["ours_s"] < found["rows"][0]["plain_s"] / 2
    assert "not here" in capsys.readouterr().out


@pytest.mark.skipif(not CAN_MAKE_LINKS, reason="no network namespaces here, neither by root nor by users")
def test_the_script_leaves_no_process_no_link_and_no_file(tmp_path):
    mark = f"1000.{os.getpid()}"
    own = {**os.environ, "HPCLLM_MPIRUN": str(tmp_path / "mpirun")}
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\n[ $1 = --version ] || {{ sleep {mark} & ip -o link; exit 7; }}\n")
    (tmp_path / "mpirun").chmod(0o755)
    before = left_behind()
    done = subprocess.run(["sh", str(links.SCRIPT), "run", "2", "1mbit", "x"], env=own, capture_output=True, text=True)
    assert done.returncode == 7
    assert "eth0" in done.stdout
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in read(p)]
    assert left_behind() == before


def left_behind() -> tuple[set[Path], bytes]:
    """Folders of the script, and the network devices of this machine."""
    devices = subprocess.run(["ip", "-o", "link"], capture_output=True).stdout
    return set(Path("/tmp").glob("hpcllm-links.*")), devices


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(("nodes", "kind"), [("1", SLEEPS), ("2", links.NODES)])
def test_in_a_slurm_job_the_network_between_its_nodes_is_measured_if_it_has_several(nodes, kind, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    assert links.kind_of_links()[0] == kind
