"""How fast a training state is written and read: ours beside plain pwrite and fsync, torch.save, and PyTorch's DCP.

    python perf/checkpoint_speed.py [--folder .] [--repeats 7] [--hidden 640] [--layers 8]
        [--mpio "mpirun --oversubscribe -n {ranks} VENV/bin/python"]     a Python whose h5py was built with MPI

A Llama's parameters and both Adam moments in fp32, about 45 M x 12 bytes, on 1 and on 2 ranks; on 2 either as flat
shares of everything (dp, states sharded) or with tp = 2, whose column splits put both ranks into every block of some
matrices. The methods take turns in one run, `repeats` times over; medians are of all turns but the first.

Writing: each method makes a new file beside the one of the turn before, which then goes, as a checkpoint does; the time
is that of the slowest rank and ends when all is on disk. `pwrite + fsync` writes the bytes of each rank in one stretch
of one file, 4 MiB a call; `..., let go` also tells Linux to forget what is written, as ours does. Torch saves a file a
rank.
Reading: into memory that is there already; ours verifies each byte. Cold: the file's pages are dropped from memory
first; warm: it was read once before. Writes checkpoint_speed.json and checkpoint_speed.md beside this file.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
LAUNCH = f"bash {shlex.quote(str(HERE.parent / 'jobscripts' / 'local' / 'mpirun.sh'))} {{ranks}} python"
CALL_BYTES = 1 << 22
CASES = [(1, "dp"), (2, "dp"), (2, "tp")]  # ranks, what splits
RAW, RAW_LET_GO, OURS, MPIO = "pwrite + fsync", "pwrite + fsync, let go", "hpcllm offsets", "hpcllm mpio"
TORCH, DCP = "torch.save", "torch.distributed.checkpoint"


def held_slabs(config: Any, rank: int, ranks: int, split: str) -> tuple[dict[str, Any], list[Any]]:
    """Specs of the state, and the slabs of this rank."""
    from hpcllm.checkpoint.layout import EXP_AVG, EXP_AVG_SQ, MODEL, DatasetSpec
    from hpcllm.checkpoint.slabs import Slab, boxes
    from hpcllm.model.shapes import parameter_shapes, shard_of, split_dim
    from hpcllm.mpi.partition import chunk_range

    shapes = {
        f"{kind}/{name}": shape
        for kind in (MODEL, EXP_AVG, EXP_AVG_SQ)
        for name, shape in parameter_shapes(config).items()
    }
    specs = {name: DatasetSpec(shape, "float32") for name, shape in shapes.items()}
    if split == "tp":
        parts = {
            name: shard_of(plain(name), shape, rank, ranks)
            for name, shape in shapes.items()
            if rank == 0 or split_dim(plain(name)) is not None
        }
        return specs, [Slab(name, *part) for name, part in parts.items()]
    first, end = chunk_range(sum(math.prod(shape) for shape in shapes.values()), ranks, rank)
    slabs, place = [], 0
    for name, shape in shapes.items():
        n = math.prod(shape)
        slabs += [Slab(name, *box) for box in boxes(shape, max(first - place, 0), min(end - place, n))]
        place += n
    return specs, slabs


def plain(name: str) -> str:
    """The parameter's own name."""
    return name.removeprefix("model/").removeprefix("optimizer/exp_avg/").removeprefix("optimizer/exp_avg_sq/")


