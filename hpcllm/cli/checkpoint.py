"""`python -m hpcllm checkpoint ...`: look into checkpoints, check, compare, convert and pack them.

inspect           one process, however many were launched
diff              the same
verify, convert   alone without MPI, or shared by all ranks under mpirun or srun
compress, decompress

Exit codes: 0 fine, 1 damaged, different or failed, 2 user error. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpcllm.cli.options import file_or_folder, whole
from hpcllm.config.rules import Range
from hpcllm.system.command_line import add_stall_limit, real
from hpcllm.system.job import run_with_or_without_mpi
from hpcllm.system.output import COLUMNS, add_output, is_json_alone, say, show
from hpcllm.system.text import printable_path

if TYPE_CHECKING:
    from mpi4py import MPI

NAMED = "a checkpoint; of a run folder or its checkpoints/, the newest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Mount the commands."""
    parser.description = "Look into checkpoints, check, compare, convert and pack them."
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command, (about, add_options) in COMMANDS.items():
        own = commands.add_parser(command.__name__, help=about)
        add_options(own)
        own.set_defaults(command=command)


def _add_inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show a checkpoint: the tree of its tensors with shapes, types, sizes and norms, its run file, and how it was "
        "written. All of it is read and checked; a damaged block is named, and the rest is shown."
    )
    parser.add_argument("checkpoint", type=file_or_folder, metavar="CHECKPOINT", help=NAMED)
    add_output(parser)


def inspect(arguments: argparse.Namespace) -> int:
    def describe_it() -> int:
        from hpcllm.checkpoint.folder import locate
        from hpcllm.checkpoint.inspect import describe, tree_lines
        from hpcllm.checkpoint.reader import Checkpoint

        with Checkpoint.open(_resolved(locate(arguments.checkpoint), arguments.checkpoint)) as checkpoint:
            with _progress("reading", sum(item.spec.bytes for item in checkpoint.datasets.values()), None) as bar:
                found = describe(checkpoint, bar)
            show(arguments, found, tree_lines(found, 0 if arguments.wide else COLUMNS))
        return 1 if found["damage"] else 0

    return _by_one_process(describe_it)


def _add_verify_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check every byte of checkpoints or token stores and list all blocks that are damaged; of a token store its "
        "fingerprint is made anew. Ranks share the reading."
    )
    parser.add_argument("checkpoints", nargs="+", type=file_or_folder, metavar="CHECKPOINT", help=NAMED)
    parser.add_argument("--all", action="store_true", help="of a folder, all checkpoints instead of the newest")
    add_stall_limit(parser)
    add_output(parser)


def verify(arguments: argparse.Namespace) -> int:
    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.checkpoint.folder import locate_all
        from hpcllm.data.store_verify import verify as verify_file
        from hpcllm.mpi.collective_errors import on_root

        most = None if arguments.all else 1
        paths = on_root(comm, lambda: [p for named in arguments.checkpoints for p in locate_all(named)[:most]])
        reports = []
        for path in paths:
            with _progress(path.name, 0, comm) as bar:
                reports.append(verify_file(path, comm, bar))
            if not is_json_alone(arguments) and _speaks(comm):
                say(reports[-1].lines(), arguments.wide)
        if arguments.json and _speaks(comm):
            show(arguments, [report.as_dict() for report in reports], [])
        return 0 if all(report.is_sound for report in reports) else 1

    return run_with_or_without_mpi(job, arguments.stall_s)


def _add_diff_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare two checkpoints, whatever layout wrote them, compressed or not: attributes, keys of the run file, and "
        "tensors element by element. Exit code 0: the same bits; when, where and on which mesh a file was "
        "written is shown, but does not count."
    )
    parser.add_argument("a", type=file_or_folder, metavar="A", help=NAMED)
    parser.add_argument("b", type=file_or_folder, metavar="B", help="the same")
    words = "numbers are equal if they differ by at most T + T x the larger magnitude (default: equal bits)"
    parser.add_argument("--tolerance", type=real(Range(0, 1e300)), metavar="T", help=words)
    add_output(parser)


def diff(arguments: argparse.Namespace) -> int:
    def compare() -> int:
        from hpcllm.checkpoint.diff import difference
        from hpcllm.checkpoint.folder import locate
        from hpcllm.checkpoint.reader import Checkpoint

        path_a, path_b = (_resolved(locate(named), named) for named in (arguments.a, arguments.b))
        with Checkpoint.open(path_a) as a, Checkpoint.open(path_b) as b:
            with _progress("comparing", sum(item.spec.bytes for item in a.datasets.values()), None) as bar:
                found = difference(a, b, arguments.tolerance, bar)
            show(arguments, found.as_dict(path_a, path_b), found.lines(path_a, path_b))
        return 0 if found.is_none else 1

    return _by_one_process(compare)


