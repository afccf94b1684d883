"""Adapters from and for PEFT: a folder of two files <-> a checkpoint that holds adapters alone.

    adapter_config.json          rank, alpha, layers, where the base lies
    adapter_model.safetensors    base_model.model.<their layer>.lora_A.weight (rank, inputs)     adapter_a
                                 base_model.model.<their layer>.lora_B.weight (outputs, rank)    adapter_b

Both sides have the same two matrices in the same shapes, so values go over as they are, bit for bit. A layer of theirs
that is fused of three of ours has one pair of matrices where we have three; those are not written, nor read. What else
PEFT can do to a layer (DoRA, biases, ranks that differ from layer to layer) is rejected by the key that says it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcllm.checkpoint.file_layout import temporary_path
from hpcllm.checkpoint.huggingface.architectures import ARCHITECTURES, Architecture, write_model
from hpcllm.checkpoint.huggingface.base import check_there, fingerprint
from hpcllm.checkpoint.huggingface.export import as_json
from hpcllm.checkpoint.huggingface.folder import CONFIG, Folder, header_of, open_file, parse, read_into, text_of
from hpcllm.checkpoint.huggingface.safetensors import DTYPES, Entry, lay_out
from hpcllm.checkpoint.huggingface.settings import Settings
from hpcllm.checkpoint.huggingface.start import model_of, open_weights
from hpcllm.checkpoint.layout import MODEL, STORED_AS, DatasetSpec, as_bytes
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import check_names
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.state import RunFacts, facts
from hpcllm.config.rules import LAYERS
from hpcllm.config.schema import AdapterConfig, ModelConfig, from_tables, to_tables
from hpcllm.errors import HuggingFaceError
from hpcllm.model.shapes import ADAPTER_A, ADAPTER_B, adapter_shapes
from hpcllm.mpi.collective_errors import on_root
from hpcllm.system.raw_files import disk_errors, sync

if TYPE_CHECKING:
    from mpi4py import MPI

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PARTS = {ADAPTER_A: "lora_A", ADAPTER_B: "lora_B"}
_ONLY: dict[str, tuple[Any, tuple[Any, ...]]] = {  # key -> its default, and the values that change nothing
    "peft_type": (None, ("LORA",)),
    "bias": ("none", ("none",)),
    "use_dora": (False, (False, None)),
    "use_rslora": (False, (False, None)),
    "lora_bias": (False, (False, None)),
    "rank_pattern": (None, (None, {})),
    "alpha_pattern": (None, (None, {})),
    "modules_to_save": (None, (None, [])),
    "layers_to_transform": (None, (None, [])),
    "layer_replication": (None, (None, [])),
    "trainable_token_indices": (None, (None, [], {})),
    "target_parameters": (None, (None, [])),
}


@dataclass(frozen=True)
class PeftFolder:
    """Adapters of a folder, checked; their values are still in the file."""

    path: Path
    base: Path
    model: ModelConfig
    adapter: AdapterConfig
    names: Mapping[str, str]  # our name -> theirs
    entries: Mapping[str, Entry]  # by their names

    @property
    def specs(self) -> dict[str, DatasetSpec]:
        """model/<parameter> -> shape and type."""
        entries = {name: self.entries[theirs] for name, theirs in self.names.items()}
        return {f"{MODEL}/{name}": DatasetSpec(entry.shape, DTYPES[entry.dtype]) for name, entry in entries.items()}

    def read(self, slab: Slab) -> np.ndarray:
        """Read a whole adapter matrix, or rows of it, in the stored type (bfloat16 as uint16)."""
        entry = self.entries[self.names[slab.dataset.removeprefix(f"{MODEL}/")]]
        values = np.empty(slab.shape, STORED_AS[DTYPES[entry.dtype]])
        row_bytes = entry.bytes // entry.shape[0]
        with open_file(self.path / PEFT_WEIGHTS) as file:
            read_into(file, as_bytes(values), entry.offset + slab.start[0] * row_bytes)
        return values

    def facts(self, base: str) -> RunFacts:
        """Return facts of a checkpoint of these adapters at step 0. base: fingerprint of the base."""
        adapter = dataclasses.asdict(self.adapter)
        tables = {
            "run": {"start_from": str(self.base)},
            "model": dataclasses.asdict(self.model),
            "data": {"sequence_length": min(256, self.model.max_sequence)},
            "finetuning": {"kind": "supervised", "adapter": adapter | {"targets": list(adapter["targets"])}},
        }
        config, mesh = to_tables(from_tables(tables)), {"dp": 1, "pp": 1, "tp": 1}
        return RunFacts(step=0, position=0, updates=0, fingerprint="", base=base, config=config, mesh=mesh)


def is_peft(path: Path) -> bool:
    """True if a path is a folder of PEFT's; one with whole weights beside is not."""
    return (path / PEFT_CONFIG).is_file() and not (path / CONFIG).is_file()


def read_folder(path: Path, base: Path | None) -> PeftFolder:
    """Read and check all but the values. base: where the base lies, None for where the folder says.

    Not collective. Raises HuggingFaceError, ConfigError.
    """
    settings = Settings(parse(text_of(path / PEFT_CONFIG) or "", path / PEFT_CONFIG), str(path / PEFT_CONFIG))
    for key, (default, valid) in _ONLY.items():
        settings.only(key, default, valid)
    base = base or Path(str(settings.get("base_model_name_or_path")))
    check_there(base)
    rank, alpha = settings.whole("r"), settings.number("lora_alpha")
    model = model_of(base)
    entries, names = header_of(path / PEFT_WEIGHTS), _names_in(base, model, AdapterConfig(rank=rank))
    targets = tuple(layer for layer in LAYERS if any(_layer(n) == layer and names[n] in entries for n in names))
    adapter = AdapterConfig(rank=rank, alpha=alpha, targets=targets)
    shapes = adapter_shapes(model, adapter) if targets else {}
    _check(path, entries, {names[name]: shape for name, shape in shapes.items()})
    return PeftFolder(path, base, model, adapter, {name: names[name] for name in shapes}, entries)