class Bench:
    """One rank's state, and the ways to write and to read it; each way is collective."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        import numpy as np
        from mpi4py import MPI

        from hpcllm.checkpoint.writer import prepare
        from hpcllm.config.schema import ModelConfig

        self.comm, self.folder = MPI.COMM_WORLD, folder
        hidden = arguments.hidden
        config = ModelConfig(layers=arguments.layers, hidden=hidden, heads=8, ffn=hidden * 11 // 4, vocabulary=8192)
        self.specs, slabs = held_slabs(config, self.comm.rank, self.comm.size, arguments.split)
        random = np.random.default_rng(self.comm.rank)
        self.arrays = {slab: random.standard_normal(slab.shape, dtype=np.float32) for slab in slabs}
        self.out = {slab: np.zeros_like(array) for slab, array in self.arrays.items()}
        self.own_bytes = sum(array.nbytes for array in self.arrays.values())
        self.bytes = self.comm.allreduce(self.own_bytes)
        self.begin = self.comm.exscan(self.own_bytes) or 0
        self.plan = prepare(self.comm, self.specs, slabs)

    def raw(self, path: Path, let_go: bool) -> None:
        if self.comm.rank == 0:
            with path.open("wb") as file:
                file.truncate(self.bytes)
        self.comm.Barrier()
        descriptor = os.open(path, os.O_WRONLY)
        for place, piece in self.pieces(self.arrays):
            os.pwrite(descriptor, piece, place)
            if let_go:
                behind = max(self.begin, place - 4 * CALL_BYTES)
                os.posix_fadvise(descriptor, behind, place + len(piece) - behind, os.POSIX_FADV_DONTNEED)
        os.fsync(descriptor)
        os.close(descriptor)

    def pieces(self, arrays: dict[Any, Any]) -> Iterator[tuple[int, memoryview]]:
        place = self.begin
        for array in arrays.values():
            memory = memoryview(array.reshape(-1).view("u1"))
            for first in range(0, len(memory), CALL_BYTES):
                piece = memory[first : first + CALL_BYTES]
                yield place, piece
                place += len(piece)

    def ours(self, path: Path, writer: str) -> None:
        from hpcllm.checkpoint.writer import write
        from hpcllm.config.schema import CheckpointConfig

        write(path, self.comm, self.plan, self.arrays.__getitem__, {}, CheckpointConfig(writer=writer))

    def torch_save(self, path: Path) -> None:
        import torch

        path.mkdir(exist_ok=True)
        with (path / f"{self.comm.rank}.pt").open("wb") as file:
            torch.save(self.tensors(self.arrays), file)
            file.flush()
            os.fsync(file.fileno())

    def dcp_save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.tensors(self.arrays), checkpoint_id=path)  # syncs its files

    def tensors(self, arrays: dict[Any, Any]) -> dict[str, Any]:
        import torch

        return {f"{slab.dataset} {slab.start} {self.comm.rank}": torch.from_numpy(a) for slab, a in arrays.items()}

    def raw_read(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        for place, piece in self.pieces(self.out):
            os.preadv(descriptor, [piece], place)
        os.close(descriptor)

    def ours_read(self, path: Path) -> None:
        from hpcllm.checkpoint.reader import Checkpoint
        from hpcllm.checkpoint.restore import fetch

        with Checkpoint.open(path, self.comm) as checkpoint:
            fetch(checkpoint, list(self.out.items()))

    def torch_load(self, path: Path) -> None:
        import torch

        loaded = torch.load(path / f"{self.comm.rank}.pt")
        for name, tensor in self.tensors(self.out).items():
            tensor.copy_(loaded[name])

    def dcp_load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.tensors(self.out), checkpoint_id=path)

    def methods(self, with_mpio: bool) -> dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]]:
        """Name -> write, read."""
        found = {
            RAW: (functools.partial(self.raw, let_go=False), self.raw_read),
            RAW_LET_GO: (functools.partial(self.raw, let_go=True), self.raw_read),
            OURS: (functools.partial(self.ours, writer="offsets"), self.ours_read),
        }
        if with_mpio:
            return found | {MPIO: (functools.partial(self.ours, writer="mpio"), self.ours_read)}
        return found | {TORCH: (self.torch_save, self.torch_load), DCP: (self.dcp_save, self.dcp_load)}

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds of the slowest rank."""
        self.comm.Barrier()
        start_s = time.perf_counter()
        work()
        return self.comm.allreduce(time.perf_counter() - start_s, max_of())

    def turn(
        self, name: str, write: Callable[[Path], None], read: Callable[[Path], None], number: int
    ) -> dict[str, float]:
        """GB/s. The file of the turn before goes once this one is whole."""
        path, before = (self.folder / f"{name} {n}" for n in (number, number - 1))
        seconds = {"write": self.timed(lambda: write(path))}
        if self.comm.rank == 0:
            shutil.rmtree(before) if before.is_dir() else before.unlink(missing_ok=True)
            os.sync()
            drop(path)
        seconds["cold read"] = self.timed(lambda: read(path))
        if any((self.out[slab] != array).any() for slab, array in self.arrays.items()):
            raise ValueError(f"{name} did not read what it wrote")
        read(path)
        seconds["warm read"] = self.timed(lambda: read(path))
        for array in self.out.values():
            array.fill(0)
        return {what: self.bytes / s / 1e9 for what, s in seconds.items()}


