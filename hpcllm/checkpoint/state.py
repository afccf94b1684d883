"""What a training run keeps, as datasets and attributes of a checkpoint.

    /model/<parameter>                             global shapes; a name carries no rank
    /optimizer/{exp_avg,exp_avg_sq}/<parameter>
    /tokenizer                                     its JSON, as bytes
    /data@position   /rng@seed                     all that sampler and random numbers need
    /run@{step,config,written_at}  /run/mesh  /run/versions

Replicas hold the same bits, so they share the writing. One file is all that `generate` and a resumed run need;
restore.py reads it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from mpi4py import MPI

import hpcllm
from hpcllm.checkpoint.folder import file_name
from hpcllm.checkpoint.layout import EXP_AVG, EXP_AVG_SQ, MODEL, TOKENIZER, Attribute, DatasetSpec
from hpcllm.checkpoint.slabs import assign_writers, whole
from hpcllm.checkpoint.writer import WriteReport, write

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run between two steps, as one rank holds it."""

    step: int  # steps done
    position: int  # samples consumed
    config: Mapping[str, Mapping[str, Any]]  # config.to_tables
    parameters: Tensors  # of this pipeline stage, by name
    exp_avg: Tensors  # AdamW's moments, by the same names
    exp_avg_sq: Tensors
    owned: frozenset[str]  # names that this stage writes: a tied embedding is on two stages, one owns it
    tokenizer_json: str
    mesh: Mapping[str, int]  # axis -> ranks, at the time of writing


def save(folder: Path, state: RunState, world: MPI.Intracomm, dp_rank: int, dp_size: int) -> WriteReport:
    """Write the checkpoint of `state.step` into `folder`. Collective over world; dp_rank of dp_size replicas is ours.

    Raises CheckpointError on all ranks; a file of the same name is then untouched.
    """
    tensors = {f"{kind}/{name}": tensor for kind, name, tensor in _kept(state) if name in state.owned}
    specs = {key: DatasetSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()}
    writer = assign_writers({key: t.numel() * t.element_size() for key, t in tensors.items()}, dp_size)
    slabs = {whole(key, tuple(t.shape)): _array(t) for key, t in tensors.items() if writer[key] == dp_rank}
    if world.rank == 0 and state.tokenizer_json:
        text = np.frombuffer(state.tokenizer_json.encode(), dtype=np.uint8)
        specs[TOKENIZER] = DatasetSpec(text.shape, "uint8")
        slabs[whole(TOKENIZER, text.shape)] = text
    return write(folder / file_name(state.step), world, specs, slabs, _attributes(state))


def _kept(state: RunState) -> Iterator[tuple[str, str, torch.Tensor]]:
    for kind, tensors in ((MODEL, state.parameters), (EXP_AVG, state.exp_avg), (EXP_AVG_SQ, state.exp_avg_sq)):
        for name, tensor in tensors.items():
            yield kind, name, tensor


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as numpy sees it; a copy only if it is on a device or strided."""
    values = tensor.detach().cpu().contiguous()
    return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()


def _attributes(state: RunState) -> dict[str, Attribute]:
    return {
        "run/step": state.step,
        "run/config": tomli_w.dumps(state.config),
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
