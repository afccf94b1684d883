"""`python -m hpcllm checkpoint convert`: which way, what is refused, what is reported.

a folder with config.json   -->  importing.py  -->  FILE.h5
a checkpoint                -->  exporting.py  -->  a folder
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcllm.checkpoint.facts import facts
from hpcllm.checkpoint.layout import MASTER, MODEL
from hpcllm.checkpoint.locate import is_ours
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import check_names, tokenizer_json
from hpcllm.config import from_tables
from hpcllm.errors import InterchangeError
from hpcllm.interchange.contents import CONFIG
from hpcllm.interchange.dtype import ASKED
from hpcllm.interchange.exporting import plan, write_folder
from hpcllm.interchange.folder import Folder, which
from hpcllm.interchange.importing import write_checkpoint
from hpcllm.interchange.texts import texts_of
from hpcllm.model.shapes import parameter_count, parameter_shapes
from hpcllm.together import on_root

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Report:
    source: str
    target: str
    architecture: str
    parameters: int
    bytes: int  # of tensors, as written
    seconds: float
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        rate = self.bytes / self.seconds / 1e9
        told = f"{self.architecture}, {self.parameters / 1e6:.2f} M parameters, {self.bytes / 1e6:.1f} MB"
        return [
            f"{self.source} -> {self.target}: {told} in {self.seconds:.1f} s ({rate:.2f} GB/s)",
            *(f"note: {n}" for n in self.notes),
        ]


def convert(
    source: Path,
    target: Path,
    comm: MPI.Intracomm | None,
    dtype: str = "",
    architecture: str = "",
    shard_gb: float = 5.0,
    advance: Callable[[int], None] = lambda _: None,
) -> Report:
    """Convert either way, by what `source` is; all ranks share the work. Collective over comm; None: one process.

    source: a Hugging Face folder, a checkpoint, or a folder of which the newest checkpoint is meant. dtype: fp32, bf16
    or fp16, "" to keep each tensor's. architecture: what to write a checkpoint as, "" for the one it came in, else the
    first that can say it. advance: told the bytes that this rank has read, as it does. Raises InterchangeError or
    DataError before a byte is written, CheckpointError.
    """
    if not shard_gb > 0:
        raise InterchangeError(f"--shard-gb {shard_gb} is out of range; valid: > 0")
    source, is_folder = on_root(comm, lambda: _checked_source(source, target))
    if is_folder and architecture:
        raise InterchangeError(f"--architecture {architecture} is for a checkpoint; {source} says its own in {CONFIG}")
    wanted = ASKED[dtype] if dtype else ""
    if is_folder:
        return _to_checkpoint(source, target, comm, wanted, advance)
    return _to_folder(source, target, comm, wanted, architecture, shard_gb * 1e9, advance)


def _checked_source(named: Path, target: Path) -> tuple[Path, bool]:
    """The source, and whether it is a Hugging Face folder. Raises a UserError if it or the target cannot be meant."""
    source, is_folder = which(named)
    if not is_folder and not is_ours(source):
        hint = "; name the folder that it is in" if source.suffix == ".safetensors" else ""
        raise InterchangeError(f"{source} is not one of our checkpoints{hint}")
    is_free = not target.exists() or (source.is_file() and target.is_dir() and not any(target.iterdir()))
    if not is_free:
        raise InterchangeError(f"{target} is there already; remove it, or name another")
    if not is_folder and target.suffix == ".h5":
        raise InterchangeError(f"{target} would be a folder, as a checkpoint becomes one; name it without .h5")
    return source, is_folder


def _to_checkpoint(
    source: Path, target: Path, comm: MPI.Intracomm | None, dtype: str, advance: Callable[[int], None]
) -> Report:
    with Folder.open(source, comm) as folder:
        report = write_checkpoint(folder, target, comm, dtype, advance)
        count = parameter_count(folder.model)
        return Report(str(source), str(target), folder.kind, count, report.bytes, report.seconds, folder.notes)


def _to_folder(
    source: Path,
    target: Path,
    comm: MPI.Intracomm | None,
    dtype: str,
    architecture: str,
    shard_bytes: float,
    advance: Callable[[int], None],
) -> Report:
    started_s = time.perf_counter()
    with Checkpoint.open(source, comm) as checkpoint:
        model = from_tables(facts(checkpoint).config).model
        check_names(checkpoint, MODEL, parameter_shapes(model))
        has_master = f"{MASTER}/{next(iter(parameter_shapes(model)))}" in checkpoint.datasets
        kind = MASTER if dtype == "float32" and has_master else MODEL  # more of each number is known there
        ours = {name: dtype or checkpoint.datasets[f"{kind}/{name}"].spec.dtype for name in parameter_shapes(model)}
        tokenizer = on_root(comm, lambda: tokenizer_json(checkpoint))
        stored = next(iter(ours.values()))
        said, texts = texts_of(checkpoint.attributes, tokenizer, model, architecture, stored, keeps_types=not dtype)
        where = plan(model, said, ours, shard_bytes)
        write_folder(checkpoint, kind, where, texts, target, advance)
    written, seconds = sum(spec.bytes for spec in where.specs.values()), time.perf_counter() - started_s
    notes = () if tokenizer else ("the checkpoint has no tokenizer: a model without words",)
    return Report(str(source), str(target), said.kind, parameter_count(model), written, seconds, notes)