def max_of() -> Any:
    from mpi4py import MPI

    return MPI.MAX


def drop(path: Path) -> None:
    """From the page cache; what is dirty stays, so sync first."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def rank_program(arguments: argparse.Namespace) -> None:
    """What each rank runs; rank 0 prints a line of JSON."""
    folder = Path(arguments.folder)
    bench = Bench(folder, arguments)
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch:
        import torch.distributed as dist

        store = dist.FileStore(str(folder / "rendezvous"), bench.comm.size)
        dist.init_process_group("gloo", store=store, rank=bench.comm.rank, world_size=bench.comm.size)
    methods = bench.methods(with_mpio=not has_torch)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for number in range(arguments.repeats + 1):
        for name, (write, read) in methods.items():
            turns[name].append(bench.turn(name, write, read, number))
    if bench.comm.rank == 0:
        kept = {name: found[1:] for name, found in turns.items()}
        print(json.dumps({"bytes": bench.bytes, "turns": kept}), flush=True)
    if has_torch:
        dist.destroy_process_group()


def launched(command: list[str], ranks: int, split: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the ranks of one case; a record a method."""
    folder = Path(arguments.folder).resolve() / f"checkpoint_speed {os.getpid()} {ranks} {split}"
    folder.mkdir()
    options = [f"--{key}={getattr(arguments, key)}" for key in ("repeats", "hidden", "layers")]
    command = [*command, __file__, "--rank", f"--split={split}", f"--folder={folder}", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=1800)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"bytes"')]
    if done.returncode or not lines:
        sys.exit(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}")
    found = json.loads(lines[-1])
    case = {"ranks": ranks, "split": split, "bytes": found["bytes"], "with_mpio": MPIO in found["turns"]}
    return [{**case, "method": name, "gb_s": turns} for name, turns in found["turns"].items()]


def table(records: list[dict[str, Any]]) -> str:
    rows = ["| ranks | split | method | write, GB/s | to pwrite + fsync | slowest, fastest | cold read | warm read |"]
    rows.append(f"|---:|---|---|{'---:|' * 5}")
    base = 1.0
    for r in records:
        gb_s = {what: [turn[what] for turn in r["gb_s"]] for what in r["gb_s"][0]}
        written = median(gb_s["write"])
        base = written if r["method"] == RAW else base
        where = "parallel h5py: " if r["with_mpio"] else ""
        rows.append(
            f"| {r['ranks']} | {r['split']} | {where}{r['method']} | {written:.2f} | {written / base:.2f} | "
            f"{min(gb_s['write']):.2f}, {max(gb_s['write']):.2f} | {median(gb_s['cold read']):.2f} | "
            f"{median(gb_s['warm read']):.2f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".", help="on the disk to be measured; three times the state must fit")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--launch", default=LAUNCH, help="command that starts {ranks} ranks of a Python")
    parser.add_argument("--mpio", default="", help="command that starts {ranks} ranks of a Python with a parallel h5py")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--split", default="dp", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_program(arguments)
        return
    records = []
    for ranks, split in CASES:
        print(f"{ranks} rank(s), {split}", file=sys.stderr, flush=True)
        records += launched(shlex.split(arguments.launch.format(ranks=ranks)), ranks, split, arguments)
        if arguments.mpio:
            records += launched(shlex.split(arguments.mpio.format(ranks=ranks)), ranks, split, arguments)
    head = (
        f"Made by checkpoint_speed.py: {os.environ.get('HPCLLM_MPI', 'mpich')}, {os.cpu_count()} cores, "
        f"{records[0]['bytes'] / 1e6:.0f} MB, medians of {arguments.repeats} turns, GB/s of 10^9 bytes."
    )
    (HERE / "checkpoint_speed.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    (HERE / "checkpoint_speed.md").write_text(f"{head}\n\n{table(records)}\n", encoding="utf-8")
    print(table(records))


if __name__ == "__main__":
    main()
