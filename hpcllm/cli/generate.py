"""`python -m hpcllm generate`: in one process or on tp x pp ranks, the text as it is made, or JSON.

one process    no MPI at all: works where only a login node is
tp x pp ranks  all make the text, rank 0 prints it
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcllm.cli.options import add_json, file_or_folder
from hpcllm.errors import MeshError
from hpcllm.system.job import launched_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.mpi.mesh import Mesh

KEYS = ("prompt", "tokens", "temperature", "top_k", "seed", "precision", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Continue a prompt with a trained model; the text appears as it is made. In one process, or under mpirun or "
        "srun on as many ranks as --tp times --pp says, which share the model."
    )
    add, words = parser.add_argument, "a checkpoint, a run folder, or a Hugging Face folder"
    add("checkpoint", type=file_or_folder, metavar="CHECKPOINT", help=words)
    add("--prompt", required=True, help="the text to continue")
    add("--tokens", type=int, default=200, help="at most so many new tokens (default: 200)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    add("--top-k", type=int, default=50, help="draw from the likeliest only; 0: from all (default: 50)")
    add("--seed", type=int, default=0, help="of the draws (default: 0)")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share each layer (default: 1)")
    add("--pp", type=int, default=1, metavar="N", help="stages of layers (default: 1)")
    words = "what to compute in (default: fp32)"
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=words)
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one (default)")
    add_json(parser, "print text and speed as JSON, at the end")


def run(arguments: argparse.Namespace) -> int:
    """Exit code of the command. Raises what continue_prompt raises, and MeshError for another number of ranks."""
    for flag in ("tp", "pp"):
        if getattr(arguments, flag) < 1:
            raise MeshError(f"--{flag} {getattr(arguments, flag)} is out of range; valid: 1 or more")
    if arguments.tp * arguments.pp == 1 and launched_ranks() == 1:
        _generate(arguments, None)
        return 0
    from hpcllm.system.job import run_job

    return run_job(lambda world: _generate_on_ranks(arguments, world))


def _generate_on_ranks(arguments: argparse.Namespace, world: MPI.Intracomm) -> int:
    from hpcllm.config.schema import MeshConfig
    from hpcllm.mpi.mesh import open_mesh

    need = arguments.tp * arguments.pp
    if world.size != need:
        raise MeshError(
            f"--tp {arguments.tp} times --pp {arguments.pp} is {need}, but the job has {world.size} "
            f"rank{'s' if world.size > 1 else ''}; start it with {need} (srun --ntasks={need}, mpirun -n {need}), "
            "or give other --tp and --pp"
        )
    with open_mesh(world, MeshConfig(dp=1, pp=arguments.pp, tp=arguments.tp)) as mesh:
        _generate(arguments, mesh)
    return 0


def _generate(arguments: argparse.Namespace, mesh: Mesh | None) -> None:
    from hpcllm.inference.generate import continue_prompt

    start_s = time.perf_counter()
    pieces = continue_prompt(arguments.checkpoint, mesh=mesh, **{key: getattr(arguments, key) for key in KEYS})
    loaded_s = time.perf_counter()
    prints = mesh is None or mesh.world.rank == 0
    if arguments.json:
        report = _report(arguments.prompt, pieces, loaded_s - start_s)
        pieces = iter([json.dumps(report)])
    else:
        pieces = itertools.chain([arguments.prompt], pieces)
    for piece in pieces:
        if prints:
            print(piece, end="", flush=True)
    if prints:
        print()


def _report(prompt: str, pieces: Iterator[str], load_s: float) -> dict[str, Any]:
    """Measure a generation for --json. first_token_s: of the prompt; tokens_per_s: of the tokens after, or null."""
    start_s = time.perf_counter()
    timed = [(piece, time.perf_counter() - start_s) for piece in pieces]
    tokens = len(timed) - 1  # the last piece belongs to no token
    text = "".join(piece for piece, _ in timed)
    first_s, last_s = (timed[place][1] if tokens else None for place in (0, tokens - 1))
    rate = (tokens - 1) / (last_s - first_s) if first_s and last_s and tokens > 1 else None
    report = {"prompt": prompt, "text": text, "tokens": tokens}
    return report | {"load_s": load_s, "first_token_s": first_s, "tokens_per_s": rate}
