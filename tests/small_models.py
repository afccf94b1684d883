"""Models as tests want them: a checkpoint of given or random weights, written in one call, and a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from hpcllm.checkpoint.state import RunState, Shards, save
from hpcllm.config.schema import ModelConfig, from_tables, to_tables
from hpcllm.data import tokenizer as bpe
from hpcllm.model.initialisation import build
from hpcllm.model.shapes import parameter_shapes, split_layers
from hpcllm.optim.flat_buffers import Piece

TOKENIZER = bpe.train(["abc"], 257)  # every byte is a token of its own, so a character takes up to four
ENCODER = bpe.Encoder(TOKENIZER)


def checkpoint_of(
    folder: Path,
    model: ModelConfig,
    weights: Callable[[dict[str, torch.nn.Parameter]], None] | None = None,
    tokenizer: str = TOKENIZER,
    dtype: torch.dtype = torch.float32,
    data: Mapping[str, Any] | None = None,
    step: int = 1,
) -> Path:
    """A checkpoint written by this process alone; `weights` changes the decoder's parameters in place."""
    decoder = build(model, split_layers(model, 1)[0], seed=4, dtype=dtype)
    if weights:
        with torch.no_grad():
            weights(dict(decoder.named_parameters()))
    parameters = {name: p.detach() for name, p in decoder.named_parameters()}
    tables = to_tables(from_tables({"data": {"sequence_length": 8, **(data or {})}}))
    state = RunState(
        step=step,
        position=0,
        updates=1,
        config=tables | {"model": {k: getattr(model, k) for k in tables["model"]}},
        pieces=[Piece("model", name, 0, p.numel(), p.view(-1)) for name, p in parameters.items()],
        shards=Shards(parameter_shapes(model)),
        owned=frozenset(parameters),
        fingerprint="f0",
        tokenizer_json=tokenizer,
        mesh={"dp": 1, "pp": 1, "tp": 1},
    )
    return save(folder, state, MPI.COMM_SELF).path
