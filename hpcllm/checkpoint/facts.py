"""What a checkpoint says of its run, the tensors aside: attributes, written and read in one place.

/run@{step,updates,config,written_at,loss_scale,good_steps}  /run/mesh  /run/versions  /data@position  /rng@seed
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tomli_w

import hpcllm
from hpcllm.checkpoint.layout import Attribute
from hpcllm.errors import CheckpointError

if TYPE_CHECKING:
    from hpcllm.checkpoint.reader import Checkpoint


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run between two steps, its tensors aside."""

    step: int  # steps done
    position: int  # samples consumed
    seed: int
    updates: int  # of the weights: steps, less those that were skipped because a gradient overflowed
    loss_scale: float = 1.0  # of fp16 gradients
    good_steps: int = 0  # without overflow since it last changed
    config: dict[str, Any]  # config.to_tables, for config.from_tables
    mesh: Mapping[str, int]  # axis -> ranks, at the time of writing


def attributes_of(run: RunFacts) -> dict[str, Attribute]:
    """The facts as attributes of a file, and when and with which versions they were written."""
    return {
        "run/step": run.step,
        "run/config": tomli_w.dumps(run.config),
        "run/updates": run.updates,
        "run/loss_scale": run.loss_scale,
        "run/good_steps": run.good_steps,
        "run/written_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "data/position": run.position,
        "rng/seed": run.seed,
        **{f"run/mesh/{axis}": size for axis, size in run.mesh.items()},
        **{f"run/versions/{name}": version for name, version in versions().items()},
    }


def facts(checkpoint: Checkpoint) -> RunFacts:
    """The inverse of attributes_of. Not collective. Raises CheckpointError if the file is of no run."""
    attributes = checkpoint.attributes
    try:
        config = tomllib.loads(str(attributes["run/config"]))
        if not all(isinstance(table, dict) for table in config.values()):
            raise ValueError("run/config has keys outside its tables")
        return RunFacts(
            step=_count(attributes["run/step"]),
            position=_count(attributes["data/position"]),
            seed=_count(attributes["rng/seed"]),
            updates=_count(attributes["run/updates"]),
            loss_scale=float(attributes["run/loss_scale"]),
            good_steps=_count(attributes["run/good_steps"]),
            config=config,
            mesh={key[9:]: _count(value) for key, value in attributes.items() if key.startswith("run/mesh/")},
        )
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint.path} is not of a training run: {error!r}") from error


def _count(value: Attribute) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a whole number from 0 on")
    return value


def versions() -> dict[str, str]:
    """Of us and of what we stand on."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "mpi4py", "numpy", "h5py")}
    started = sys.modules.get("mpi4py.MPI")  # a checkpoint can be written without it
    library = started.Get_library_version().split("\n")[0].rstrip("\0") if started else "not started"
    return {"hpcllm": hpcllm.__version__, "python": platform.python_version(), "mpi": library, **packages}
