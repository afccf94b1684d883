"""State of a training run as datasets and attributes of a checkpoint.

    /model/<parameter>                             global shapes; a name carries no rank
    /optimizer/{exp_avg,exp_avg_sq}/<parameter>    float32
    /optimizer/master/<parameter>                  float32; only where it is not /model itself: 16-bit weights, or
                                                   replicas that hold what a lossy codec made of them
    /feedback/surplus  @layout                     residuals of error feedback: [ rank 0: bucket 0 | .. ][ rank 1: ..
    /tokenizer                                     its JSON, as bytes
    /data@position   /rng@seed                     all that sampler and random numbers need
    /data@{template,template_variables}            of a run on chats: how messages become text, in Jinja and JSON
    /run@{step,updates,config,written_at,loss_scale,good_steps,validation_loss,base}  /run/mesh  /run/versions

Replicas share the writing: each brings pieces, which together are all of the state once. A piece is a range of a flat
bucket, cut anywhere between dp replicas; under tp the parameter itself is rows or columns of the global tensor:

    range 3..13 of this rank's (4, 4)  --boxes-->  three boxes  --shifted by where its shard starts-->  three slabs

A residual is what one rank's codec left out of its own addends, so unlike weights it means nothing to another layout.
/feedback@layout is a hash over the ranks, each with its place in its groups and the parameters, codec and algorithm of
each range: on the same layout the residual comes back bit for bit, on any other it begins anew at zero, which is always
valid (collectives/feedback.py), and the run says so.

One file is all that `generate` and a resumed run need; restore.py reads it. Of a run with adapters it holds these
alone; /run@base is the fingerprint of the frozen weights beside, run.start_from (huggingface/base.py).
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w
import torch
from torch import Tensor

import hpcllm
from hpcllm.checkpoint.folder import file_name
from hpcllm.checkpoint.layout import TEMPLATE, TEMPLATE_VARIABLES, TOKENIZER, Attribute, DatasetSpec
from hpcllm.checkpoint.slabs import Slab, boxes, whole
from hpcllm.checkpoint.writer import WriteReport, prepare, write
from hpcllm.errors import CheckpointError, DataError
from hpcllm.model.shapes import shard_of, split_dim
from hpcllm.optim.flat_buffers import Piece

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.checkpoint.reader import Checkpoint

Shape = tuple[int, ...]

FEEDBACK, FEEDBACK_LAYOUT = "feedback/surplus", "feedback/layout"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run between two steps, its tensors aside."""

    step: int  # steps done
    position: int  # samples consumed
    updates: int  # of the weights: steps, less those that were skipped because a gradient overflowed
    loss_scale: float = 1.0  # of fp16 gradients
    good_steps: int = 0  # without overflow since it last changed
    fingerprint: str  # of the token store it was trained on; empty if it was not
    base: str = ""  # fingerprint of the frozen weights that the file's adapters belong to; empty: it has no adapters
    config: dict[str, Any]  # config.to_tables, for config.from_tables
    mesh: Mapping[str, int]  # axis -> ranks, at the time of writing

    def attributes(self) -> dict[str, Attribute]:
        """The facts as attributes of a file, and when and with which versions they were written."""
        return {
            "run/step": self.step,
            "run/config": tomli_w.dumps(self.config),
            "run/updates": self.updates,
            "run/loss_scale": self.loss_scale,
            "run/good_steps": self.good_steps,
            "run/written_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "data/position": self.position,
            "data/fingerprint": self.fingerprint,
            "rng/seed": int(self.config["run"]["seed"]),
            **({"run/base": self.base} if self.base else {}),
            **{f"run/mesh/{axis}": size for axis, size in self.mesh.items()},
            **{f"run/versions/{name}": version for name, version in versions().items()},
        }


