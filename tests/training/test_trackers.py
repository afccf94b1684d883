"""Trackers get every number of every step, in groups, with run file and environment; none of them stops a run."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_log import record

from hpcllm.errors import ConfigError
from hpcllm.training import trackers
from hpcllm.training.log import Log, open_log
from hpcllm.training.trackers import check_trackers, tag, tagged

RUN_FILE = '[run]\nname = "a run"\nsteps = 100\n'
START = {"step": 0, "start": {"ranks": 2, "mesh": {"dp": 1, "pp": 2}, "versions": {"torch": "2.9"}, "slurm": {}}}
LOG_A_RUN = """
import json, sys
from pathlib import Path
from hpcllm.training.log import open_log
folder, first_step, records = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
with open_log(folder, first_step, 100, ["wandb", "mlflow"]) as log:
    for record in records:
        log.write(record)
    assert list(log.trackers) == ["wandb", "mlflow"]
"""


def start_of_a_run(folder: Path, first_step: int, records: list) -> None:
    """One start in a process of its own, as it is in a job: no home folder, no network asked for."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RUN_FILE, encoding="utf-8")
    words = [str(folder), str(first_step), json.dumps(records)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "MLFLOW"))}
    done = subprocess.run(
        [sys.executable, "-c", LOG_A_RUN, *words],
        env={**kept, "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "tracker" not in done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of a run of two starts that wandb and MLflow followed, alone in its own folder."""
    folder = tmp_path_factory.mktemp("trackers") / "a run"
    start_of_a_run(folder, 0, [START, record(1), record(2) | {"loss": math.nan}, record(3)])
    start_of_a_run(folder, 3, [START | {"step": 3}, record(4)])
    return folder


def test_two_trackers_write_into_the_run_folder_alone(folder):
    assert [path.name for path in folder.parent.iterdir()] == ["a run"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "log.jsonl",
        "mlruns",
        "run.toml",
        "trackers.json",
        "wandb",
    ]


def test_every_number_has_a_group_and_no_two_have_one_name():
    keys = [*record(1), "validation_loss", "bits_per_byte", "host_memory_gb", "time_compute_s", "time_checkpoint_s"]
    keys += ["energy_kwh", "node_hours", "cost", "checkpoint_s", "checkpoint_bytes", "gradients_bytes", "mfu"]
    keys += ["parameters_memory_bytes", "parameters_bytes", "forward_ratio", "loss_scale"]
    found = {key: tag(key) for key in set(keys) - {"step"}}
    assert len(set(found.values())) == len(found)
    groups = {name.partition("/")[0] for name in found.values()}
    assert groups == {"loss", "time", "speed", "communication", "memory", "energy", "checkpoint", "optimizer"}
    assert tag("time_compute_s") == "time/compute_s"
    assert tagged({"step": 1, "loss": 2, "samples": "ab", "grad_norm": None, "x": True}) == {"loss/training": 2.0}


def test_tensorboard_gets_every_number_of_every_step_and_the_run_file(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    with open_log(tmp_path, 0, 10, ["tensorboard"]) as log:
        log.write(START)
        for step in (1, 2, 3):
            log.step(record(step))
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(tagged(record(1)))
    assert [(e.step, e.value) for e in events.Scalars("loss/training")] == [(step, 2.5) for step in (1, 2, 3)]
    assert b'name = "a run"' in events.Tensors("run file/text_summary")[0].tensor_proto.string_val[0]


def test_mlflow_keeps_one_run_over_two_starts(folder):
    (found,) = (path for path in (folder / "mlruns").glob("*/*") if (path / "metrics").exists())
    assert found.name == json.loads((folder / "trackers.json").read_text())["mlflow"]
    assert {str(path.relative_to(found / "metrics")) for path in (found / "metrics").glob("*/*")} == set(
        tagged(record(1))
    )
    lines = (found / "metrics" / "loss" / "training").read_text().splitlines()
    assert [(line.split()[1], int(line.split()[2])) for line in lines] == [("2.5", step) for step in (1, 3, 4)]
    assert (found / "artifacts" / "run.toml").read_text() == RUN_FILE
    assert (found / "tags" / "start.versions.torch").read_text() == "2.9"
    assert (found / "tags" / "run.steps").read_text() == "100"


def wandb_records(file: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB's log format behind a head of 7 bytes, in blocks of 32 KiB."""
    place, record = 7, b""
    while place + 7 <= len(file):
        left = 32768 - place % 32768
        if left < 7:  # a block's end is filled with zeros
            place += left
            continue
        length, kind = struct.unpack_from("<HB", file, place + 4)
        record += file[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_writes_offline_under_one_name(folder):
    from wandb.proto import wandb_internal_pb2

    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    name = json.loads((folder / "trackers.json").read_text())["wandb"]
    assert [path.name for path in files] == [f"run-{name}.wandb"] * 2
    assert (files[0].parent / "files" / "run.toml").read_text() == RUN_FILE
    losses, keys, config = [], set(), {}
    for path in files:
        for data in wandb_records(path.read_bytes()):
            found = wandb_internal_pb2.Record.FromString(data)
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in found.history.item}
            if items:
                losses.append((json.loads(items["step"]), json.loads(items["loss/training"])))
                keys |= {key for key in items if not key.startswith("_")}
            config |= {"/".join(item.nested_key) or item.key: item.value_json for item in found.config.update}
    assert str(losses) == str([(1, 2.5), (2, math.nan), (3, 2.5), (4, 2.5)])  # no NaN equals another
    assert keys == {"step", *tagged(record(1))}
    assert (config["run.steps"], config["start.versions.torch"], config["start.mesh.pp"]) == ("100", '"2.9"', "2")


def test_a_missing_package_is_a_user_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for name in ("wandb", "mlflow"):
        with pytest.raises(ConfigError, match=rf"log\.trackers names {name}.*pip install {trackers.PACKAGES[name]}"):
            check_trackers(["tensorboard", name])
    check_trackers(["tensorboard"])  # the default, which is left out with a line in the log
    assert set(trackers.OPENERS) == set(trackers.MODULES)


def test_a_tracker_that_fails_is_told_of_once_and_the_log_goes_on(tmp_path, capsys):
    class Failing:
        calls = 0

        def log(self, *_: object) -> None:
            self.calls += 1
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            raise AssertionError("it was left out")

    failing = Failing()
    with open_log(tmp_path, 0, 10) as log:
        assert isinstance(log, Log)
        log.trackers["wandb"] = failing
        for step in (1, 2):
            log.step(record(step))
    assert failing.calls == 1
    assert capsys.readouterr().out.count("tracker wandb is left out from now on: OSError: [Errno 28] No space") == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
