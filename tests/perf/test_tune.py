"""`perf tune`: a file that `auto` can read, a table of what it chooses, and refusals before any work."""

from __future__ import annotations

import argparse
import json

import pytest

from hpcllm.collectives import measure as measuring
from hpcllm.collectives.cost import COSTS
from hpcllm.collectives.tuning import load_tuning
from hpcllm.errors import ConfigError
from hpcllm.perf import tune
from hpcllm.perf.arguments import add_tune_arguments

TIMES = ("predicted_s", "measured_s", "native_s", "best_s")
ROW_KEYS = {"operation", "bytes", "asked", "algorithm", "codec", "why", "best", *TIMES}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measuring, "SAMPLE_S", 1e-4)
    monkeypatch.setattr(measuring, "BUDGET_S", 1e-3)
    monkeypatch.setattr(measuring, "LONG_BYTES", 1 << 16)
    monkeypatch.setattr(measuring, "BEYOND_CACHES_BYTES", 1 << 20)
    monkeypatch.setattr(measuring, "CODECS", ("bf16",))
    monkeypatch.setattr(tune, "TIME_S", 1e-3)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_tune_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parallel([1, 2, 3])
def test_file_and_table(comm, shared_path, capsys):
    output = shared_path / "my tuning.toml"
    given = arguments("--output", str(output), "--codecs", "bf16", "--sizes", "1K,32K", "--json")
    assert tune.run(given, comm) == 0
    tuning = load_tuning(output)
    assert (tuning.facts["ranks"], tuning.facts["nodes"]) == (comm.size, 1)
    assert ("bf16", "float32") in tuning.rates.codings
    assert not list(shared_path.glob(".*"))
    printed = capsys.readouterr().out
    if comm.rank:
        assert not printed
        return
    rows = json.loads(printed)["rows"]
    assert [(row["operation"], row["bytes"], row["asked"]) for row in rows] == [
        (operation, size, asked) for operation in COSTS for size in (1024, 32768) for asked in ("raw", "bf16")
    ]
    for row in rows:
        assert set(row) == ROW_KEYS
        assert 0 < row["best_s"] <= min(row["measured_s"], row["native_s"])
        assert row["predicted_s"] > 0
        assert row["codec"] in ("raw", row["asked"])


@pytest.mark.parallel([2])
def test_the_table_for_people(comm, shared_path, capsys):
    words = ("--output", str(shared_path / "t"), "--codecs", "bf16", "--sizes", "4K", "--operations", "allreduce")
    assert tune.run(arguments(*words), comm) == 0
    lines = capsys.readouterr().out.splitlines()
    if comm.rank == 0:
        assert lines[0].startswith("wrote ")
        assert [line.split()[:3] for line in lines if line.split()[0] == "allreduce"] == [
            ["allreduce", "4096", "raw"],
            ["allreduce", "4096", "bf16"],
        ]
        assert "of 2 choices within 10 % of the best measured" in lines[-1]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ((), ["int8:256", "exp"]),
        (("--set", "communication.policy=mzhybrid"), ["zfp:8", "mpc"]),
        (("--set", "communication.gradients=int4:sr+ef"), ["int4:128:sr", "exp"]),
        (("--codecs", "bf16", "--set", "communication.policy=none"), ["bf16", "raw"]),
    ],
)
def test_what_a_run_file_asks_for_is_measured(tmp_path, words, asked):
    run_file = tmp_path / "run.toml"
    run_file.write_text('[run]\nname = "r"\n[communication]\npolicy = "hpcllm"\n[precision]\ncompute = "fp16"\n')
    codecs, dtypes = tune._asked(arguments(str(run_file), *words))
    assert codecs == asked
    assert dtypes == ["float32", "bfloat16", "float16"]


def test_without_a_run_file_the_usual_codecs_are_measured():
    assert tune._asked(arguments()) == (["int8:256", "exp"], ["float32", "bfloat16"])
    assert tune._asked(arguments("--codecs", "int4,bf16"))[0] == ["int4:128", "bf16"]


@pytest.mark.parallel([1, 2])
def test_only_rates(comm, shared_path, capsys):
    assert tune.run(arguments("--output", str(shared_path / "t"), "--codecs", "bf16", "--rates-only"), comm) == 0
    assert load_tuning(shared_path / "t").rates.copy_gb_s > 0
    said = capsys.readouterr().out
    assert said.startswith("wrote ") if comm.rank == 0 else not said


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--codecs", "int9"), "--codecs.*int9.*int8:256"),
        (("--codecs", ""), "--codecs"),
        (("--sizes", "0"), "--sizes"),
        (("--operations", "reduce"), "--operations 'reduce' is unknown; did you mean .*valid: .*allreduce"),
        (("--output", "no such folder/tuning.toml"), "--output.*cannot be written"),
        (("--output", "/"), "--output '/' cannot be written"),
    ],
)
def test_refused_before_any_work(comm, monkeypatch, words, message):
    monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(ConfigError, match=message):
        tune.run(arguments(*words), comm)


def test_seconds_for_people():
    assert [tune._seconds(value) for value in (1.26e-6, 999e-6, 1e-3, 1.5)] == [
        "1.3 us",
        "999.0 us",
        "1.00 ms",
        "1500.00 ms",
    ]