@dataclass(frozen=True)
class Shards:
    """The part of the model's parameters that a rank of tp has."""

    shapes: Mapping[str, Shape]  # global, of the whole model
    rank: int = 0  # in tp
    size: int = 1

    def slabs(self, piece: Piece) -> Iterator[tuple[Slab, Tensor]]:
        """The slabs of global tensors that a piece consists of, each with its memory in the slab's shape."""
        done = 0
        for slab in self.slabs_between(piece.kind, piece.name, piece.start, piece.end):
            yield slab, piece.values[done : done + slab.elements].view(slab.shape)
            done += slab.elements

    def slabs_between(self, kind: str, name: str, start: int, end: int) -> Iterator[Slab]:
        """The slabs of the global tensor <kind>/<name> that are elements start .. end of this rank's part of it."""
        origin, shape = shard_of(name, self.shapes[name], self.rank, self.size)
        for first, size in boxes(shape, start, end):
            yield Slab(f"{kind}/{name}", tuple(o + f for o, f in zip(origin, first, strict=True)), size)

    def writes(self, name: str) -> bool:
        """True if this rank of tp writes its part of a parameter; of what tp replicates, the first rank does."""
        return self.rank == 0 or split_dim(name) is not None


@dataclass(frozen=True)
class Residuals:
    """One rank's residuals of error feedback between two steps, and their place among those of all ranks."""

    arrays: tuple[Tensor, ...]  # float32, the memory itself
    start: int  # of the first one, among the values of all ranks
    total: int  # values of all ranks, not 0
    layout: str  # hash of what the values belong to, see the module's text

    def specs(self) -> dict[str, DatasetSpec]:
        return {FEEDBACK: DatasetSpec((self.total,), "float32")}

    def attributes(self) -> dict[str, Attribute]:
        return {FEEDBACK_LAYOUT: self.layout}

    def slabs(self) -> dict[Slab, Tensor]:
        found, start = {}, self.start
        for array in self.arrays:
            if array.numel():
                found[Slab(FEEDBACK, (start,), (array.numel(),))] = array
            start += array.numel()
        return found


@dataclass(frozen=True, kw_only=True)
class RunState(RunFacts):
    """A run between two steps, as one rank holds it."""

    validation_loss: float | None = None  # after this very step, if it was measured then
    pieces: Sequence[Piece]  # over the dp replicas together: every element of what their stage and tp rank hold, once
    shards: Shards  # what this rank's parameters are of the model's
    owned: frozenset[str]  # names that this stage writes: a tied embedding is on two stages, one owns it
    residuals: Residuals | None = None  # None: there are none, or they are not kept
    tokenizer_json: str
    template: str = ""  # of the chats that it was trained on
    template_variables: Mapping[str, str] = field(default_factory=dict)

    def attributes(self) -> dict[str, Attribute]:
        found = super().attributes() | (self.residuals.attributes() if self.residuals else {})
        if self.validation_loss is not None:
            found["run/validation_loss"] = self.validation_loss
        if self.template:
            found |= {TEMPLATE: self.template, TEMPLATE_VARIABLES: json.dumps(dict(self.template_variables))}
        return found


@dataclass(frozen=True)
class LocalSlabs:
    """The slabs that one rank brings to a file, in the memory itself, which training goes on to change."""

    specs: dict[str, DatasetSpec]
    tensors: dict[Slab, Tensor]  # in the slab's shape


def facts(checkpoint: Checkpoint) -> RunFacts:
    """The inverse of RunFacts.attributes. Not collective. Raises CheckpointError; DataError for a token store."""
    attributes = checkpoint.attributes
    if "train/tokens" in checkpoint.datasets:
        valid = "a file step_00001000.h5 that train wrote, or its run folder"
        raise DataError(f"'{checkpoint.path}' is a token store, no checkpoint; valid: {valid}")
    try:
        config = tomllib.loads(str(attributes["run/config"]))
        if not all(isinstance(table, dict) for table in config.values()):
            raise ValueError("run/config has keys outside its tables")
        _count(attributes["rng/seed"])
        return RunFacts(
            step=_count(attributes["run/step"]),
            position=_count(attributes["data/position"]),
            updates=_count(attributes["run/updates"]),
            loss_scale=float(attributes["run/loss_scale"]),
            good_steps=_count(attributes["run/good_steps"]),
            fingerprint=str(attributes["data/fingerprint"]),
            base=str(attributes.get("run/base", "")),
            config=config,
            mesh={key[9:]: _count(value) for key, value in attributes.items() if key.startswith("run/mesh/")},
        )
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint.path} is not of a training run: {error!r}") from error


