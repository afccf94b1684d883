"""Memory that tensors really take: counted while they come and go, or summed over those that stay.

    operation ----> results ----> storage not seen before: + its bytes ----> highest sum so far
                                  the storage dies:        - its bytes

A storage counts once however many tensors view it, and for as long as anything holds it, a graph's saved tensors
included. Storages that existed before, or come from elsewhere (numpy), count nothing; but storages that are resized
meanwhile count with their size. Not seen: memory that one operation of PyTorch takes and frees before it returns, and
other threads. On a device its own allocator, which sees all of that at no cost, is read instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcllm.optim.flat_buffers import MODEL
from hpcllm.plan.memory.predict import predict
from hpcllm.system.device import memory_module
from hpcllm.system.text import size_text
from hpcllm.training.log import Log, resident_gb

if TYPE_CHECKING:
    from hpcllm.training.setup import RunContext

STAYS = ("parameters", "gradients", "optimizer")
STEP = "step"  # activations and buffers at their peak


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes() as live:` counts what this thread allocates; bits do not change, operations take longer.

    elastic: tensors that existed before and whose storages are resized meanwhile.
    """

    def __init__(self, elastic: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0  # bytes
        self._elastic = list({t.untyped_storage()._cdata: t.untyped_storage() for t in elastic}.values())
        self._now = 0
        self._known: dict[int, weakref.ReferenceType[Any]] = {}  # by the storage's address
        self._freed: list[int] = []  # filled by any thread, summed by ours

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep PyTorch from loading its compiler, seconds a rank, only to shut it out: nothing of ours is compiled."""
        return False

    @property
    def now(self) -> int:
        while self._freed:
            self._now -= self._freed.pop()
        return self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            self._meet(tensor, counts=False)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            self._meet(tensor, counts=True)
        self.peak = max(self.peak, self.now + sum(storage.nbytes() for storage in self._elastic))
        return result

    def _meet(self, tensor: Any, counts: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if counts else 0
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self._freed.append(size)

        self._known[key] = weakref.ref(storage, gone)
        self._now += size


class DeviceBytes:
    """Measures the peak of a device's memory from now on, beyond what it holds now."""

    def __init__(self, module: Any) -> None:
        """module: see device.memory_module."""
        self.module, self._before = module, int(module.memory_allocated())
        module.reset_peak_memory_stats()

    @property
    def peak(self) -> int:
        return int(self.module.max_memory_allocated()) - self._before


Live: TypeAlias = LiveBytes | DeviceBytes


@contextmanager
def counting(run: RunContext, wanted: bool) -> Iterator[Live | None]:
    """Count the bytes of a rank's step, if wanted."""
    if wanted and (module := memory_module(run.device)):
        yield DeviceBytes(module)
    elif wanted:
        with LiveBytes(list(run.parameters.values()) if run.config.optimizer.shard == "all" else ()) as live:
            yield live
    else:
        yield None


def peak_memory_gb(device: torch.device) -> tuple[float, float]:
    """Return this process's peak memory, in 1e9 bytes: tensors on the device, and resident in the host's memory.

    For the CPU, or a device that does not count, the first is equal to the second.
    """
    host_gb, module = resident_gb(), memory_module(device)
    return (module.max_memory_allocated() / 1e9 if module else host_gb), host_gb


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of the storages behind some tensors, each counted once."""
    storages = {storage._cdata: storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def measured(run: RunContext, step_bytes: int) -> dict[str, int]:
    """Return this rank's bytes by kind between two steps. step_bytes: peak over a step, see counting."""
    pieces, states = run.optimizer.pieces_to_read(), run.optimizer.host_states
    frozen = [*run.frozen.values(), *(weight.data for weight in run.quantised.values())]
    weights = [*run.parameters.values(), *frozen, *(piece.values for piece in pieces if piece.kind == MODEL)]
    return {
        "parameters": held_bytes(weights),
        "gradients": held_bytes(run.gradients.shares),
        "optimizer": states.landing_bytes
        if states
        else held_bytes(piece.values for piece in pieces if piece.kind != MODEL),
        STEP: step_bytes,
    }


def predicted(run: RunContext) -> dict[str, int]:
    """Return this rank's bytes by kind as `python -m hpcllm memory` predicts them."""
    memory = predict(run.config, run.schedule, run.mesh.pp.rank, run.mesh.tp.rank)
    return {kind: getattr(memory, kind) for kind in STAYS} | {STEP: memory.activations + memory.buffers}


def log_memory(run: RunContext, log: Log | None, step: int, step_bytes: int) -> None:
    """Log measured beside predicted bytes, each kind's largest over all ranks. Collective over the mesh."""
    found, expected = measured(run, step_bytes), predicted(run)
    pipeline = run.mesh.pp
    stages = np.zeros((pipeline.size, len(found) + len(expected)), dtype=np.int64)
    stages[pipeline.rank] = [*found.values(), *expected.values()]
    run.control.allreduce(run.mesh.world, stages, lambda: "all ranks to say how much memory they take", MPI.MAX)
    if log:
        keys = [*(f"{kind}_memory_bytes" for kind in found), *(f"{kind}_memory_predicted_bytes" for kind in expected)]
        most = stages.max(axis=0).tolist()
        record: dict[str, Any] = dict(zip(keys, most, strict=True))
        record["memory_stages"] = [dict(zip(keys, row, strict=True)) for row in stages.tolist()]
        found, expected = (dict(zip(found, half, strict=True)) for half in (most[: len(found)], most[len(found) :]))
        names = {STEP: "activations and buffers"}
        text = ", ".join(f"{names.get(k, k)} {size_text(found[k])} ({size_text(expected[k])})" for k in found)
        log.write({"step": step, **record})
        log.print(f"memory of tensors, the most of any rank (predicted): {text}")
