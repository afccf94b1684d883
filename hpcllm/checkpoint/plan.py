r"""What ranks agree on before a byte is written: one spec a dataset, and slabs that make up all of it. No MPI here.

    rank 0   w (4, 6): rows 0-1  \
    rank 1   w (4, 6): rows 2-3   >  w (4, 6), every element held once       else CheckpointError, and no file
    rank 2   b (6,):   all       /   b (6,),   every element held once
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from hpcllm.checkpoint.layout import STORED_AS, DatasetSpec, check_spec
from hpcllm.checkpoint.slabs import Slab, fits, uncovered
from hpcllm.errors import CheckpointError


def fault_of_slabs(datasets: Mapping[str, DatasetSpec], slabs: Iterable[Slab]) -> CheckpointError | None:
    """What is wrong with one rank's request, to be raised by all ranks together; None if nothing is."""
    try:
        for name, spec in datasets.items():
            check_spec(name, spec)
        for slab in slabs:
            _check_place(slab, datasets)
    except CheckpointError as error:
        return error
    return None


def fault_of_arrays(datasets: Mapping[str, DatasetSpec], slabs: Mapping[Slab, np.ndarray]) -> CheckpointError | None:
    """The same, of slabs whose values are there already."""
    try:
        if error := fault_of_slabs(datasets, slabs):
            return error
        for slab, array in slabs.items():
            check_slab(slab, array, datasets[slab.dataset])
    except CheckpointError as error:
        return error
    return None


def _check_place(slab: Slab, datasets: Mapping[str, DatasetSpec]) -> None:
    if slab.dataset not in datasets:
        raise CheckpointError(f"{slab} comes without the spec of its dataset")
    spec = datasets[slab.dataset]
    if not fits(slab, spec.shape):
        raise CheckpointError(f"{slab} does not lie inside its dataset of shape {spec.shape}")


def check_slab(slab: Slab, array: np.ndarray, spec: DatasetSpec) -> None:
    """Raises CheckpointError for an array that is not the slab's elements as the file has them."""
    stored = STORED_AS[spec.dtype]
    if array.shape != slab.shape or array.dtype != stored or not array.flags.c_contiguous:
        raise CheckpointError(
            f"{slab} needs a C-contiguous array of {stored} and that shape, but has {array.dtype} {array.shape} "
            f"with strides {array.strides}"
        )


def merge(path: Path, asked: Iterable[tuple[Mapping[str, DatasetSpec], list[Slab]]]) -> dict[str, DatasetSpec]:
    """The datasets of all ranks, in the order of their names. asked: specs and slabs of each rank.

    Raises CheckpointError if two specs of a dataset differ, or its slabs do not hold every element exactly once.
    """
    merged: dict[str, DatasetSpec] = {}
    held: dict[str, list[Slab]] = {}
    for specs, slabs in asked:
        for name, spec in specs.items():
            if merged.setdefault(name, spec) != spec:
                raise CheckpointError(f"{path}: ranks disagree on {name}: {merged[name]} and {spec}")
        for slab in slabs:
            held.setdefault(slab.dataset, []).append(slab)
    for name, spec in merged.items():
        if fault := uncovered(spec.shape, held.get(name, [])):
            raise CheckpointError(f"{path}: the slabs of all ranks do not make up {name} {spec.shape}: {fault}")
    return dict(sorted(merged.items()))
