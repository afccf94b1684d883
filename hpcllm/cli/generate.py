"""`python -m hpcllm generate`: one text as it is made, or many as lines of JSON; in one process or on several ranks.

one process         no MPI at all: works where only a login node is
dp x tp x pp ranks  tp x pp ranks share the model, dp such groups share the prompts; rank 0 prints
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcllm.cli.options import count, file_or_folder, whole
from hpcllm.config.rules import Range
from hpcllm.errors import ConfigError, MeshError
from hpcllm.system.command_line import add_stall_limit, real
from hpcllm.system.job import launched_ranks
from hpcllm.system.output import add_output, check_writable, is_json_alone, say, write_json
from hpcllm.system.text import harmless

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.inference.generate import Place, TextSettings
    from hpcllm.mpi.mesh import Mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Continue a prompt with a trained model; the text appears as it is made. Or many prompts: they are made at "
        "once, and each text is a line of JSON. In one process, or under mpirun or srun on as many ranks as --tp "
        "times --pp times --dp says."
    )
    add, words = parser.add_argument, "a checkpoint, a run folder, or a Hugging Face folder"
    add("checkpoint", type=file_or_folder, metavar="CHECKPOINT", help=words)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", help="the text to continue")
    words = "many: one a line, in FILE.jsonl the key prompt of each line; -: standard input, either of both"
    prompts.add_argument("--prompts", type=file_or_folder, metavar="FILE", help=words)
    words = "a prompt is what a user says: rendered by the chat template of the model, and answered"
    add("--chat", action="store_true", help=words)
    _add_sampling(parser)
    _add_batch(parser)
    add("--tp", type=count, default=1, metavar="N", help="ranks that share each layer (default: 1)")
    add("--pp", type=count, default=1, metavar="N", help="stages of layers (default: 1)")
    words = "what to compute in (default: fp32)"
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=words)
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one (default)")
    add_stall_limit(parser)
    add_output(parser, "text and speed as JSON, at the end")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=whole(0, 1 << 30), default=200, metavar="N", help="at most so many new tokens (default: 200)")
    add("--temperature", type=real(Range(0, 1e9)), default=0.8, help="0: always the likeliest token (default: 0.8)")
    add("--top-k", type=whole(0, 1 << 24), default=50, help="draw from the likeliest only; 0: from all (default: 50)")
    words = "from the likeliest whose probabilities reach this sum (default: 1, all)"
    add("--top-p", type=real(Range(1e-9, 1)), default=1.0, help=words)
    words = "from those with this share of the likeliest one's probability (default: 0, all)"
    add("--min-p", type=real(Range(0, 1)), default=0.0, help=words)
    words = "make tokens that the text has less likely: above 1 (default: 1, off)"
    add("--repetition-penalty", type=real(Range(1e-3, 1e3)), default=1.0, metavar="X", help=words)
    words = "end before this text; may be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=words)
    add("--seed", type=whole(0, (1 << 63) - 1), default=0, help="of the draws (default: 0)")


def _add_batch(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("many texts")
    add = group.add_argument
    add("--samples", type=count, default=1, metavar="N", help="texts of each prompt (default: 1)")
    add("--output", type=Path, metavar="FILE", help="lines of JSON (default: standard output)")
    add("--unordered", action="store_true", help="write texts as they end, not in the order of the prompts")
    add("--batch", type=count, default=32, metavar="N", help="texts at once (default: 32)")
    words = "for keys and values, on each rank (default: half of the memory that is free)"
    add("--cache-mib", type=count, metavar="N", help=words)
    words = "of all ranks together: the report says what a million tokens cost at the speed that was measured"
    add("--price-per-hour", type=real(Range(0, 1e9)), metavar="X", help=words)
    add("--dp", type=count, default=1, metavar="N", help="groups of ranks that share the prompts (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Exit code of the command. Raises what inference raises, and MeshError for another number of ranks."""
    _check(arguments)
    if arguments.tp * arguments.pp * arguments.dp == 1 and launched_ranks() == 1:
        _generate(arguments, None)
        return 0
    from hpcllm.system.job import run_job

    return run_job(lambda world: _generate_on_ranks(arguments, world), arguments.stall_s)


