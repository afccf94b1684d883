"""Trackers of a run beside log.jsonl, on rank 0 alone: log.trackers = ["tensorboard", "wandb", "mlflow"].

    log.jsonl record --> tagged: {"loss": 2.5} -> {"loss/training": 2.5} --> Tracker.log
    run.toml, start record (versions, job, mesh) --------------------------> Tracker.attach

Everything lies in the run folder and no network is asked for, unless the user's environment says otherwise (WANDB_MODE,
MLFLOW_TRACKING_URI). A later start goes on in the same run of the tracker, whose name stands in trackers.json.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hpcllm.config.input_files import read_text
from hpcllm.errors import ConfigError
from hpcllm.system.output import write_whole

MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # also the names of the extras
PACKAGES = MODULES | {"mlflow": "mlflow-skinny"}  # that pip installs
PROJECT = "hpcllm"
MOST_PARAMETER_CHARACTERS = 500  # what MLflow's file store takes
TAGS = {  # of keys whose group their name does not say
    "loss": "loss/training",
    "validation_loss": "loss/validation",
    "bits_per_byte": "loss/bits_per_byte",
    "step_s": "time/step_s",
    "eta_s": "time/eta_s",
    "tokens_per_s": "speed/tokens_per_s",
    "tflops_per_device": "speed/tflops_per_device",
    "mfu": "speed/mfu",
    "memory_gb": "memory/gb",
    "host_memory_gb": "memory/host_gb",
    "tokens_per_kwh": "energy/tokens_per_kwh",
}
GROUPS = {  # beginning or end of a key -> group
    "communication": ("communication_", "_plain_bytes", "_ratio"),
    "memory": ("_memory_bytes", "_memory_predicted_bytes"),
    "time": ("time_",),
    "checkpoint": ("checkpoint_",),
    "energy": ("energy_", "cost", "_hours"),
    "optimizer": ("learning_rate", "grad_norm", "loss_scale", "skipped_steps", "targets"),
}


class Tracker(Protocol):
    """Takes the numbers of a run, its run file and its environment. Any call may raise; the log then leaves it out."""

    def attach(self, run_file: str, start: Mapping[str, Any]) -> None:
        """Keep the run file, TOML, and the description of a start: versions, job, mesh."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step, by tag."""

    def close(self) -> None:
        """End this start."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker whose package is missing; TensorBoard, the default, is then left out instead."""
    for name in names:
        if name != "tensorboard" and importlib.util.find_spec(MODULES[name]) is None:
            raise ConfigError(
                f"log.trackers names {name}, whose package is not installed: pip install {PACKAGES[name]}; "
                "or leave it out of log.trackers"
            )


def open_tracker(name: str, folder: Path, first_step: int) -> Tracker:
    """Open a tracker of a run that goes on from first_step. Raises ImportError, and whatever its package raises."""
    return OPENERS[name](folder, first_step)


def tag(key: str) -> str:
    """Name of a logged number in trackers, with its group: 'gradients_bytes' -> 'communication/gradients_bytes'."""
    if key in TAGS or "/" in key:
        return TAGS.get(key, key)
    for group, parts in GROUPS.items():
        if any(key.startswith(part) or key.endswith(part) for part in parts):
            return f"{group}/{key.removeprefix(f'{group}_')}"
    return f"communication/{key}" if key.endswith("_bytes") else f"run/{key}"


def tagged(record: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a record, by tag."""
    return {
        tag(key): float(value)
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"run": {"steps": 6}} -> {"run.steps": 6}."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _remembered(folder: Path, name: str, make: Callable[[], str]) -> str:
    """Return the name under which a tracker knows this run, made and noted in trackers.json by the first start."""
    path = folder / "trackers.json"
    try:
        known = json.loads(read_text(path))
    except (ValueError, RecursionError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    if not isinstance(known.get(name), str):
        known[name] = make()
        write_whole(path, json.dumps(known) + "\n")
    return str(known[name])


class TensorBoard:
    """Event files beside log.jsonl."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1)
        self.first_step = first_step

    def attach(self, run_file: str, start: Mapping[str, Any]) -> None:
        texts = {"run file": run_file, "start": json.dumps(start, indent=1)}
        for name, text in texts.items():
            indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown for: as it is
            self.writer.add_text(name, indented, self.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync RUN/wandb/offline-run-*` uploads it."""

    def __init__(self, folder: Path, _: int) -> None:
        for kind in ("CACHE", "CONFIG", "DATA"):
            os.environ.setdefault(f"WANDB_{kind}_DIR", str(folder / "wandb"))  # else below the home folder
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=folder.name,
            id=_remembered(folder, "wandb", lambda: uuid.uuid4().hex[:8]),
            dir=str(folder),
            mode=mode,
            resume=None if mode == "offline" else "allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self.run.define_metric("*", step_metric="step")  # a later start may begin at an earlier step

    def attach(self, run_file: str, start: Mapping[str, Any]) -> None:
        tables = {**tomllib.loads(run_file), "start": dict(start)}
        self.run.config.update(_flat(tables), allow_val_change=True)
        copy = Path(self.run.dir) / "run.toml"  # its files are kept with the run
        copy.write_text(run_file, encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """MLflow, in RUN/mlruns unless MLFLOW_TRACKING_URI says otherwise: `mlflow ui --backend-store-uri RUN/mlruns`."""

    def __init__(self, folder: Path, _: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it wants a database
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (folder.resolve() / "mlruns").as_uri())
        self.id = _remembered(folder, "mlflow", lambda: self._new_run(folder.name))
        self.client.update_run(self.id, status="RUNNING")

    def _new_run(self, name: str) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self.client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else self.client.create_experiment(experiment)
        return str(self.client.create_run(place, run_name=name).info.run_id)

    def attach(self, run_file: str, start: Mapping[str, Any]) -> None:
        # a parameter of MLflow can never be changed, but a run file can between two starts: so its keys are tags
        for key, value in _flat({**tomllib.loads(run_file), "start": dict(start)}).items():
            self.client.set_tag(self.id, key, str(value)[:MOST_PARAMETER_CHARACTERS])
        self.client.log_text(self.id, run_file, "run.toml")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        found = [Metric(key, value, now_ms, step) for key, value in values.items() if math.isfinite(value)]
        self.client.log_batch(self.id, metrics=found)

    def close(self) -> None:
        self.client.set_terminated(self.id)


OPENERS: dict[str, Callable[[Path, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
