"""A run's adapters and their base, read as one model: for an export, for generation.

    model/<layer>.weight of the base, as the run held it (finetuning.adapter.base)
        + alpha / rank  adapter_b (outputs, rank)  adapter_a (rank, inputs)         read box by box, in float32
    every other parameter, as it is

What was trained is the sum with the base as it was held, so it is that which is merged: a base in few bits is rounded
here too, as it was in the run. Adapters are small: each process has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcllm.checkpoint.huggingface.base import check_base, check_there, fingerprint
from hpcllm.checkpoint.huggingface.folder import CARRIED, COMPANIONS, CONFIG, Folder
from hpcllm.checkpoint.huggingface.start import open_weights
from hpcllm.checkpoint.layout import MASTER, MODEL, Attribute, DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import check_names
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.state import as_tensor, facts
from hpcllm.config.schema import Config, from_tables
from hpcllm.model.quantised import QuantisedWeight
from hpcllm.model.shapes import ADAPTER_A, ADAPTER_B, BASE_BITS, adapter_shapes
from hpcllm.mpi.collective_errors import on_all, on_root

if TYPE_CHECKING:
    from mpi4py import MPI


class MergedWeights:
    """Weights that are read like those of a checkpoint or a folder. Reading is not collective."""

    def __init__(
        self, config: Config, base: Checkpoint | Folder, adapters: Mapping[str, Tensor], dtype: str = ""
    ) -> None:
        """config: of the run. adapters: by their names, float32. dtype: of all weights; "" for the base's."""
        self.config, self.base, self.comm, self._adapters = config, base, base.comm, adapters
        specs = {name: spec for name, spec in base.specs.items() if name.startswith(f"{MODEL}/")}
        self.specs = {name: DatasetSpec(spec.shape, dtype or spec.dtype) for name, spec in specs.items()}

    @property
    def attributes(self) -> Mapping[str, Attribute]:
        """The small files that the base came with, as a checkpoint has them."""
        if isinstance(self.base, Checkpoint):
            return self.base.attributes
        files = (CONFIG, *COMPANIONS)
        return {f"{CARRIED}/{file}": self.base.texts[file] for file in files if file in self.base.texts}

    def read(self, slab: Slab) -> np.ndarray:
        """Read a slab of model/<parameter>, in its shape and the type of `specs` (bfloat16 as uint16).

        Raises HuggingFaceError, CheckpointError.
        """
        name = slab.dataset.removeprefix(f"{MODEL}/")
        values = self._held(name, slab)
        layer, _, kind = name.rpartition(".")
        a, b = (self._adapters.get(f"{layer}.{which}") for which in (ADAPTER_A, ADAPTER_B))
        if kind == "weight" and a is not None and b is not None:
            rows, columns = (slice(at, at + n) for at, n in zip(slab.start, slab.shape, strict=True))
            adapter = self.config.finetuning.adapter
            values.addmm_(b[rows], a[:, columns], alpha=adapter.alpha / adapter.rank)
        values = values.to(getattr(torch, self.specs[slab.dataset].dtype))
        return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()

    def _held(self, name: str, slab: Slab) -> Tensor:
        """Read a slab of the base as the run held it, float32, in memory of its own."""
        held, stored = self.config.finetuning.adapter.base, self.base.specs[slab.dataset]
        is_linear = name.startswith("blocks.") and len(slab.shape) == 2
        if not (is_linear and held in BASE_BITS):
            values = as_tensor(self.base.read(slab), stored.dtype).float()
            return values.bfloat16().float() if is_linear and held == "bf16" else values
        first, columns = slab.start[1], stored.shape[1]  # groups begin at the first input, so whole rows are rounded
        rows = Slab(slab.dataset, (slab.start[0], 0), (slab.shape[0], columns))
        weight = QuantisedWeight(slab.shape[0], columns, BASE_BITS[held], torch.device("cpu"))
        weight.set(as_tensor(self.base.read(rows), stored.dtype).float())
        return weight.whole(torch.float32)[:, first : first + slab.shape[1]].contiguous()


@contextmanager
def open_merged(
    checkpoint: Checkpoint, base: Path | None = None, dtype: str = "", masters: bool = False
) -> Iterator[MergedWeights]:
    """Open the base of a checkpoint of adapters. Collective over checkpoint.comm.

    base: where it lies now, None for run.start_from of the run. masters: take adapters' master weights where there are
    some. Raises ConfigError if it is not there or not the one; HuggingFaceError, CheckpointError.
    """
    known = facts(checkpoint)
    config = from_tables(known.config)
    path = base or Path(config.run.start_from)
    on_root(checkpoint.comm, lambda: check_there(path))
    adapters = on_all(checkpoint.comm, lambda: read_adapters(checkpoint, config, masters))
    with open_weights(path, checkpoint.comm) as source:
        check_base(fingerprint(source, checkpoint.comm), known.base, checkpoint.path, str(path))
        yield MergedWeights(config, source, adapters, dtype)


def read_adapters(checkpoint: Checkpoint, config: Config, masters: bool = False) -> dict[str, Tensor]:
    """Read a checkpoint's adapters, whole, as float32. Not collective. Raises CheckpointError."""
    shapes = adapter_shapes(config.model, config.finetuning.adapter)
    kind = MASTER if masters and f"{MASTER}/{next(iter(shapes))}" in checkpoint.datasets else MODEL
    check_names(checkpoint, kind, shapes)
    names = {name: f"{kind}/{name}" for name in shapes}
    specs = checkpoint.specs
    return {name: as_tensor(checkpoint.read_whole(key), specs[key].dtype).float() for name, key in names.items()}


def has_adapters(checkpoint: Checkpoint | Folder, comm: MPI.Intracomm | None) -> bool:
    """True if a checkpoint holds adapters alone. Collective over comm. Raises CheckpointError."""
    return isinstance(checkpoint, Checkpoint) and on_root(comm, lambda: bool(facts(checkpoint).base))
