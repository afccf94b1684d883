"""The log of a run: each step once, numbers that follow from each other, whatever an earlier job left."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcllm.config.schema import from_tables
from hpcllm.errors import HpcllmError
from hpcllm.model.shapes import flops_per_token
from hpcllm.report.run_folder import read_log
from hpcllm.system.json_lines import record_of
from hpcllm.training.log import TRAFFIC, Pace, clock_text, open_log, step_line

CONFIG = from_tables({"run": {"steps": 100}, "data": {"global_batch": 6, "sequence_length": 32}})
durations = st.lists(st.tuples(st.floats(1e-3, 10), st.floats(0, 1)), min_size=1, max_size=20)


SENT = {
    "gradients_plain_bytes": 4e6,
    "gradients_bytes": 1e6,
    "forward_plain_bytes": 2e6,
    "forward_bytes": 2e6,
    "tensor_plain_bytes": 6e6,
    "tensor_bytes": 4e6,
}


def traffic_of(**counts: float) -> np.ndarray:
    return np.array([counts.get(what, 0.0) for what in TRAFFIC])


def record(step: int, targets: int = 6 * 32) -> dict:
    numbers = {"loss": 2.5, "learning_rate": 1e-3, "grad_norm": 1.0, "memory_gb": 0.5}
    pace = Pace(CONFIG, ranks=2, peak_tflops=None)
    pace.add(0.5, traffic_of(exposed_s=0.2), targets)
    return {"step": step} | numbers | pace.take(step)


def steps_in(folder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]


@settings(deadline=None)
@given(st.lists(durations, min_size=1, max_size=4), st.integers(1, 8), st.sampled_from([None, 0.5, 100.0]))
def test_pace_gives_means_since_the_last_time_and_over_all(intervals, ranks, peak):
    pace = Pace(CONFIG, ranks, peak)
    for interval in intervals:
        for step_s, share in interval:
            pace.add(step_s, traffic_of(exposed_s=share * step_s * ranks, hidden_s=0.5 * ranks, **SENT), 7)
        total_s = sum(step_s for step_s, _ in interval)
        found = pace.take(40)
        mean_s = total_s / len(interval)
        assert found["step_s"] == pytest.approx(mean_s)
        assert found["targets"] == 7
        assert found["tokens_per_s"] == pytest.approx(6 * 32 / mean_s)
        assert found["communication_share"] == pytest.approx(sum(s * t for s, t in interval) / total_s)
        assert found["eta_s"] == pytest.approx(60 * mean_s)
        tflops = flops_per_token(CONFIG.model, 32) * 6 * 32 / mean_s / ranks / 1e12
        assert found["tflops_per_device"] == pytest.approx(tflops)
        assert found["communication_hidden_s"] == pytest.approx(0.5)
        sent = {key: value for key, value in found.items() if key.endswith(("_bytes", "_ratio"))}
        assert sent == SENT | {"gradients_ratio": 4, "forward_ratio": 1, "tensor_ratio": 1.5}
        assert found.get("mfu") == (pytest.approx(tflops / peak) if peak else None)
    everything = [step_s for interval in intervals for step_s, _ in interval]
    assert pace.mean_tokens_per_s == pytest.approx(len(everything) * 6 * 32 / sum(everything))


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_a_clock_reads_back(seconds):
    total = 0
    for part in clock_text(seconds).split(":"):
        total = 60 * total + int(part)
    assert total == seconds


def test_a_line_for_people_names_what_the_record_holds():
    line = step_line(record(7) | {"mfu": 0.25}, 100)
    for part in ("step      7/100", "loss 2.5000", "384 tokens/s", "waiting 20 %", "MFU 25.0 %", "ETA 0:46"):
        assert part in line
    assert "MFU" not in step_line(record(7), 100)
    assert "targets" not in line
    assert "loss 2.5000  of 60 targets" in step_line(record(7, targets=60), 100)


@pytest.mark.parametrize("steps", [100, 1_000_000])
@pytest.mark.parametrize("tokens_per_s", [1.5, 12_345_678.0])
def test_a_line_of_80_columns_keeps_loss_speed_and_the_end(steps, tokens_per_s):
    of_a_device = {"host_memory_gb": 123.4, "mfu": 0.25, "eta_s": 99 * 3600, "tokens_per_s": tokens_per_s}
    line = step_line(record(7) | of_a_device, steps, 80)
    assert len(line) <= 80
    for part in ("step ", "loss 2.5000", f"{tokens_per_s:,.0f} tokens/s", "ETA 99:00:00"):
        assert part in line


@pytest.mark.parametrize("first_step", [0, 3, 5, 99])
@pytest.mark.parametrize("torn", ["", '{"step": 6, "los', "not json\n", '{"loss": 1}\n', "[]\n"])
def test_a_run_that_goes_on_keeps_each_step_once(tmp_path, first_step, torn):
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + torn)
    with open_log(folder, first_step, 100) as log:
        log.step(record(first_step + 1))
    assert steps_in(folder) == [*range(1, min(first_step, 5) + 1), first_step + 1]
    aside = ["log.jsonl.damaged"] if torn.endswith("\n") else []  # a job that was killed leaves half a line
    assert sorted(path.name for path in folder.iterdir()) == ["log.jsonl", *aside]


DAMAGE = (b"\xff", b"[" * 100_000, b'{"step": 1' + b"0" * 400 + b"}", b'{"step": NaN}', b'{"step": true}', b"\0", b"{}")


@settings(deadline=None)
@example(damage=[b"\0\r\0"], first_step=3)
@given(st.lists(st.one_of(st.sampled_from(DAMAGE), st.binary(max_size=30)), max_size=4), st.integers(0, 5))
def test_no_byte_in_a_log_keeps_a_run_from_going_on(tmp_path_factory, damage, first_step):
    """What cannot be read is set aside whole, what can be stays, and the report reads all of it."""
    folder = tmp_path_factory.mktemp("a run")
    path = folder / "log.jsonl"
    junk = [line for text in damage for line in io.BytesIO(text + b"\n").readlines() if record_of(line) is None]
    good = [json.dumps({"step": step, "node_hours": 0.5}).encode() + b"\n" for step in range(6)]
    path.write_bytes(b"".join([*junk, *good[:3], *junk, *good[3:], *junk]))
    assert len(read_log(path).loss[0]) == 0
    with open_log(folder, first_step, 100) as log:
        assert log.before["node_hours"] == 0.5
        log.step(record(first_step + 1))
    assert steps_in(folder) == [*range(first_step + 1), first_step + 1]
    beside = folder / "log.jsonl.damaged"
    want = [line for line in 3 * junk if line.strip()]
    assert (beside.read_bytes() if beside.exists() else b"") == b"".join(want)


def test_what_was_logged_is_in_the_file_at_once_and_said_on_standard_output(tmp_path, capsys):
    with open_log(tmp_path, 0, 10) as log:
        for step in (1, 2):
            log.step(record(step))
            assert steps_in(tmp_path)[-1] == step  # a job that is killed now loses nothing
        log.validation({"step": 2, "validation_loss": 3.0, "bits_per_byte": 1.5})
    said = capsys.readouterr().out
    assert "step      1/10  loss" in said
    assert "validation loss 3.0000  bits per byte 1.5000" in said
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0]) == record(1)


def test_a_terminal_gets_a_bar_instead_of_lines(tmp_path, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with open_log(tmp_path, 0, 10) as log:
        log.step(record(4))
    assert "4/10" in terminal.getvalue()
    assert "loss 2.500" in terminal.getvalue()
    assert "step      4" not in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_is_said_once_with_the_step_and_the_file(tmp_path):
    log = open_log(tmp_path, 0, 10)
    log.file.close()
    said = pytest.raises(HpcllmError, match=r"cannot write step 3 to /dev/full: No space left")
    with Path("/dev/full").open("a") as log.file, said, log:
        log.step(record(3))
