"""The command `layout`: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcllm.cli.main import main

RUN = """
[model]
vocabulary = 1000
hidden = 64
heads = 4
layers = 8
[data]
global_batch = 16
[mesh]
pp = 2
tp = 2
order = "dp,pp,tp"
[pipeline]
microbatches = 2
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "my runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "run.toml").write_text(RUN)
    return "run.toml"


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["layout", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_better_order_is_better_when_it_is_taken(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "16", "--ranks-per-node", "4", "--ranks-per-package", "2"]
    found = facts(capsys, run_file, *sizes)
    assert found["best"]["between_nodes_bytes"] < found["given"]["between_nodes_bytes"]
    assert found["mesh"] == {"dp": 4, "pp": 2, "tp": 2}
    assert found["best"]["order"]
    taken = facts(capsys, run_file, *sizes, "--set", f"mesh.order={found['best']['order']}")
    assert taken["given"] == {key: found["best"][key] for key in taken["given"]}
    assert taken["best"]["rank_order"] == list(range(16))
    for kind in taken["traffic"].values():
        assert kind["between_nodes_bytes"] + kind["between_packages_bytes"] <= kind["bytes"]


def test_the_file_has_the_best_order(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, run_file, "--ranks", "16", "--ranks-per-node", "4", "--reorder")
    content = Path("MPICH_RANK_ORDER").read_text()
    lines = [line for line in content.splitlines() if not line.startswith("#")]
    ranks = [int(word) for word in ",".join(lines).split(",")]
    assert sorted(ranks) == list(range(16))
    assert ranks == found["best"]["rank_order"]
    assert [len(line.split(",")) for line in lines] == [4] * 4
    assert main(["layout", run_file, "--ranks", "16", "--ranks-per-node", "4", "--reorder", "my order"]) == 0
    assert "MPICH_RANK_REORDER_METHOD=3 MPICH_RANK_REORDER_FILE='my order'" in capsys.readouterr().out
    assert Path("my order").read_text() == content


def test_the_page_says_what_to_do(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", run_file, "--ranks", "16", "--ranks-per-node", "4", "--ranks-per-package", "2"]) == 0
    said = capsys.readouterr().out
    for part in ("0 1 | 2 3", "between packages", "--set mesh.order=", "as it is:", "a better order:"):
        assert part in said
    order = next(line.split("mesh.order=")[1] for line in said.splitlines() if "mesh.order=" in line)
    assert main(["layout", run_file, "--ranks", "16", "--ranks-per-node", "4", "--set", f"mesh.order={order}"]) == 0
    assert "no better order was found" in capsys.readouterr().out


def test_tp_that_no_node_holds_is_said_with_its_cost(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", run_file, "--ranks", "8", "--ranks-per-node", "2", "--set", "mesh.tp=4"]) == 0
    said = capsys.readouterr().out
    assert "mesh.tp = 4 is more than the 2 ranks of a node: layers wait for" in said
    assert "mesh.tp <= 2" in said


def test_nodes_of_a_machine_and_many_of_them(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--set", "run.machine=frontier", "--set", "data.global_batch=1024"]
    found = facts(capsys, run_file, "--ranks", "1024", *machine)
    assert found["ranks_per_node"] == 8
    assert main(["layout", run_file, "--ranks", "1024", *machine]) == 0
    assert "and 120 more nodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--ranks-per-node"),
        (["--ranks-per-node", "4", "--ranks-per-package", "3"], "divides"),
        (["--ranks-per-node", "0"], "--ranks-per-node"),
        (["--ranks-per-node", "-4"], "valid: 1 to"),
        (["--ranks-per-node", "4", "--ranks", "6"], "multiple of 4"),
        (["--ranks-per-node", "4", "--reorder", "no/such/folder"], "cannot be written"),
        (["--ranks-per-node", "4", "--set", "run.machine=nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_is_refused(
    run_file: str, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert main(["layout", run_file, *arguments]) == 2
    assert word in capsys.readouterr().err


def test_it_needs_neither_mpi_nor_torch(run_file: str) -> None:
    probe = (
        "import sys; from hpcllm.cli.main import main; "
        f"main(['layout', {run_file!r}, '--ranks-per-node', '2', '--reorder']); "
        "print(sorted({'mpi4py', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