def versions() -> dict[str, str]:
    """Versions of hpcllm and of the libraries that decide its results."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "mpi4py", "numpy", "h5py")}
    started = sys.modules.get("mpi4py.MPI")  # a checkpoint can be written without it
    library = started.Get_library_version().split("\n")[0].rstrip("\0") if started else "not started"
    return {"hpcllm": hpcllm.__version__, "python": platform.python_version(), "mpi": library, **packages}


def find_residuals(arrays: Mapping[str, Tensor], comm: MPI.Intracomm) -> Residuals | None:
    """The place of this rank's residuals in a file; None if no rank has any. Collective over comm.

    arrays: what an array belongs to, in words that differ wherever its values would mean something else -> its memory.
    """
    size = sum(array.numel() for array in arrays.values())
    words = repr((comm.rank, comm.size, [(what, array.numel()) for what, array in arrays.items()]))
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    mine = np.array([size, int.from_bytes(digest, "little") if size else 0], dtype=np.uint64)
    sums, ends = np.empty_like(mine), np.empty_like(mine)
    comm.Allreduce(mine, sums)  # of unsigned words, so it wraps
    comm.Scan(mine, ends)
    if not sums[0]:
        return None
    return Residuals(tuple(arrays.values()), int(ends[0]) - size, int(sums[0]), f"{int(sums[1]):016x}")


def local_slabs(state: RunState, rank: int) -> LocalSlabs:
    """All slabs that one rank writes. rank: in the whole job; the first one brings what all have."""
    specs: dict[str, DatasetSpec] = {}
    tensors: dict[Slab, Tensor] = {}
    for piece in state.pieces:
        if piece.name in state.owned and state.shards.writes(piece.name):
            dtype = str(piece.values.dtype).removeprefix("torch.")
            specs[f"{piece.kind}/{piece.name}"] = DatasetSpec(state.shards.shapes[piece.name], dtype)
            tensors.update(state.shards.slabs(piece))
    if state.residuals:
        specs |= state.residuals.specs()
        tensors |= state.residuals.slabs()
    if rank == 0 and state.tokenizer_json:
        text = torch.frombuffer(bytearray(state.tokenizer_json.encode()), dtype=torch.uint8)
        specs[TOKENIZER] = DatasetSpec(tuple(text.shape), "uint8")
        tensors[whole(TOKENIZER, tuple(text.shape))] = text
    return LocalSlabs(specs, tensors)


def save(folder: Path, state: RunState, world: MPI.Intracomm) -> WriteReport:
    """Write the checkpoint of `state.step` into `folder`. Collective over world; background.py does it behind a run.

    Raises CheckpointError on all ranks; a file of the same name is then untouched.
    """
    mine = local_slabs(state, world.rank)
    plan = prepare(world, mine.specs, mine.tensors.keys())
    return write(folder / file_name(state.step), world, plan, arrays_of(mine.tensors), state.attributes())


def arrays_of(tensors: Mapping[Slab, Tensor]) -> Callable[[Slab], np.ndarray]:
    """The function by which the writer gets a slab's array: its memory, copied only if it is on a device."""

    def array(slab: Slab) -> np.ndarray:
        values = tensors[slab].detach().cpu().contiguous()
        return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()

    return array


def as_tensor(values: np.ndarray, dtype: str) -> Tensor:
    """Stored values as a tensor in the same memory. dtype: their element type, where bfloat16 is stored as uint16."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _count(value: Attribute) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a whole number from 0 on")
    return value
