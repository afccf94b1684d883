"""`python -m hpcllm generate`: in one process or on tp x pp ranks, the text as it is made, or JSON.

one process    no MPI at all: works where only a login node is
tp x pp ranks  all make the text, rank 0 prints it
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcllm.errors import MeshError
from hpcllm.generate import continue_prompt
from hpcllm.launched import launched_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.mesh import Mesh

KEYS = ("prompt", "tokens", "temperature", "top_k", "seed", "precision", "device")


def run(arguments: argparse.Namespace) -> int:
    """Exit code of the command. Raises what continue_prompt raises, and MeshError for another number of ranks."""
    for flag in ("tp", "pp"):
        if getattr(arguments, flag) < 1:
            raise MeshError(f"--{flag} {getattr(arguments, flag)} is out of range; valid: 1 or more")
    if arguments.tp * arguments.pp == 1 and launched_ranks() == 1:
        _tell(arguments, None)
        return 0
    from hpcllm.job import run_job

    return run_job(lambda world: _tell_together(arguments, world))


def _tell_together(arguments: argparse.Namespace, world: MPI.Intracomm) -> int:
    from hpcllm.config import MeshConfig
    from hpcllm.mesh import open_mesh

    need = arguments.tp * arguments.pp
    if world.size != need:
        raise MeshError(
            f"--tp {arguments.tp} times --pp {arguments.pp} is {need}, but the job has {world.size} "
            f"rank{'s' if world.size > 1 else ''}; start it with {need} (srun --ntasks={need}, mpirun -n {need}), "
            "or give other --tp and --pp"
        )
    with open_mesh(world, MeshConfig(dp=1, pp=arguments.pp, tp=arguments.tp)) as mesh:
        _tell(arguments, mesh)
    return 0


def _tell(arguments: argparse.Namespace, mesh: Mesh | None) -> None:
    start_s = time.perf_counter()
    pieces = continue_prompt(arguments.checkpoint, mesh=mesh, **{key: getattr(arguments, key) for key in KEYS})
    loaded_s = time.perf_counter()
    speaks = mesh is None or mesh.world.rank == 0
    if arguments.json:
        report = _report(arguments.prompt, pieces, loaded_s - start_s)
        if speaks:
            print(json.dumps(report))
        return
    if speaks:
        print(arguments.prompt, end="", flush=True)
    for piece in pieces:
        if speaks:
            print(piece, end="", flush=True)
    if speaks:
        print()


def _report(prompt: str, pieces: Iterator[str], load_s: float) -> dict[str, Any]:
    """first_token_s: the prompt's; tokens_per_s: of those that follow, null if there are none."""
    start_s = time.perf_counter()
    said = [(piece, time.perf_counter() - start_s) for piece in pieces]
    tokens = len(said) - 1  # the last piece is no token's
    text = "".join(piece for piece, _ in said)
    first_s, last_s = (said[place][1] if tokens else None for place in (0, tokens - 1))
    rate = (tokens - 1) / (last_s - first_s) if first_s and last_s and tokens > 1 else None
    return {
        "prompt": prompt,
        "text": text,
        "tokens": tokens,
        "load_s": load_s,
        "first_token_s": first_s,
        "tokens_per_s": rate,
    }
