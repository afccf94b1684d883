"""What a training run keeps, as datasets and attributes of a checkpoint.

    /model/<parameter>                             global shapes; a name carries no rank
    /optimizer/{exp_avg,exp_avg_sq}/<parameter>    float32
    /optimizer/master/<parameter>                  float32; only where it is not /model itself: 16-bit weights, or
                                                   replicas that hold what a lossy codec made of them
    /feedback/surplus  @layout                     what error feedback owes, see surplus.py
    /tokenizer                                     its JSON, as bytes
    /data@position   /rng@seed                     all that sampler and random numbers need
    /run@{step,updates,config,written_at,loss_scale,good_steps,validation_loss}  /run/mesh  /run/versions

Replicas share the writing: each brings pieces, which together are all of the state once. One file is all that
`generate` and a resumed run need; restore.py reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.checkpoint.facts import RunFacts, attributes_of
from hpcllm.checkpoint.folder import file_name
from hpcllm.checkpoint.layout import TOKENIZER, Attribute, DatasetSpec
from hpcllm.checkpoint.pieces import Shards
from hpcllm.checkpoint.slabs import Slab, whole
from hpcllm.checkpoint.surplus import Surplus
from hpcllm.checkpoint.writer import WriteReport, prepare, write
from hpcllm.optim.pieces import Piece


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run between two steps, as one rank holds it."""

    step: int  # steps done
    position: int  # samples consumed
    updates: int  # of the weights: steps, less those that were skipped because a gradient overflowed
    loss_scale: float = 1.0  # of fp16 gradients
    good_steps: int = 0  # without overflow since it last changed
    validation_loss: float | None = None  # after this very step, if it was measured then
    config: Mapping[str, Mapping[str, Any]]  # config.to_tables
    pieces: Sequence[Piece]  # over the dp replicas together: every element of what their stage and tp rank hold, once
    shards: Shards  # what this rank's parameters are of the model's
    owned: frozenset[str]  # names that this stage writes: a tied embedding is on two stages, one owns it
    surplus: Surplus | None = None  # None: nothing is owed, or it is not kept
    tokenizer_json: str
    mesh: Mapping[str, int]  # axis -> ranks, at the time of writing


@dataclass(frozen=True)
class Holdings:
    """What one rank brings to a file: the memory itself, which training goes on to change."""

    specs: dict[str, DatasetSpec]
    tensors: dict[Slab, torch.Tensor]  # in the slab's shape


def holdings(state: RunState, rank: int) -> Holdings:
    """rank: in the whole job; the first one brings what all have."""
    specs: dict[str, DatasetSpec] = {}
    tensors: dict[Slab, torch.Tensor] = {}
    for piece in state.pieces:
        if piece.name in state.owned and state.shards.writes(piece.name):
            dtype = str(piece.values.dtype).removeprefix("torch.")
            specs[f"{piece.kind}/{piece.name}"] = DatasetSpec(state.shards.shapes[piece.name], dtype)
            tensors.update(state.shards.slabs(piece))
    if state.surplus:
        specs |= state.surplus.specs()
        tensors |= state.surplus.slabs()
    if rank == 0 and state.tokenizer_json:
        text = torch.frombuffer(bytearray(state.tokenizer_json.encode()), dtype=torch.uint8)
        specs[TOKENIZER] = DatasetSpec(tuple(text.shape), "uint8")
        tensors[whole(TOKENIZER, tuple(text.shape))] = text
    return Holdings(specs, tensors)


def save(folder: Path, state: RunState, world: MPI.Intracomm) -> WriteReport:
    """Write the checkpoint of `state.step` into `folder`. Collective over world; background.py does it behind a run.

    Raises CheckpointError on all ranks; a file of the same name is then untouched.
    """
    mine = holdings(state, world.rank)
    plan = prepare(world, mine.specs, mine.tensors.keys())
    return write(folder / file_name(state.step), world, plan, arrays_of(mine.tensors), attributes(state))


def arrays_of(tensors: Mapping[Slab, torch.Tensor]) -> Callable[[Slab], np.ndarray]:
    """What the writer asks for its bytes: a tensor's memory as numpy sees it, a copy only if it is on a device."""

    def array(slab: Slab) -> np.ndarray:
        values = tensors[slab].detach().cpu().contiguous()
        return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()

    return array


def attributes(state: RunState) -> dict[str, Attribute]:
    """All that a checkpoint says of its run, the tensors aside; facts.py and surplus.py read it."""
    run = RunFacts(
        step=state.step,
        position=state.position,
        seed=int(state.config["run"]["seed"]),
        updates=state.updates,
        loss_scale=state.loss_scale,
        good_steps=state.good_steps,
        config=dict(state.config),
        mesh=state.mesh,
    )
    measured = {} if state.validation_loss is None else {"run/validation_loss": state.validation_loss}
    return attributes_of(run) | measured | (state.surplus.attributes() if state.surplus else {})
