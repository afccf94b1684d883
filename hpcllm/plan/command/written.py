"""A predicted layout as a run file: what differs from the defaults, and where it comes from. Pure but for the file.

    layout + model + batch --> run_config.config_of --> keys that differ --> RUN.toml --> train --dry-run --> train

What the planner does not know stays the user's: the token store, the learning rate, where the run lives.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from hpcllm import config as run_file
from hpcllm import machines
from hpcllm.config import Config, ModelConfig, RunConfig
from hpcllm.errors import ConfigError
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.run_config import config_of
from hpcllm.plan.training import training

STORE = 'store = ""'
SAID = {  # also where it is as by default: what a layout is
    "data": ("sequence_length", "global_batch"),
    "mesh": ("dp", "pp", "tp"),
    "pipeline": ("schedule", "microbatches"),
}


def write(path: Path, found: Prediction, machine: str, tokens: float | None) -> None:
    """A new file. machine: as it was asked for. Raises ConfigError if it is there, or cannot be written."""
    text = run_text(found, machine, tokens)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--write {str(path)!r} cannot be written: {error.strerror or error}") from error


def run_text(found: Prediction, machine: str, tokens: float | None) -> str:
    """The run file; tokens: to be trained on, in whole steps; None: a usual number."""
    import tomli_w

    tables = _different(_config(found, machine, tokens))
    data = tables.pop("data")
    body = [tomli_w.dumps({title: table}) for title, table in tables.items()]
    store = f"{STORE} # to be filled in: what `python -m hpcllm prepare` wrote\n"
    body.insert(2, tomli_w.dumps({"data": data}).replace("[data]\n", "[data]\n" + store))
    return "\n".join([*_head(found), "", *body])


def _config(found: Prediction, machine: str, tokens: float | None) -> Config:
    config = config_of(found.model, found.layout, found.global_batch)
    name = f"{found.model.name.replace(' ', '')}-{found.layout.devices}"
    steps = math.ceil(training(found, tokens).tokens / (found.global_batch * found.model.sequence))
    known = machine if machine in machines.names() else str(Path(machine).resolve())
    run = RunConfig(name=name, steps=steps, machine=known)
    return dataclasses.replace(config, run=run)


def _different(config: Config) -> dict[str, dict[str, Any]]:
    """Table -> keys that have other values than a run file without them, preset and all."""
    usual = run_file.to_tables(Config())
    usual["model"] = dataclasses.asdict(ModelConfig()) | run_file.preset(config.model.preset)
    tables = {
        title: {key: value for key, value in table.items() if value != usual[title][key] or key in SAID.get(title, ())}
        for title, table in run_file.to_tables(config).items()
    }
    tables["model"] = {"preset": config.model.preset} | tables["model"]
    if config.pipeline.chunks == 1:
        del tables["pipeline"]["chunks"]
    return {title: table for title, table in tables.items() if table}


def _head(found: Prediction) -> list[str]:
    worst, device, count = found.largest, found.machine.device, training(found).nodes
    return [
        f"# By `hpcllm plan` for {found.layout.devices} devices of {found.machine.name} ({count} node"
        f"{'s' * (count > 1)}). Predicted:",
        f"#   a step {found.iteration_time_s:.4g} s, {found.tokens_per_s:,.0f} tokens/s, MFU {found.mfu:.1%}",
        f"#   memory {worst.device_bytes / 1e9:.1f} of {device.usable_bytes / 1e9:.1f} GB on stage {worst.stage}",
        "# `python -m hpcllm train --dry-run` checks it; keys and what they mean: hpcllm/config.py.",
    ]
