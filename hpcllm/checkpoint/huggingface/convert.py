"""Convert weights either way: `python -m hpcllm checkpoint convert`.

a folder with config.json   -->  _to_checkpoint                -->  FILE.h5, at step 0 of a run that was never trained
a checkpoint                -->  write_folder, see export.py   -->  a folder

a folder of PEFT's          -->  _adapters_to_checkpoint, see peft.py    -->  FILE.h5 of adapters, at step 0
a checkpoint of adapters    -->  the same as another, merged, see merge.py; or write_peft  -->  a folder

    all ranks   blocks of the file, shared by size --read--> (round) --> checkpoint.writer

Each rank brings whole blocks, so that no value travels between ranks, and at most a few of them are in memory.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcllm.checkpoint.huggingface.export import DTYPE_OPTIONS, cast, is_finite, make_texts, plan_export, write_folder
from hpcllm.checkpoint.huggingface.folder import CARRIED, COMPANIONS, CONFIG, Folder, which
from hpcllm.checkpoint.huggingface.merge import MergedWeights, has_adapters, open_merged
from hpcllm.checkpoint.huggingface.peft import base_fingerprint, is_peft, read_folder, write_peft
from hpcllm.checkpoint.layout import MASTER, MODEL, TOKENIZER, DatasetSpec, my_blocks
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import check_names, tokenizer_json
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.state import RunFacts, facts
from hpcllm.checkpoint.writer import prepare, write
from hpcllm.config.schema import DataConfig, ModelConfig, from_tables, to_tables
from hpcllm.errors import HuggingFaceError
from hpcllm.model.shapes import parameter_count, parameter_shapes
from hpcllm.mpi.collective_errors import on_root, rank_and_size
from hpcllm.system.text import counted

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_NAMED = 3  # tensors in a note


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
    adapter: bool = False,
    base: Path | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Report:
    """Convert either way, by what `source` is; all ranks share the work. Collective over comm; None: one process.

    source: a Hugging Face folder, a checkpoint, or a folder, for its newest checkpoint. dtype: fp32, bf16
    or fp16, "" to keep each tensor's. architecture: to write a checkpoint as, "" for the one it came in, else the
    first that can express it. adapter: write a checkpoint's adapters as a folder of PEFT's, not merged into their base.
    base: where the base of adapters lies, None for where the source says. advance: gets the bytes that this rank has
    read, as it does. Raises HuggingFaceError, DataError or ConfigError before a byte is written, CheckpointError.
    """
    if not shard_gb > 0:
        raise HuggingFaceError(f"--shard-gb {shard_gb} is out of range; valid: > 0")
    if on_root(comm, lambda: is_peft(source)):
        on_root(comm, lambda: _check_target(source, target, True))
        return _adapters_to_checkpoint(source, target, comm, base)
    source, is_folder = on_root(comm, lambda: _checked_source(source, target))
    if is_folder and architecture:
        raise HuggingFaceError(f"--architecture {architecture} is for a checkpoint; {source} says its own in {CONFIG}")
    wanted = DTYPE_OPTIONS[dtype] if dtype else ""
    if is_folder:
        return _to_checkpoint(source, target, comm, wanted, advance)
    with Checkpoint.open(source, comm) as checkpoint:
        options = target, wanted, architecture, shard_gb * 1e9, advance
        if not has_adapters(checkpoint, comm):
            if adapter or base:
                raise HuggingFaceError(f"{source} holds whole weights; --adapter and --base are for adapters")
            return _to_folder(checkpoint, checkpoint, *options)
        if adapter:
            return _to_peft(checkpoint, target, base)
        with open_merged(checkpoint, base, wanted, masters=wanted == "float32") as merged:
            return _to_folder(checkpoint, merged, *options)


def _checked_source(named: Path, target: Path) -> tuple[Path, bool]:
    """The source, and True if it is a Hugging Face folder. Raises a UserError if it or the target is unusable."""
    source, is_folder = which(named)
    _check_target(source, target, is_folder)
    return source, is_folder


def _check_target(source: Path, target: Path, is_folder: bool) -> None:
    is_free = not target.exists() or (source.is_file() and target.is_dir() and not any(target.iterdir()))
    if not is_free:
        raise HuggingFaceError(f"{target} is there already; remove it, or name another")
    if not is_folder and target.suffix == ".h5":
        raise HuggingFaceError(f"{target} would be a folder, as a checkpoint becomes one; name it without .h5")


def _to_checkpoint(
    source: Path, target: Path, comm: MPI.Intracomm | None, dtype: str, advance: Callable[[int], None]
) -> Report:
    """Write a folder's model as a checkpoint that `generate`, `inspect` and `run.start_from` read."""
    with Folder.open(source, comm) as folder:
        specs = {name: DatasetSpec(spec.shape, dtype or spec.dtype) for name, spec in folder.specs.items()}
        text = np.frombuffer(folder.tokenizer_json.encode(), dtype=np.uint8)
        if text.size:
            specs[TOKENIZER] = DatasetSpec(text.shape, "uint8")
        slabs = [specs[name].block(name, index) for name, index in my_blocks(specs, *rank_and_size(comm))]

        not_finite: dict[str, None] = {}

        def read(slab: Slab) -> np.ndarray:
            advance(slab.elements * specs[slab.dataset].item_bytes)
            if slab.dataset == TOKENIZER:
                return text[slab.start[0] : slab.start[0] + slab.shape[0]]
            values, stored = folder.read(slab), folder.specs[slab.dataset].dtype
            if not is_finite(values, stored):
                not_finite[slab.dataset.removeprefix(f"{MODEL}/")] = None
            return cast(values, stored, specs[slab.dataset].dtype, slab.dataset)

        carried = {f"{CARRIED}/{file}": folder.texts[file] for file in (CONFIG, *COMPANIONS) if file in folder.texts}
        said = never_trained(folder.model).attributes() | carried
        report = write(target, comm, prepare(comm, specs, slabs), read, said)
        count = parameter_count(folder.model)
        notes = folder.notes + _not_numbers(list(not_finite), comm)
        return Report(str(source), str(target), folder.kind, count, report.bytes, report.seconds, notes)


