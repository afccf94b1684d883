"""A checkpoint back into a run, or into a model alone. Starts no MPI: `generate` works where only a login node is.

Any (dp, pp) reads what any other wrote: a stage asks for the names that it has. What is in the file: state.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpcllm.checkpoint.layout import EXP_AVG, EXP_AVG_SQ, MODEL, TOKENIZER
from hpcllm.checkpoint.reader import Checkpoint, raise_together
from hpcllm.errors import CheckpointError

Shape = tuple[int, ...]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a checkpoint says of its run, the tensors aside."""

    step: int
    position: int
    seed: int
    config: dict[str, Any]  # for config.from_tables
    mesh: dict[str, int]


def restore(
    checkpoint: Checkpoint,
    shapes: Mapping[str, Shape],
    parameters: Tensors,
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
) -> RunFacts:
    """Copy a checkpoint into the tensors of this rank, in place. Collective over checkpoint.comm.

    shapes: name -> global shape of the whole model (model.shapes.parameter_shapes), so that a rank that holds one
    stage still notices a tensor too many. A mapping without tensors reads nothing: `generate` gives no moments.
    Values are converted to the type of the tensor; where that is the stored type, to the bit.
    Raises CheckpointError on all ranks, listing the first three differences or what is damaged.
    """
    error = None
    try:
        asked = {MODEL: parameters, EXP_AVG: exp_avg, EXP_AVG_SQ: exp_avg_sq}
        for kind, tensors in asked.items():
            _check_names(checkpoint, kind, shapes if tensors else {}, tensors)
        for kind, tensors in asked.items():
            _copy(checkpoint, kind, tensors)
        known = facts(checkpoint)
    except CheckpointError as fault:
        error = fault
    raise_together(checkpoint.comm, error)
    return known


def facts(checkpoint: Checkpoint) -> RunFacts:
    """Step, position, seed, config and mesh. Not collective. Raises CheckpointError if the file is of no run."""
    attributes = checkpoint.attributes
    try:
        return RunFacts(
            step=int(attributes["run/step"]),
            position=int(attributes["data/position"]),
            seed=int(attributes["rng/seed"]),
            config=tomllib.loads(str(attributes["run/config"])),
            mesh={key[9:]: int(value) for key, value in attributes.items() if key.startswith("run/mesh/")},
        )
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path} is not of a training run: {error!r}") from error


def tokenizer_json(checkpoint: Checkpoint) -> str:
    """The tokenizer of the run as JSON; empty if it had none. Not collective. Raises CheckpointError."""
    if TOKENIZER not in checkpoint.datasets:
        return ""
    try:
        return checkpoint.read_whole(TOKENIZER).tobytes().decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{checkpoint.path}: /{TOKENIZER} is not text: {error}") from error


def _check_names(checkpoint: Checkpoint, kind: str, shapes: Mapping[str, Shape], tensors: Tensors) -> None:
    """The file has the model's tensors, no more and no others, and ours are whole ones of those."""
    wanted = {f"{kind}/{name}": shape for name, shape in shapes.items()}
    stored = {key: item.spec.shape for key, item in checkpoint.datasets.items() if key.startswith(f"{kind}/")}
    faults = [f"{key} is missing" for key in wanted if key not in stored]
    faults += [f"{key} is not of this model" for key in stored if wanted and key not in wanted]
    both = {key: shape for key, shape in wanted.items() if key in stored}
    faults += [f"{key} has shape {stored[key]}, not {shape}" for key, shape in both.items() if stored[key] != shape]
    ours = {f"{kind}/{name}": tuple(tensor.shape) for name, tensor in tensors.items()}
    faults += [
        f"{key} has shape {has} here, not {wanted.get(key)}" for key, has in ours.items() if has != wanted.get(key)
    ]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {'; '.join(faults[:3])}{more}")


def _copy(checkpoint: Checkpoint, kind: str, tensors: Tensors) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(_tensor(checkpoint, f"{kind}/{name}"))


def _tensor(checkpoint: Checkpoint, key: str) -> torch.Tensor:
    values = torch.from_numpy(checkpoint.read_whole(key))
    return values.view(torch.bfloat16) if checkpoint.datasets[key].spec.dtype == "bfloat16" else values
