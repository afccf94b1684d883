"""`python -m hpcllm plan`: answers without MPI and torch, in JSON, text and pictures, and refuses by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcllm.cli.dry_run import tried
from hpcllm.cli.main import main
from hpcllm.config import schema as run_file
from hpcllm.plan.layout_search import search
from hpcllm.plan.layouts import parse_layout
from hpcllm.plan.prediction import predict
from hpcllm.plan.report import write_run_file

ROOT = Path(__file__).parents[2]
SMALL = "layers=4,hidden=256,heads=4,vocab=1024,sequence=128"
SEARCH = ["plan", "--machine", "lumi-g", "--model", SMALL, "--devices", "8", "--global-batch", "32"]
LARGE = ["plan", "--machine", "lumi-g", "--model", "gpt3-175b", "--global-batch", "64"]
GIVEN = "tp=8,pp=8,dp=2,micro_batch=2,chunks=1,schedule=1f1b,recompute=full,shard=states,sequence_parallel=false"
ONE = [*LARGE, "--layout", f"{GIVEN},precision=bf16,attention=materialized"]
# of the issue
KEYS = {
    *("iteration_time_s", "compute_s", "tp_s", "pp_s", "bubble_s", "dp_exposed_s", "optimizer_s", "fits", "mfu"),
    *("memory_gb_per_stage", "tflops_per_device_model", "tflops_per_device_hardware", "tokens_per_s"),
}


def exit_code(arguments: list[str]) -> int:
    """Run a command; of a mistake in an option the parser ends the process."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def asked(capsys, arguments: list[str], code: int = 0) -> dict:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def text(capsys, arguments: list[str], code: int = 0) -> str:
    assert main(arguments) == code
    return capsys.readouterr().out


@pytest.mark.parametrize("trainer", ["megatron", "hpcllm"])
def test_one_layout_as_json(capsys, trainer):
    layout = f"{GIVEN},trainer={trainer}"
    facts = asked(capsys, [*LARGE, "--layout", layout])
    assert set(facts) >= KEYS
    parts = ("compute_s", "tp_s", "pp_s", "bubble_s", "dp_exposed_s", "optimizer_s")
    assert sum(facts[part] for part in parts) == pytest.approx(facts["iteration_time_s"], rel=1e-6)
    found = predict("lumi-g", "gpt3-175b", layout, 64)
    assert facts["iteration_time_s"] == found.iteration_time_s
    assert [stage["stage"] for stage in facts["memory_gb_per_stage"]] == list(range(8))
    for told, stage in zip(facts["memory_gb_per_stage"], found.memory, strict=True):
        assert told["allocated"] == stage.allocated_bytes / 1e9
        assert told["allocated"] <= told["peak"] <= told["device"]
    assert facts["tokens_per_s"] == pytest.approx(64 * 2048 / facts["iteration_time_s"])
    assert parse_layout(facts["layout_text"]) == parse_layout(facts["layout"]) == found.layout


def test_a_search_as_json(capsys):
    facts = asked(capsys, [*SEARCH, "--top", "5"])
    assert [row["rank"] for row in facts["rows"]] == [1, 2, 3, 4, 5]
    for row in facts["rows"]:
        assert set(row) >= KEYS
        layout = row["layout"]
        assert layout["dp"] * layout["pp"] * layout["tp"] == row["devices"] == 8
        assert row["fits"]
    times = [row["iteration_time_s"] for row in facts["rows"]]
    assert times == pytest.approx(sorted(times), rel=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ONE,
        [*ONE, "--explain"],
        SEARCH,
        [*SEARCH, "--explain", "2"],
        [*LARGE, "--devices", "8", "--constraints", "pp<=4"],
        [*LARGE, "--layout", "tp=8,pp=48,dp=2,chunks=2"],
    ],
    ids=lambda arguments: " ".join(arguments[5:]),
)
def test_every_line_fits_into_120_columns(capsys, arguments):
    main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) > 10


def test_the_report_says_whose_trainer_and_whether_it_fits(capsys):
    told = text(capsys, ONE)
    assert "trainer: that of Megatron-LM" in told
    assert "fits: stage" in told
    told = text(capsys, [*LARGE, "--layout", "tp=8,trainer=hpcllm"])
    assert "trainer: hpcllm" in told
    assert "DOES NOT FIT, by" in told
    assert asked(capsys, [*LARGE, "--layout", "tp=8,trainer=hpcllm"])["fits"] is False