def _not_numbers(mine: list[str], comm: MPI.Intracomm | None) -> tuple[str, ...]:
    """Write a note on tensors that hold NaN or infinite values, if any rank has seen some. Collective over comm."""
    names = sorted({name for each in (comm.allgather(mine) if comm else [mine]) for name in each})
    if not names:
        return ()
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (
        f"{counted(len(names), 'tensor')} with NaN or infinite values, which came through as they are: "
        f"{', '.join(names[:MOST_NAMED])}{more}; `generate` cannot use such a model",
    )


def _adapters_to_checkpoint(source: Path, target: Path, comm: MPI.Intracomm | None, base: Path | None) -> Report:
    """Write a folder of PEFT's as a checkpoint of adapters, which names their base."""
    folder = on_root(comm, lambda: read_folder(source, base))
    specs = folder.specs
    slabs = [specs[name].block(name, index) for name, index in my_blocks(specs, *rank_and_size(comm))]
    said = folder.facts(base_fingerprint(folder.base, comm)).attributes()
    report = write(target, comm, prepare(comm, specs, slabs), folder.read, said)
    count = sum(math.prod(spec.shape) for spec in specs.values())
    return Report(str(source), str(target), "adapters", count, report.bytes, report.seconds, (f"base {folder.base}",))


def _to_peft(checkpoint: Checkpoint, target: Path, base: Path | None) -> Report:
    started_s = time.perf_counter()
    kind, written = write_peft(checkpoint, target, base)
    count = sum(math.prod(spec.shape) for name, spec in checkpoint.specs.items() if name.startswith(f"{MODEL}/"))
    seconds = time.perf_counter() - started_s
    return Report(str(checkpoint.path), str(target), f"adapters of a {kind}", count, written, seconds, ())


def _to_folder(
    checkpoint: Checkpoint,
    source: Checkpoint | MergedWeights,
    target: Path,
    dtype: str,
    architecture: str,
    shard_bytes: float,
    advance: Callable[[int], None],
) -> Report:
    started_s = time.perf_counter()
    model = from_tables(facts(checkpoint).config).model
    names = parameter_shapes(model)
    if isinstance(source, Checkpoint):
        check_names(source, MODEL, names)
    has_master = f"{MASTER}/{next(iter(names))}" in source.specs
    kind = MASTER if dtype == "float32" and has_master else MODEL  # more of each number is known there
    ours = {name: dtype or source.specs[f"{kind}/{name}"].dtype for name in names}
    tokenizer = on_root(checkpoint.comm, lambda: tokenizer_json(checkpoint))
    stored = next(iter(ours.values()))
    said, texts = make_texts(source.attributes, tokenizer, model, architecture, stored, keeps_types=not dtype)
    planned = plan_export(model, said, ours, shard_bytes)
    not_finite = write_folder(source, kind, planned, texts, target, advance)
    written, seconds = sum(spec.bytes for spec in planned.specs.values()), time.perf_counter() - started_s
    wordless = () if tokenizer else ("the checkpoint has no tokenizer: a model without words",)
    notes = (*wordless, *_not_numbers(not_finite, checkpoint.comm))
    return Report(str(checkpoint.path), str(target), said.kind, parameter_count(model), written, seconds, notes)


def never_trained(model: ModelConfig) -> RunFacts:
    """Facts of a checkpoint whose model no run of ours has made."""
    sequence = min(DataConfig().sequence_length, model.max_sequence)
    config = to_tables(from_tables({"model": dataclasses.asdict(model), "data": {"sequence_length": sequence}}))
    mesh = {"dp": 1, "pp": 1, "tp": 1}
    return RunFacts(step=0, position=0, updates=0, fingerprint="", config=config, mesh=mesh)
