"""Written by one layout, read and written again by another: the same file, whatever dp, pp, tp and shard level."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from pytest_mpi import parallel_assert

from hpcllm.checkpoint.folder import newest_first
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.config import schema as configs
from hpcllm.config.schema import Config
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.training.resume import resume
from hpcllm.training.run_lock import lock_run
from hpcllm.training.saving import open_saving
from hpcllm.training.setup import open_run
from hpcllm.training.step import forward_backward

LAYOUTS = {
    1: [{}, {"pipeline": {"schedule": "zb-v"}}],
    2: [
        {"mesh": {"dp": 2}},
        {"mesh": {"dp": 2}, "optimizer": {"shard": "states"}},
        {"mesh": {"tp": 2, "sequence_parallel": True}},
        {"mesh": {"dp": 2}, "optimizer": {"shard": "all"}},
        {"mesh": {"pp": 2}},
        {"mesh": {"dp": 2}, "optimizer": {"shard": "states+gradients"}},
    ],
    3: [{"mesh": {"dp": 3}, "optimizer": {"shard": "all"}}, {"mesh": {"pp": 3}}, {"mesh": {"dp": 3}}],
    4: [
        {"mesh": {"dp": 2, "tp": 2}, "optimizer": {"shard": "states+gradients"}},
        {"mesh": {"pp": 2, "tp": 2}},
        {"mesh": {"dp": 2, "pp": 2}, "optimizer": {"shard": "states"}},
        {"mesh": {"dp": 2, "tp": 2, "sequence_parallel": True}, "optimizer": {"shard": "all"}},
    ],
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """With a token store; seen by all ranks."""
    world = MPI.COMM_WORLD
    made = Path(world.bcast(tempfile.mkdtemp(prefix="hpcllm test ") if world.rank == 0 else None))
    if world.rank == 0:
        words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "delta", "sum", "the", "\n"], 2000)
        (made / "a.txt").write_text(" ".join(words))
    world.Barrier()
    prepare(PrepareOptions(inputs=(made / "a.txt",), output=made / "store.h5", vocabulary=300), world)
    yield made
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(made, ignore_errors=True)


def run_config(folder: Path, compute: str, layout: dict) -> Config:
    tables = {
        "run": {"name": compute, "folder": str(folder / "runs")},
        "model": {"layers": 3, "hidden": 24, "heads": 4, "ffn": 36, "vocabulary": 301, "tied": True},
        "data": {"store": str(folder / "store.h5"), "sequence_length": 16, "global_batch": 12},
        "precision": {"compute": compute},
        "communication": {"bucket_mib": 0.01},
        "checkpoint": {"keep": 99},
        "limits": {"stall_s": 15},
    }
    for name, table in layout.items():
        tables[name] = tables.get(name, {}) | table
    return configs.from_tables(tables)


def written(path: Path) -> dict[str, bytes]:
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read_whole(name).tobytes() for name in checkpoint.datasets}


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_what_one_layout_wrote_another_writes_again(comm, folder, compute):
    files: list[dict[str, bytes]] = []
    for number, layout in enumerate(LAYOUTS[comm.size]):
        with open_run(run_config(folder, compute, layout), comm) as run:
            with lock_run(comm, run.run_folder, restart=False) as lock:
                step, position, _ = resume(run)
                parallel_assert((step, position) == (number, 12 * number))
                if number == 0:
                    run.gradients.begin(0, True)
                    forward_backward(run, 0, 0)
                    run.optimizer.update(1e-2, 1.0)
                with open_saving(run, lock, None, None) as saving:
                    saving.save(number + 1, position + 12, None)
                    saving.finish()
            path = saving.newest
            files.append(written(path))
        parallel_assert(len(newest_first(path.parent)) == number + 1)
        same = [name for name in files[0] if files[-1][name] == files[0][name]]
        parallel_assert(files[-1].keys() == files[0].keys(), msg=f"{layout}: other datasets")
        parallel_assert(len(same) == len(files[0]), msg=f"{layout}: {sorted(files[0].keys() - set(same))[:3]} differ")
    moments = [name for name in files[0] if name.startswith("optimizer/exp_avg_sq/")]
    parallel_assert(all(np.frombuffer(files[0][name], "f4").any() for name in moments))
