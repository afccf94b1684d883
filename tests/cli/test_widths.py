"""The output of every command fits 80 columns without --wide; only what cannot be cut, one long word, may exceed them.

A tiny run is made once, with all that other commands look into; commands that need several ranks are below.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import make_store

import hpcllm.perf.__main__ as perf
from hpcllm.cli import checkpoint, store
from hpcllm.cli.main import COMMANDS, main
from hpcllm.collectives import measure as measuring
from hpcllm.perf import calibrate, kernels, tune
from hpcllm.training import summary

RUN = """
[run]
name = "mine"
steps = 3
[model]
layers = 12
hidden = 32
heads = 4
ffn = 32
max_sequence = 32
[data]
store = "store.h5"
sequence_length = 32
global_batch = 4
validation_sequences = 2
[log]
every_steps = 1
"""
STEP = "runs/mine/checkpoints/step_00000003.h5"
GPT = "plan --machine frontier --model gpt3-175b --global-batch 512"
SHAPE = "--set mesh.pp=4 --set pipeline.microbatches=4 --set data.global_batch=64"
TUNE = "--set finetuning.kind=supervised --set run.start_from=runs/mine --set run.name=tuned"
CALIBRATE = "perf step --calibrate --precisions fp32 --json new.json"

WIDE_OUTPUT = [
    "presets",
    "machines",
    "codecs",
    "keys",
    "keys mesh",
    "init new.toml",
    "memory run.toml",
    f"memory run.toml --ranks 64 {SHAPE}",
    f"layout run.toml --ranks 64 --ranks-per-node 8 {SHAPE}",
    "schedule zb-v --stages 4 --microbatches 8 --bytes 4MiB",
    "schedule --compare --stages 4 --microbatches 8 --recompute --bytes 4MiB",
    f"{GPT} --devices 512 --constraints tp=8,pp=8",
    f"{GPT} --layout tp=8,pp=8,dp=8",
    f"{GPT} --layout tp=8,pp=8,dp=8 --explain",
    "train run.toml --dry-run --set run.machine=lumi-g",
    "train run.toml --set run.name=another",
    "train run.toml --is-finished",
    "train run.toml",
    f"finetune run.toml {TUNE}",
    f"finetune run.toml {TUNE} --dry-run",
    "prepare texts --output new.h5 --vocabulary 290",
    "prepare chats.jsonl --chat --template llama3 --output new.h5 --vocabulary 290",
    "store info chats.h5",
    "store sample chats.h5 --count 1",
    "generate runs/mine --prompt sum --tokens 2",
    "evaluate runs/mine --task store.h5 --task sort:3 --problems 5",
    "evaluate runs/mine --task store.h5 --task sort:3 --problems 5 --all-checkpoints",
    "quantise runs/mine fewer --bits 8 --store store.h5",
    "judge --help",
    "problems addition --count 3",
    "report runs/mine",
    "report runs/mine runs/mine --output both.html",
    "checkpoint inspect runs/mine",
    "checkpoint inspect packed.h5",
    "checkpoint verify runs/mine --all",
    "checkpoint verify store.h5",
    f"checkpoint diff {STEP} other.h5",
    "checkpoint compress runs/mine new.h5",
    "checkpoint decompress packed.h5 new.h5",
    "checkpoint convert runs/mine new",
    "preflight run.toml --quick",
    "perf codec --sizes 4K --iterations 1 --codecs raw,int8",
    "perf step run.toml --steps 1 --warmup 0",
    CALIBRATE,
    "completion bash --help",
    "course list",
    "course start latency lab",
]
OF_SEVERAL_RANKS = [
    *(
        f"perf {name} --sizes 4K --iterations 1 --warmup 0 --codecs raw,int8:256:sr --bandwidth 10"
        for name in ("p2p", "allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast")
    ),
    "perf tune --sizes 4K --codecs exp --operations allreduce,reduce_scatter --output new.toml",
    "perf step run.toml --steps 1 --warmup 0 --set mesh.dp=2 --policies none,hpcllm,mzhybrid",
    "prepare texts --output new.h5 --vocabulary 290",
    "train run.toml --set run.name=both --set mesh.pp=2",
]
BUT_FULL = [line for line in WIDE_OUTPUT if line != CALIBRATE]
ELSEWHERE = {"plot": "draws, or prints Markdown and JSON, which no terminal reads"}


def test_every_command_is_in_the_tables():
    words = [line.split() for line in WIDE_OUTPUT + OF_SEVERAL_RANKS]
    assert {line[0] for line in words} == set(COMMANDS)
    assert {line[1] for line in words if line[0] == "checkpoint"} == {each.__name__ for each in checkpoint.COMMANDS}
    assert {line[1] for line in words if line[0] == "store"} == {each.__name__ for each in store.COMMANDS}
    assert {line[1] for line in words if line[0] == "perf"} | set(ELSEWHERE) == set(perf.COMMANDS)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a run that is finished, what was converted from it, and the texts and the store it read."""
    folder = tmp_path_factory.mktemp("widths")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        texts(folder)
        pairs = '{"prompt": "2 + 2?", "chosen": "4", "rejected": "22"}\n'
        Path("chats.jsonl").write_text(pairs)
        assert main(["prepare", "chats.jsonl", "--chat", "--output", "chats.h5"]) == 0
        assert main(["train", "run.toml"]) == 0
        assert main(["checkpoint", "compress", "runs/mine", "packed.h5"]) == 0
        other = ["run.steps=2", "run.name=other", "optimizer.learning_rate=1e-2"]
        assert main(["train", "run.toml", *(word for key in other for word in ("--set", key))]) == 0
        Path("runs/other/checkpoints/step_00000002.h5").rename("other.h5")
    return folder