def _add_convert_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Convert a Hugging Face folder (safetensors; GPT-2, GPT-NeoX, Llama, Mistral, Qwen2) into a checkpoint, or a "
        "checkpoint into such a folder; a folder of PEFT's into a checkpoint of adapters. Ranks share the work under "
        "mpirun or srun; the model need not fit in memory."
    )
    add = parser.add_argument
    add("source", type=file_or_folder, metavar="SOURCE", help=f"a folder with config.json or PEFT's, or {NAMED}")
    add("target", type=file_or_folder, metavar="TARGET", help="the file.h5 or the folder to write; must be new")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="", help="round to it (default: keep)")
    words = "write a run's low-rank adapters as a folder of PEFT's (default: merged into their base)"
    add("--adapter", action="store_true", help=words)
    words = "where the base of adapters lies now (default: where it lay)"
    add("--base", type=file_or_folder, metavar="PATH", help=words)
    words = "write a folder as gpt2, gpt_neox, llama, mistral or qwen2 (default: what it came as, else the first "
    add("--architecture", default="", metavar="NAME", help=words + "that can say the model)")
    words = "at most so much in a file of a folder (default: 5)"
    add("--shard-gb", type=real(Range(0, 1e6, above=True)), default=5.0, metavar="GB", help=words)
    add_stall_limit(parser)
    add_output(parser, "the report as JSON")


def convert(arguments: argparse.Namespace) -> int:
    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.checkpoint.huggingface.convert import convert as convert_weights

        keys = ("source", "target", "dtype", "architecture", "shard_gb", "adapter", "base")
        with _progress("converting", 0, comm) as bar:
            report = convert_weights(comm=comm, advance=bar, **{key: getattr(arguments, key) for key in keys})
        if _speaks(comm):
            show(arguments, report.as_dict(), report.lines())
        return 0

    return run_with_or_without_mpi(job, arguments.stall_s)


def _add_compress_options(parser: argparse.ArgumentParser) -> None:
    _add_decompress_options(parser)
    parser.description = (
        "Write an archive of a checkpoint: the same bits in byte planes under Zstandard, as chunks that any HDF5 reads "
        "with its zstd filter (the package hdf5plugin). train, generate, convert and all of these commands read it as "
        "it is. Ranks share the work under mpirun or srun; the source stays."
    )
    parser.add_argument(
        "--level", type=whole(1, 19), default=1, help="of Zstandard, 1 to 19 (default: 1, nearly the smallest)"
    )


def compress(arguments: argparse.Namespace) -> int:
    return _repack(arguments, arguments.level)


def _add_decompress_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write the checkpoint that an archive was made of. Ranks share the work; the archive stays."
    parser.add_argument("source", type=file_or_folder, metavar="SOURCE", help=NAMED)
    words = "a new file, or a folder for one of the same name"
    parser.add_argument("target", type=file_or_folder, metavar="TARGET", help=words)
    add_stall_limit(parser)
    add_output(parser, "the report as JSON")


def decompress(arguments: argparse.Namespace) -> int:
    return _repack(arguments, None)


def _repack(arguments: argparse.Namespace, level: int | None) -> int:
    """Write an archive of a level, or what an archive was made of."""

    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.checkpoint import archive
        from hpcllm.checkpoint.folder import locate, new_file
        from hpcllm.mpi.collective_errors import on_root

        source = on_root(comm, lambda: _resolved(locate(arguments.source), arguments.source))
        target = on_root(comm, lambda: new_file(arguments.target, source.name))
        with _progress(source.name, 0, comm) as bar:
            if level is None:
                report = archive.decompress(source, target, comm, bar)
            else:
                report = archive.compress(source, target, comm, level, bar)
        if _speaks(comm):
            show(arguments, report.as_dict(), report.lines())
        return 0

    return run_with_or_without_mpi(job, arguments.stall_s)


COMMANDS = {
    inspect: ("show what is in a checkpoint, and how it was written", _add_inspect_options),
    verify: ("check every byte, and list all that is damaged", _add_verify_options),
    diff: ("what differs between two checkpoints, and by how much", _add_diff_options),
    convert: ("a checkpoint from or for Hugging Face's transformers", _add_convert_options),
    compress: ("write a smaller file with the same bits", _add_compress_options),
    decompress: ("write the file that was compressed, byte for byte", _add_decompress_options),
}


def _by_one_process(command: Callable[[], int]) -> int:
    """Run a command on the first of the launched ranks; all get its exit code."""

    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.mpi.collective_errors import on_root

        return on_root(comm, command)

    return run_with_or_without_mpi(job)


def _resolved(path: Path, named: Path) -> Path:
    if path != named:
        print(f"{printable_path(str(named))}: its newest checkpoint is {path.name}", file=sys.stderr)
    return path


def _speaks(comm: MPI.Intracomm | None) -> bool:
    return comm is None or comm.rank == 0


@contextlib.contextmanager
def _progress(label: str, total_bytes: int, comm: MPI.Intracomm | None) -> Iterator[Callable[[int], None]]:
    """Function that takes the bytes that are done: a bar on stderr, of rank 0's share, if that is a terminal."""
    if not (_speaks(comm) and sys.stderr.isatty()):
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=total_bytes or None, desc=label, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:
        yield bar.update
