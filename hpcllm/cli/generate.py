"""`python -m hpcllm generate`: in one process or on tp x pp ranks, the text as it is made, or JSON.

one process    no MPI at all: works where only a login node is
tp x pp ranks  all make the text, rank 0 prints it
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcllm.cli.options import count, file_or_folder, whole
from hpcllm.config.rules import Range
from hpcllm.errors import MeshError
from hpcllm.system.command_line import add_stall_limit, real
from hpcllm.system.job import launched_ranks
from hpcllm.system.output import add_output, is_json_alone, write_json
from hpcllm.system.text import harmless

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.mpi.mesh import Mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Continue a prompt with a trained model; the text appears as it is made. In one process, or under mpirun or "
        "srun on as many ranks as --tp times --pp says, which share the model."
    )
    add, words = parser.add_argument, "a checkpoint, a run folder, or a Hugging Face folder"
    add("checkpoint", type=file_or_folder, metavar="CHECKPOINT", help=words)
    add("--prompt", required=True, help="the text to continue")
    words = "the prompt is what a user says: rendered by the chat template of the model, and answered"
    add("--chat", action="store_true", help=words)
    add("--tokens", type=whole(0, 1 << 30), default=200, metavar="N", help="at most so many new tokens (default: 200)")
    add("--temperature", type=real(Range(0, 1e9)), default=0.8, help="0: always the likeliest token (default: 0.8)")
    add("--top-k", type=whole(0, 1 << 24), default=50, help="draw from the likeliest only; 0: from all (default: 50)")
    add("--seed", type=whole(0, (1 << 63) - 1), default=0, help="of the draws (default: 0)")
    add("--tp", type=count, default=1, metavar="N", help="ranks that share each layer (default: 1)")
    add("--pp", type=count, default=1, metavar="N", help="stages of layers (default: 1)")
    words = "what to compute in (default: fp32)"
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=words)
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one (default)")
    add_stall_limit(parser)
    add_output(parser, "text and speed as JSON, at the end")


def run(arguments: argparse.Namespace) -> int:
    """Exit code of the command. Raises what continue_prompt raises, and MeshError for another number of ranks."""
    if arguments.tp * arguments.pp == 1 and launched_ranks() == 1:
        _generate(arguments, None)
        return 0
    from hpcllm.system.job import run_job

    return run_job(lambda world: _generate_on_ranks(arguments, world), arguments.stall_s)


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
    from hpcllm.system.quick_imports import quick_imports

    with quick_imports():
        from hpcllm.inference.complete import BatchSettings
        from hpcllm.inference.generate import Place, TextSettings, continue_prompt
        from hpcllm.model.sampling import Sampling

    start_s = time.perf_counter()
    sampling, batch = Sampling(arguments.temperature, arguments.top_k), BatchSettings(arguments.tokens)
    settings = TextSettings(sampling, batch, arguments.seed, chat=arguments.chat)
    place = Place(arguments.precision, arguments.device, mesh)
    pieces = continue_prompt(arguments.checkpoint, arguments.prompt, settings, place)
    loaded_s = time.perf_counter()
    prints = mesh is None or mesh.world.rank == 0
    report: dict[str, Any] = {}
    pieces = _timed(arguments.prompt, pieces, loaded_s - start_s, report)
    for piece in itertools.chain([] if arguments.chat else [arguments.prompt], pieces):
        if prints and not is_json_alone(arguments):
            print(harmless(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    if prints and not is_json_alone(arguments):
        print()
    if prints and arguments.json:
        write_json(arguments, report)


def _timed(prompt: str, pieces: Iterator[str], load_s: float, report: dict[str, Any]) -> Iterator[str]:
    """Yield the pieces and fill the report of --json at the end.

    first_token_s: of the prompt; tokens_per_s: of the tokens after, or null.
    """
    start_s, timed = time.perf_counter(), []
    for piece in pieces:
        timed.append((piece, time.perf_counter() - start_s))
        yield piece
    tokens = len(timed) - 1  # the last piece belongs to no token
    text = "".join(piece for piece, _ in timed)
    first_s, last_s = (timed[place][1] if tokens else None for place in (0, tokens - 1))
    rate = (tokens - 1) / (last_s - first_s) if first_s and last_s and tokens > 1 else None
    report |= {"prompt": prompt, "text": text, "tokens": tokens}
    report |= {"load_s": load_s, "first_token_s": first_s, "tokens_per_s": rate}
