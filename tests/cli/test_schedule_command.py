"""The command `schedule`: quick, exact, and every mistake one line with what would be valid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hpcllm import plotting
from hpcllm.cli.main import main
from hpcllm.cli.schedule import parse_bytes, parse_times
from hpcllm.pipeline.schedules import SCHEDULES, make_schedule
from hpcllm.pipeline.timing import Times, simulate
from tests.pipeline.made_up_traces import as_text, made_up

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "mpi4py", "h5py", "numpy", "matplotlib"}
SHAPE = ("--stages", "4", "--microbatches", "8")


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch) -> None:
    """Nobody says how wide the terminal is, though pytest-xdist does."""
    monkeypatch.delenv("COLUMNS", raising=False)


def schedule(capsys, *words: str) -> tuple[int, str, str]:
    try:
        code = main(["schedule", *words])
    except SystemExit as end:  # a mistake in an option
        code = end.code
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def trace(tmp_path) -> str:
    path = tmp_path / "a trace.json"
    path.write_text(as_text(made_up("zb-v", 3, 4, jitter=0.01, entry=0.01, delay=0.01, gap=0.01)))
    return str(path)


@pytest.mark.parametrize("name", SCHEDULES)
def test_json_is_what_simulation_says(name, capsys):
    code, out, _ = schedule(capsys, name, *SHAPE, "--times", "F=2,B=5,send=0.25", "--bytes", "3KiB", "--json")
    facts = json.loads(out)
    timeline = simulate(make_schedule(name, 4, 8), Times(2, 5, 2.5, 0.25))
    assert (code, facts["step_time"], facts["idle_share"]) == (0, timeline.makespan, timeline.bubble)
    for rank, row in enumerate(facts["per_rank"]):
        assert (row["peak_live"], row["messages"]) == (timeline.peak_live[rank], timeline.messages[rank])
        assert row["bytes"] == 3072 * row["messages"]
        assert row["actions"] == [str(action) for action in timeline.schedule.actions[rank]]


def test_the_report_has_the_proofs_the_grid_and_a_row_for_each_rank(capsys):
    _, out, _ = schedule(capsys, "1f1b", *SHAPE, "--wide")
    lines = out.splitlines()
    assert sum(line.startswith("proved: ") for line in lines) == 3
    assert "rank 3  .  .  .  F0 B0--- F1 B1---" in out
    assert [line.split() for line in lines if line.split()[1:4] == ["27.3", "%", "4"]] == [["0", "27.3", "%", "4", "8"]]
    assert max(map(len, lines)) <= 120


def test_one_rank_has_no_messages_and_no_bubble(capsys):
    code, out, _ = schedule(capsys, "1f1b", "--stages", "1", "--microbatches", "2")
    assert code == 0
    assert "is sent once" not in out
    assert "the bubble is 0.0 %" in out


def test_a_written_schedule_is_read_as_custom_and_is_the_same(capsys, tmp_path):
    path = tmp_path / "my schedule.txt"
    _, first, _ = schedule(capsys, "interleaved", *SHAPE, "--chunks", "3", "--write", str(path), "--json")
    code, again, _ = schedule(capsys, "custom", "--file", str(path), "--json")
    assert (code, json.loads(again)) == (0, json.loads(first))


def test_a_schedule_that_waits_in_a_circle_is_refused_with_the_circle(capsys, tmp_path):
    path = tmp_path / "circle.txt"
    path.write_text(
        "schedule circle\nranks 2\nchunks 1\nplacement loop\nmicrobatches 1\n"
        "rank 0: F0 RECV_B0 B0 SEND_F0\nrank 1: RECV_F0 F0 B0 SEND_B0\n"
    )
    code, out, err = schedule(capsys, "custom", "--file", str(path))
    assert (code, out) == (2, "")
    assert "rank 0 at B0 waits for rank 1" in err
    assert "rank 1 at F0 waits for rank 0" in err


def test_compare_and_measured_print_and_speak_json(capsys, trace):
    code, out, _ = schedule(capsys, "--compare", *SHAPE, "--recompute")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    lines = out.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("  schedule ")) + 1
    assert [line.split()[0] for line in lines[first : first + len(SCHEDULES)]] == list(SCHEDULES)
    _, out, _ = schedule(capsys, "--compare", *SHAPE, "--json")
    assert [row["schedule"] for row in json.loads(out)["schedules"]] == list(SCHEDULES)
    code, out, _ = schedule(capsys, "--measured", trace)
    assert code == 0
    assert "measured / ideal = " in out
    _, out, _ = schedule(capsys, "--measured", trace, "--json")
    (replica,) = json.loads(out)["replicas"]
    for rank in replica["per_rank"]:
        parts = [rank[f"{part}_s"] for part in ("useful", "bubble", "imbalance", "uneven", "late_start", "engine")]
        assert sum(parts) + rank["exposed_communication_s"] == pytest.approx(replica["step_s"])


def test_of_several_replicas_the_slowest_is_shown_and_json_has_them_all(capsys, tmp_path):
    """A replica's ranks are its own: another one's late entry is not theirs."""
    quick, slow = made_up(ranks=2), made_up(ranks=2, stages={1: 0.01})
    for event in slow["traceEvents"]:
        event["pid"] += 1
    quick["traceEvents"] += slow["traceEvents"]
    path = tmp_path / "two.json"
    path.write_text(as_text(quick))
    _, out, _ = schedule(capsys, "--measured", str(path))
    _, facts, _ = schedule(capsys, "--measured", str(path), "--json")
    first, second = json.loads(facts)["replicas"]
    assert first["step_s"] < second["step_s"]
    assert "replica 1, the slowest of 2" in out
    assert f"measured: {1e3 * second['step_s']:.2f} ms" in out


@pytest.mark.parametrize("form", [["zb-v", *SHAPE], ["--compare", *SHAPE], ["--measured", "TRACE"]], ids=" ".join)
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_every_form_draws(capsys, tmp_path, trace, form, suffix):
    path = tmp_path / f"a picture.{suffix}"
    words = [trace if word == "TRACE" else word for word in form]
    assert schedule(capsys, *words, "--plot", str(path))[0] == 0
    if suffix == "svg":
        ElementTree.parse(path)
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "schedule NAME needs NAME, --stages, --microbatches; it takes NAME, --stages"),
        (["1f1b", "--stages", "4"], "schedule NAME needs --microbatches"),
        (["1f1v", *SHAPE], "no schedule '1f1v'; there are gpipe, 1f1b"),
        (["custom", *SHAPE], "schedule custom does not take --stages, --microbatches; it takes NAME, --file"),
        (["custom"], "schedule custom needs --file"),
        (["custom", "--file", "none.txt"], "the schedule 'none.txt' cannot be read"),
        (["1f1b", *SHAPE, "--file", "x"], "schedule NAME does not take --file"),
        (["1f1b", *SHAPE, "--compare"], "schedule --compare does not take NAME"),
        (["--compare"], "schedule --compare needs --stages, --microbatches"),
        (
            ["--measured", "x", "--recompute"],
            "schedule --measured does not take --recompute; it takes --measured, --plot",
        ),
        (["--measured", "none.json"], "the trace 'none.json' cannot be read"),
        (["1f1b", "--stages", "0", "--microbatches", "8"], "--stages: '0' is no count"),
        (["1f1b", "--stages", "2", "--microbatches", "1e3"], "--microbatches: '1e3' is no count"),
        (["1f1b", *SHAPE, "--chunks", "2"], "chunks = 1 works"),
        (["1f1b", "--stages", "9999", "--microbatches", "9999"], "forward passes; valid: at most 131072"),
        (["1f1b", *SHAPE, "--times", "F=1,G=2"], "'G=2' is not one of F=, B=, W=, send="),
        (["1f1b", *SHAPE, "--times", ""], "'' is not one of F=, B=, W=, send="),
        (["1f1b", *SHAPE, "--times", "F=1,F=2"], "'F=2' is not one of F=, B=, W=, send=, each once"),
        (["1f1b", *SHAPE, "--times", "F=0"], "F='0' is no time; valid: a number above 0"),
        (["1f1b", *SHAPE, "--times", "send=-1"], "send='-1' is no time; valid: a number from 0"),
        (["1f1b", *SHAPE, "--times", "B=nan"], "B='nan' is no time"),
        (["1f1b", *SHAPE, "--times", "B=inf"], "B='inf' is no time"),
        (["1f1b", *SHAPE, "--times", "B=2,W=3"], "W=3 is a part of B=2"),
        (["1f1b", *SHAPE, "--bytes", "4MB"], "'4MB' is no size of a message; valid: 4194304, 512KiB, 4MiB"),
        (["1f1b", *SHAPE, "--bytes", "0"], "'0' is no size"),
        (["1f1b", *SHAPE, "--plot", "x.gif"], "'x.gif' cannot be drawn; valid: a name that ends in .png or .svg"),
        (["1f1b", *SHAPE, "--plot", "no folder/x.svg"], "'no folder/x.svg' cannot be written: No such file"),
        (["1f1b", *SHAPE, "--write", "no folder/x"], "'no folder/x' cannot be written: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_with_what_would_be_valid(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = schedule(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("hpcllm: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["x.png", "x.svg"])
def test_without_matplotlib_a_picture_is_rejected_with_the_fix(monkeypatch, capsys, tmp_path, name):
    monkeypatch.setattr(plotting.importlib.util, "find_spec", lambda _: None)
    code, _, err = schedule(capsys, "1f1b", *SHAPE, "--plot", str(tmp_path / name))
    assert code == 2
    assert "needs matplotlib: pip install matplotlib" in err


@pytest.mark.parametrize(("text", "times"), [
    ("F=1", Times(1, 2, 1)), ("F=3", Times(3, 6, 3)), ("B=3", Times(1, 3, 1.5)), ("W=0.5, send=1", Times(1, 2, 0.5, 1)),
])  # fmt: skip
def test_times_left_out_follow_from_those_given(text, times):
    assert parse_times(text) == times


@pytest.mark.parametrize(("text", "size"), [("7", 7), ("7B", 7), ("4MiB", 4 << 20), ("1.5 KiB", 1536)])
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("form", [["zb-v", *SHAPE], ["--compare", *SHAPE], ["--measured", "TRACE"]])
def test_it_needs_no_terminal_no_home_and_nothing_heavy(form, tmp_path, trace):
    words = [trace if word == "TRACE" else word for word in form]
    environment = {key: value for key, value in os.environ.items() if key not in ("HOME", "COLUMNS", "TERM")}
    answer = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hpcllm", "schedule", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in answer.stderr.splitlines()}
    assert answer.returncode == 0
    assert "argparse" in imported  # the list is one of imports
    assert imported & HEAVY == set()
    assert max(map(len, answer.stdout.splitlines())) <= 80


def test_it_goes_by_the_width_of_the_terminal(monkeypatch, capsys):
    widths = {}
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        _, out, _ = schedule(capsys, "1f1b", "--stages", "4", "--microbatches", "12", "--wide")
        widths[columns] = max(len(line) for line in out.splitlines() if line.startswith("rank "))
    assert widths["60"] <= 60 < widths["200"] <= 200