def _is_many(arguments: argparse.Namespace) -> bool:
    return bool(arguments.prompts or arguments.samples > 1)


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together, and for an output that cannot be written."""
    of_many = (arguments.output, arguments.unordered, arguments.dp > 1, arguments.price_per_hour is not None)
    if not _is_many(arguments) and any(of_many):
        named = "--output, --unordered, --price-per-hour and --dp"
        raise ConfigError(f"{named} are for many texts: give --prompts, or --samples above 1")
    if _is_many(arguments) and is_json_alone(arguments) and not arguments.output:
        raise ConfigError("--json and the texts would both go to standard output; give --output FILE or --json FILE")
    check_writable(arguments.output)


def _generate_on_ranks(arguments: argparse.Namespace, world: MPI.Intracomm) -> int:
    from hpcllm.config.schema import MeshConfig
    from hpcllm.mpi.mesh import open_mesh

    need = arguments.tp * arguments.pp * arguments.dp
    if world.size != need:
        raise MeshError(
            f"--tp {arguments.tp} times --pp {arguments.pp} times --dp {arguments.dp} is {need}, but the job has "
            f"{world.size} rank{'s' if world.size > 1 else ''}; start it with {need} (srun --ntasks={need}, "
            f"mpirun -n {need}), or give other --tp, --pp and --dp"
        )
    with open_mesh(world, MeshConfig(dp=arguments.dp, pp=arguments.pp, tp=arguments.tp)) as mesh:
        _generate(arguments, mesh)
    return 0


def _generate(arguments: argparse.Namespace, mesh: Mesh | None) -> None:
    from hpcllm.system.quick_imports import quick_imports

    with quick_imports():
        from hpcllm.inference.complete import BatchSettings
        from hpcllm.inference.generate import Place, TextSettings
        from hpcllm.model.sampling import Sampling

    keys = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = Sampling(**{key: getattr(arguments, key) for key in keys})
    cache_bytes = arguments.cache_mib << 20 if arguments.cache_mib else None
    batch = BatchSettings(arguments.tokens, arguments.batch, cache_bytes)
    stops = tuple(arguments.stop)
    settings = TextSettings(sampling, batch, arguments.seed, arguments.samples, stops, arguments.chat)
    make = _many if _is_many(arguments) else _one
    make(arguments, settings, Place(arguments.precision, arguments.device, mesh))


def _prints(mesh: Mesh | None) -> bool:
    return mesh is None or mesh.world.rank == 0


def _one(arguments: argparse.Namespace, settings: TextSettings, place: Place) -> None:
    """Print one text as it is made, or its report."""
    from hpcllm.inference.generate import continue_prompt

    start_s = time.perf_counter()
    pieces = continue_prompt(arguments.checkpoint, arguments.prompt, settings, place)
    loaded_s = time.perf_counter()
    prints = _prints(place.mesh)
    report: dict[str, Any] = {}
    pieces = _timed(arguments.prompt, pieces, loaded_s - start_s, report)
    for piece in itertools.chain([] if arguments.chat else [arguments.prompt], pieces):
        if prints and not is_json_alone(arguments):
            print(harmless(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    if prints and not is_json_alone(arguments):
        print()
    if prints and arguments.json:
        write_json(arguments, report)


def _many(arguments: argparse.Namespace, settings: TextSettings, place: Place) -> None:
    """Write many texts as lines of JSON, and their report."""
    from tqdm import tqdm

    from hpcllm.inference.generate import complete
    from hpcllm.inference.prompt_files import completion_lines, read_prompts
    from hpcllm.mpi.collective_errors import on_root

    start_s = time.perf_counter()
    comm = place.mesh.world if place.mesh else None
    prompts = on_root(comm, lambda: read_prompts(arguments.prompts) if arguments.prompts else [arguments.prompt])
    completions = complete(arguments.checkpoint, prompts, settings, place)
    loaded_s, tokens, texts = time.perf_counter(), 0, len(prompts) * settings.samples
    if not _prints(place.mesh):
        for _ in completions:
            pass
        return
    with (
        arguments.output.open("w", encoding="utf-8") if arguments.output else nullcontext(sys.stdout) as file,
        tqdm(total=texts, unit="text", leave=False, disable=None, file=sys.stderr) as bar,
        completion_lines(file, prompts, settings.samples, not arguments.unordered) as write,
    ):
        for completion in completions:
            write(completion)
            tokens += completion.tokens
            bar.update()
    made_s = time.perf_counter() - loaded_s
    report = {"prompts": len(prompts), "texts": texts, "tokens": tokens, "load_s": loaded_s - start_s}
    report |= {"generate_s": made_s, "tokens_per_s": tokens / made_s}
    rate = f"{tokens:,} tokens in {made_s:.1f} s, {tokens / made_s:,.0f} tokens/s"
    lines = [f"{texts:,} texts, {rate}: {arguments.output}"]
    if arguments.price_per_hour is not None and tokens:
        report["price_per_million_tokens"] = arguments.price_per_hour * made_s / 3600 / tokens * 1e6
        lines.append(f"{report['price_per_million_tokens']:,.3g} for a million tokens, without the time to load")
    if arguments.output and not is_json_alone(arguments):
        say(lines)
    if arguments.json:
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
