"""Random tensors cut into random boxes: the cases on which the laws of a checkpoint are tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.random import Generator

from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.slabs import Slab, whole

Partition = Callable[[Generator, str, tuple[int, ...], int], list[Slab]]


def cut(rng: Generator, dataset: str, shape: tuple[int, ...], cuts: int) -> list[Slab]:
    """Boxes that make up the dataset: the whole, cut `cuts` times along a random axis; some may be empty."""
    slabs = [whole(dataset, shape)]
    for _ in range(cuts if shape else 0):
        slab = slabs.pop(int(rng.integers(len(slabs))))
        axis = int(rng.integers(len(shape)))
        at = int(rng.integers(slab.shape[axis] + 1))
        for first, count in ((0, at), (at, slab.shape[axis] - at)):
            start, size = list(slab.start), list(slab.shape)
            start[axis] += first
            size[axis] = count
            slabs.append(Slab(dataset, tuple(start), tuple(size)))
    return slabs


def box(slab: Slab) -> tuple[slice, ...]:
    """The slab as an index into the whole tensor."""
    return tuple(slice(s, s + n) for s, n in zip(slab.start, slab.shape, strict=True))


@pytest.fixture(scope="session")
def partition() -> Partition:
    return cut


@pytest.fixture(scope="session")
def index_of() -> Callable[[Slab], tuple[slice, ...]]:
    return box


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """Different ranks, types and sizes; a name with a dot, a deep one, one that is not ASCII."""
    rng = np.random.default_rng(5)
    return {
        "model/blocks.0.weight": rng.standard_normal((37, 11)).astype("<f4"),
        "model/bias": rng.standard_normal(5).astype("<f8"),
        "optimizer/exp_avg/blocks.0.weight": rng.integers(0, 1 << 16, (6, 5, 4)).astype("<u2"),
        "scalar": np.array(-7, dtype="<i8"),
        "größe": rng.integers(0, 255, 3000).astype("<u1"),
    }


@pytest.fixture
def specs(tensors: dict[str, np.ndarray]) -> dict[str, DatasetSpec]:
    named = {name: DatasetSpec(t.shape, t.dtype.name) for name, t in tensors.items()}
    bfloat16 = "optimizer/exp_avg/blocks.0.weight"
    return named | {bfloat16: DatasetSpec(tensors[bfloat16].shape, "bfloat16")}


@pytest.fixture
def write_alone(tensors: dict[str, np.ndarray], specs: dict[str, DatasetSpec]) -> Callable[[Path], Path]:
    """Write the tensors from this process alone, each in one slab."""

    def write_to(path: Path) -> Path:
        from small_checkpoints import write_slabs

        slabs = {whole(name, tensor.shape): tensor for name, tensor in tensors.items()}
        return write_slabs(path, None, specs, slabs, {"run/step": 3, "note": "größer", "run/rate": 0.5}).path

    return write_to