def base_fingerprint(base: Path, comm: MPI.Intracomm | None) -> str:
    """Return the fingerprint of whole weights. Collective over comm. Raises HuggingFaceError, CheckpointError."""
    with open_weights(base, comm) as source:
        return fingerprint(source, comm)


def write_peft(checkpoint: Checkpoint, target: Path, base: Path | None = None) -> tuple[str, int]:
    """Write the folder of a checkpoint of adapters; returns architecture and bytes of values.

    base: to be named as the base; None for run.start_from. Collective over checkpoint.comm: the first rank writes.
    Raises HuggingFaceError for a layer that is a part of one of theirs, CheckpointError.
    """

    def write(folder: Path) -> tuple[str, int]:
        config = from_tables(facts(checkpoint).config)
        adapter, named = config.finetuning.adapter, base or Path(config.run.start_from)
        shapes = adapter_shapes(config.model, adapter)
        check_names(checkpoint, MODEL, shapes)
        architecture, names = _architecture(named, config.model), _names_in(named, config.model, adapter)
        if missing := [name for name in shapes if name not in names]:
            raise HuggingFaceError(
                f"a {architecture.kind} has {missing[0].rpartition('.')[0]} as a part of a larger layer, whose adapter "
                "in PEFT is another; valid: merge the adapters (leave --adapter out), or train other targets"
            )
        specs = {names[name]: checkpoint.datasets[f"{MODEL}/{name}"].spec for name in shapes}
        header, _ = lay_out(specs)
        ours = {theirs: name for name, theirs in names.items()}
        order = sorted(specs, key=lambda name: lay_out(specs)[1][name])
        with disk_errors(HuggingFaceError, f"cannot write {target}"):
            folder.mkdir(parents=True)
            with (folder / PEFT_WEIGHTS).open("xb") as out:
                out.write(header)
                for name in order:
                    out.write(as_bytes(checkpoint.read_whole(f"{MODEL}/{ours[name]}")))
            (folder / PEFT_CONFIG).write_text(as_json(_config(adapter, architecture, named)), encoding="utf-8")
            for file in (PEFT_WEIGHTS, PEFT_CONFIG):
                sync(folder / file)
            folder.replace(target)
            sync(target.parent)
        return architecture.kind, sum(spec.bytes for spec in specs.values())

    with temporary_path(target, checkpoint.comm) as folder:
        return on_root(checkpoint.comm, lambda: write(folder))


def _architecture(base: Path, model: ModelConfig) -> Architecture:
    """Return the architecture that the base is, or would be as a folder."""
    if (base / CONFIG).is_file():
        with Folder.open(base) as folder:
            return ARCHITECTURES[folder.kind]
    return write_model(model)[0]


def _names_in(base: Path, model: ModelConfig, adapter: AdapterConfig) -> dict[str, str]:
    """Map our adapters -> their tensors; those of layers that are parts of one of theirs are left out."""
    names = _architecture(base, model).names
    tensors, found = names.tensor_map(model, names.prefix), {}
    for name in adapter_shapes(model, adapter):
        layer, _, kind = name.rpartition(".")
        theirs = tensors[f"{layer}.weight"]
        if theirs.parts == 1:
            found[name] = f"base_model.model.{theirs.name.removesuffix('.weight')}.{_PARTS[kind]}.weight"
    return found


def _layer(name: str) -> str:
    return name.split(".")[-2]


def _check(path: Path, entries: Mapping[str, Entry], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise HuggingFaceError unless the file has these tensors, no others, in these shapes and our types."""
    faults = [f"{name} is missing" for name in wanted if name not in entries]
    faults += [f"{name[:200]!r} is of no layer that can have an adapter here" for name in entries if name not in wanted]
    both = {name: entries[name] for name in wanted if name in entries}
    faults += [f"{n} has shape {e.shape}, not {wanted[n]}" for n, e in both.items() if e.shape != wanted[n]]
    faults += [f"{n} is {e.dtype}; valid: {', '.join(DTYPES)}" for n, e in both.items() if e.dtype not in DTYPES]
    if faults or not wanted:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise HuggingFaceError(f"{path / PEFT_WEIGHTS}: {'; '.join(faults[:3]) or 'has no adapter'}{more}")


def _config(adapter: AdapterConfig, architecture: Architecture, base: Path) -> dict[str, Any]:
    layers = {layer.rpartition(".")[2]: theirs for layer, theirs in architecture.names.layers.items()}
    paths = [layers[layer] for layer in adapter.targets if layer in layers]
    last = [path.rpartition(".")[2] for path in layers.values()]
    # the last part of a path, unless two layers share it: PEFT compares the end of a name
    modules = [end if last.count(end := path.rpartition(".")[2]) == 1 else path for path in paths]
    return {
        "base_model_name_or_path": str(base),
        "bias": "none",
        "fan_in_fan_out": architecture.names.transposed,
        "inference_mode": True,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": adapter.rank,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
    }
