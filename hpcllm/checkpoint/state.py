"""What a training run keeps, as datasets and attributes of a checkpoint.

    /model/<parameter>                             global shapes; a name carries no rank
    /optimizer/{exp_avg,exp_avg_sq}/<parameter>    float32
    /optimizer/master/<parameter>                  float32; only where it is not /model itself: 16-bit weights, or
    /tokenizer  its JSON, as bytes                 replicas that hold what a lossy codec made of them
    /data@position   /rng@seed                     all that sampler and random numbers need
    /run@{step,updates,config,written_at,loss_scale,good_steps}  /run/mesh  /run/versions

Replicas share the writing: each brings pieces, which together are all of the state once. One file is all that
`generate` and a resumed run need; restore.py reads it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from mpi4py import MPI

import hpcllm
from hpcllm.checkpoint.folder import file_name
from hpcllm.checkpoint.layout import TOKENIZER, Attribute, DatasetSpec
from hpcllm.checkpoint.pieces import Shards
from hpcllm.checkpoint.slabs import Slab, whole
from hpcllm.checkpoint.writer import WriteReport, write
from hpcllm.optim.pieces import Piece


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run between two steps, as one rank holds it."""

    step: int  # steps done
    position: int  # samples consumed
    updates: int  # of the weights: steps, less those that were skipped because a gradient overflowed
    loss_scale: float = 1.0  # of fp16 gradients
    good_steps: int = 0  # without overflow since it last changed
    config: Mapping[str, Mapping[str, Any]]  # config.to_tables
    pieces: Sequence[Piece]  # over the dp replicas together: every element of what their stage and tp rank hold, once
    shards: Shards  # what this rank's parameters are of the model's
    owned: frozenset[str]  # names that this stage writes: a tied embedding is on two stages, one owns it
    tokenizer_json: str
    mesh: Mapping[str, int]  # axis -> ranks, at the time of writing


def save(folder: Path, state: RunState, world: MPI.Intracomm) -> WriteReport:
    """Write the checkpoint of `state.step` into `folder`. Collective over world.

    Raises CheckpointError on all ranks; a file of the same name is then untouched.
    """
    specs: dict[str, DatasetSpec] = {}
    slabs: dict[Slab, np.ndarray] = {}
    for piece in state.pieces:
        if piece.name in state.owned and state.shards.writes(piece.name):
            dtype = str(piece.values.dtype).removeprefix("torch.")
            specs[f"{piece.kind}/{piece.name}"] = DatasetSpec(state.shards.shapes[piece.name], dtype)
            slabs.update((slab, _array(values)) for slab, values in state.shards.slabs(piece))
    if world.rank == 0 and state.tokenizer_json:
        text = np.frombuffer(state.tokenizer_json.encode(), dtype=np.uint8)
        specs[TOKENIZER] = DatasetSpec(text.shape, "uint8")
        slabs[whole(TOKENIZER, text.shape)] = text
    return write(folder / file_name(state.step), world, specs, slabs, attributes(state))


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as numpy sees it; a copy only if it is on a device or strided."""
    values = tensor.detach().cpu().contiguous()
    return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()


def attributes(state: RunState) -> dict[str, Attribute]:
    """All that a checkpoint says of its run, the tensors aside; restore.facts reads it."""
    return {
        "run/step": state.step,
        "run/config": tomli_w.dumps(state.config),
        "run/updates": state.updates,
        "run/loss_scale": state.loss_scale,
        "run/good_steps": state.good_steps,
        "run/written_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "data/position": state.position,
        "rng/seed": int(state.config["run"]["seed"]),
        **{f"run/mesh/{axis}": size for axis, size in state.mesh.items()},
        **{f"run/versions/{name}": version for name, version in _versions().items()},
    }


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "mpi4py", "numpy", "h5py")}
    library = MPI.Get_library_version().split("\n")[0].rstrip("\0")
    return {"hpcllm": hpcllm.__version__, "python": platform.python_version(), "mpi": library, **packages}