def test_nothing_fits(capsys):
    arguments = [*LARGE, "--devices", "8"]
    told = text(capsys, arguments, code=1)
    assert "NOTHING FITS" in told
    assert "devices of" in told
    facts = asked(capsys, arguments, code=1)
    assert (facts["fits"], facts["rows"]) == (False, [])
    assert facts["nearest"]["fits"] is False
    assert "NO LAYOUT EXISTS" in text(capsys, [*SEARCH, "--constraints", "tp=8"], code=1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["plan"], "plan needs --machine"),
        (["plan", "--machine", "lumi-g", "--model", SMALL, "--devices", "8"], "plan needs --global-batch: samples"),
        ([*SEARCH[:5], "--global-batch", "8"], "plan needs --devices"),
        ([*SEARCH, "--machine", "lumy"], "lumy"),
        ([*SEARCH, "--model", "gpt5"], "gpt5"),
        ([*SEARCH, "--model", "layers=4,hidden=256"], "lacks heads"),
        ([*SEARCH, "--devices", "many"], "--devices: 'many' is no count"),
        ([*SEARCH, "--devices", "0"], "--devices: '0' is no count"),
        ([*SEARCH, "--global-batch", "-4"], "--global-batch: '-4' is no count"),
        ([*SEARCH, "--tokens", "lots"], "--tokens: 'lots' is no number"),
        ([*SEARCH, "--tokens", "0"], "--tokens: '0' is no number"),
        ([*SEARCH, "--constraints", "tpp=4"], "does not choose 'tpp'"),
        ([*SEARCH, "--explain", "99999"], "--explain"),
        ([*SEARCH, "--row", "2"], "--row is the row that --write takes"),
        ([*SEARCH, "--row", "900", "--write", "new.toml", "--constraints", "tp=4"], "--row 900:"),
        ([*SEARCH, "--plot", "a.pdf"], ".png or .svg"),
        ([*SEARCH, "--write", "there.toml"], "is there already"),
        ([*SEARCH, "--output", "x"], "does not take --output"),
        ([*ONE, "--top", "3"], "does not take --top"),
        ([*ONE, "--devices", "64"], "dp x pp x tp = 2 x 8 x 8"),
        ([*ONE, "--explain", "2"], "--explain 2"),
        ([*ONE, "--write", "new.toml"], "trainer=hpcllm"),
        ([*LARGE, "--layout", "tp=7"], "7"),
        ([*LARGE, "--layout", "tpp=8"], "did you mean tp?"),
        ([*LARGE, "--layout", "dp=5"], "global_batch = 64"),
        ([*LARGE, "--layout", "pp=97"], "96"),
        ([*LARGE, "--layout", "tp"], "key=value"),
    ],
    ids=lambda value: " ".join(value[-4:]) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_with_exit_code_2_and_leaves_nothing(tmp_path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(tmp_path)
    Path("there.toml").write_text("")
    assert exit_code(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hpcllm: error: ")
    assert captured.err.count("\n") == 1
    assert told in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]


def test_devices_say_the_replicas_of_a_layout(capsys):
    facts = asked(capsys, [*LARGE, "--layout", "tp=8,pp=4", "--devices", "128"])
    assert facts["layout"]["dp"] == 4


@pytest.mark.parametrize("name", ["a plan.svg", "a plan.png"])
def test_a_picture_is_drawn(capsys, tmp_path, name):
    text(capsys, [*ONE, "--plot", str(tmp_path / name)])
    head = (tmp_path / name).read_bytes()[:300]
    assert head.startswith(b"\x89PNG") or b"<svg" in head


@pytest.mark.parametrize("rank", [1, 3])
def test_a_written_run_file_is_the_row_and_is_accepted(capsys, tmp_path, rank):
    path = tmp_path / "a run.toml"
    text(capsys, [*SEARCH, "--tokens", "1e6", "--write", str(path), "--row", str(rank)])
    row = search("lumi-g", SMALL, 8, 32).best[rank - 1]
    trial = tried(path, [])
    config = run_file.load(path)
    assert config.model == row.model.shape
    assert config.run.steps * 32 * 128 >= 1e6 > (config.run.steps - 1) * 32 * 128
    assert trial.resolved.ranks == 8
    assert trial.step is not None
    assert trial.step.layout == row.layout
    assert trial.step.iteration_time_s == row.iteration_time_s


@pytest.mark.parametrize(
    ("machine", "model", "devices", "batch", "constraints"),
    [
        ("lumi-g", SMALL, 4, 16, ""),
        ("lumi-g", SMALL, 6, 12, ""),
        ("perlmutter", "gpt2-1558m", 8, 64, "pp>=2"),
        ("perlmutter", "llama-7b", 16, 32, "schedule=zb-v|interleaved"),
        ("dgx-h100", "llama-8b", 16, 32, "schedule=zb-h1|gpipe,tp<=4"),
        ("dgx-h100", "neox-20b", 64, 64, "shard=states+gradients|all"),
        ("frontier", "llama-13b", 128, 256, "pp=2|4,tp=8"),
    ],
)
def test_every_proposed_layout_is_accepted_by_a_dry_run(tmp_path, machine, model, devices, batch, constraints):
    found = search(machine, model, devices, batch, top=6, constraints=constraints or ())
    assert found.best
    for rank, row in enumerate(found.best):
        path = tmp_path / f"{rank}.toml"
        write_run_file(path, row, machine, 1e9)
        trial = tried(path, [], row.layout.devices)
        assert (trial.step.layout, trial.step.fits) == (row.layout, True)


def test_the_real_command_accepts_what_the_real_command_writes(tmp_path):
    """In a folder with spaces, without a terminal, without HOME."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "HOME"} | {"PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "hpcllm", *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=100
        )

    planned = run(*SEARCH, "--write", "my run.toml")
    assert (planned.returncode, planned.stderr) == (0, "")
    tried_out = run("train", "--dry-run", "my run.toml", "--json")
    assert (tried_out.returncode, tried_out.stderr) == (0, "")
    assert json.loads(tried_out.stdout)["ranks"] == 8
    assert [path.name for path in folder.iterdir()] == ["my run.toml"]


@pytest.mark.parametrize("arguments", [SEARCH, ONE, [*ONE, "--explain"]], ids=["search", "layout", "explain"])
def test_neither_torch_nor_mpi_is_loaded(arguments):
    program = (
        "import sys; from hpcllm.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules) + 2 * ('mpi4py' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