def texts(folder: Path) -> None:
    """Write the run file, and a store of texts that stay beside it. Not collective."""
    from mpi4py import MPI

    (folder / "run.toml").write_text(RUN)
    (folder / "texts").mkdir()
    make_store(folder / "texts", MPI.COMM_SELF).rename(folder / "store.h5")


@pytest.fixture(autouse=True)
def narrow(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(summary, "_python", lambda: ".venv/bin/python")  # the path may be any
    for name, value in {"SAMPLE_S": 1e-4, "BUDGET_S": 1e-3, "LONG_BYTES": 1 << 16, "CODECS": ("bf16",)}.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(measuring, "BEYOND_CACHES_BYTES", 1 << 20)
    monkeypatch.setattr(tune, "TIME_S", 1e-3)
    monkeypatch.setattr(calibrate, "CPU", kernels.SHORT)


@pytest.mark.parametrize(
    "command", [*BUT_FULL, pytest.param(CALIBRATE, marks=pytest.mark.full(reason="measures for 8 s"))]
)
def test_output_fits_80_columns(made, monkeypatch, capfd, command):
    monkeypatch.chdir(made)
    before = set(made.rglob("*"))
    capfd.readouterr()
    try:
        code = main(command.split())
    except SystemExit as end:
        code = end.code
    assert code in (0, 1)
    lines = capfd.readouterr().out.splitlines()
    remove(made, before)
    assert lines
    assert list(too_wide(lines)) == []


def too_wide(lines: list[str]) -> Iterator[str]:
    """Lines over 80 columns, but for one long word: a path, a --layout."""
    return (line for line in lines if len(line) > 80 and " " in line.strip())


def remove(folder: Path, before: set[Path]) -> None:
    """Remove what a command has made, so that the next one finds the same folder."""
    for path in sorted(set(folder.rglob("*")) - before, reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("command", OF_SEVERAL_RANKS)
def test_output_of_several_ranks_fits_80_columns(comm, shared_path, monkeypatch, capfd, command):
    if comm.rank == 0:
        texts(shared_path)
    comm.Barrier()
    monkeypatch.chdir(shared_path)
    capfd.readouterr()
    assert main(command.split()) == 0
    lines = capfd.readouterr().out.splitlines()
    assert bool(lines) == (comm.rank == 0)
    assert list(too_wide(lines)) == []


def test_whole_lines_come_with_wide(made, monkeypatch, capsys):
    monkeypatch.chdir(made)
    for words in (["checkpoint", "inspect", "packed.h5"], ["train", "run.toml", "--set", "run.name=wide"]):
        assert main([*words, "--wide"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) > 100
