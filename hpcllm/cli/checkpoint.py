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
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcllm.cli.options import file_or_folder
from hpcllm.errors import ConfigError
from hpcllm.system.job import run_with_or_without_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.checkpoint.reader import Checkpoint

_NAMED = "a checkpoint; of a run folder or its checkpoints/, the newest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Mount the commands."""
    parser.description = "Look into checkpoints, check, compare, convert and pack them."
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_inspect(commands.add_parser("inspect", help="show what is in a checkpoint, and how it was written"))
    _add_verify(commands.add_parser("verify", help="check every byte, and list all that is damaged"))
    _add_diff(commands.add_parser("diff", help="what differs between two checkpoints, and by how much"))
    _add_convert(commands.add_parser("convert", help="a checkpoint from or for Hugging Face's transformers"))
    _add_compress(commands.add_parser("compress", help="write a smaller file with the same bits"))
    _add_decompress(commands.add_parser("decompress", help="write the file that was compressed, byte for byte"))


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show a checkpoint: the tree of its tensors with shapes, types, sizes and norms, its run file, and how it was "
        "written. All of it is read and checked; a damaged block is named, and the rest is shown."
    )
    parser.add_argument("checkpoint", type=file_or_folder, metavar="CHECKPOINT", help=_NAMED)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(command=inspect)


def inspect(arguments: argparse.Namespace) -> int:
    from hpcllm.checkpoint.inspect import describe, tree_lines

    def shown(checkpoint: Checkpoint, advance: Callable[[int], None]) -> int:
        found = describe(checkpoint, advance)
        _print(found, tree_lines(found), arguments.json)
        return 1 if found["damage"] else 0

    return _by_one_process(lambda: _open_and(arguments.checkpoint, shown, "reading"))


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check every byte of checkpoints and list all blocks that are damaged. Ranks share the reading."
    )
    parser.add_argument("checkpoints", nargs="+", type=file_or_folder, metavar="CHECKPOINT", help=_NAMED)
    parser.add_argument("--all", action="store_true", help="of a folder, all checkpoints instead of the newest")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(command=verify)


def verify(arguments: argparse.Namespace) -> int:
    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.checkpoint.folder import locate_all
        from hpcllm.checkpoint.inspect import verify_file
        from hpcllm.mpi.collective_errors import on_root

        most = None if arguments.all else 1
        paths = on_root(comm, lambda: [p for named in arguments.checkpoints for p in locate_all(named)[:most]])
        reports = []
        for path in paths:
            with _progress(path.name, 0, comm) as bar:
                reports.append(verify_file(path, comm, bar))
            if not arguments.json and _speaks(comm):
                print("\n".join(reports[-1].lines()), flush=True)
        if arguments.json and _speaks(comm):
            print(json.dumps([report.as_dict() for report in reports]))
        return 0 if all(report.is_sound for report in reports) else 1

    return run_with_or_without_mpi(job)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare two checkpoints, whatever layout wrote them, compressed or not: attributes, keys of the run file, and "
        "tensors element by element. Exit code 0: the same bits; when, where and on which mesh a file was "
        "written is shown, but does not count."
    )
    parser.add_argument("a", type=file_or_folder, metavar="A", help=_NAMED)
    parser.add_argument("b", type=file_or_folder, metavar="B", help="the same")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="numbers are equal if they differ by at most T + T x the larger magnitude (default: equal bits)",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(command=diff)


def diff(arguments: argparse.Namespace) -> int:
    if arguments.tolerance is not None and not 0 <= arguments.tolerance < float("inf"):
        raise ConfigError(f"--tolerance {arguments.tolerance} is out of range; valid: 0 or more")

    def compare() -> int:
        from hpcllm.checkpoint.diff import difference
        from hpcllm.checkpoint.folder import locate
        from hpcllm.checkpoint.reader import Checkpoint

        path_a, path_b = (_resolved(locate(named), named) for named in (arguments.a, arguments.b))
        with Checkpoint.open(path_a) as a, Checkpoint.open(path_b) as b:
            with _progress("comparing", sum(item.spec.bytes for item in a.datasets.values()), None) as bar:
                found = difference(a, b, arguments.tolerance, bar)
            _print(found.as_dict(path_a, path_b), found.lines(path_a, path_b), arguments.json)
        return 0 if found.is_none else 1

    return _by_one_process(compare)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Convert a Hugging Face folder (safetensors; GPT-2, GPT-NeoX, Llama, Mistral, Qwen2) into a checkpoint, or a "
        "checkpoint into such a folder. Ranks share the work under mpirun or srun; the model need not fit in memory."
    )
    parser.add_argument("source", type=file_or_folder, metavar="SOURCE", help=f"a folder with config.json, or {_NAMED}")
    parser.add_argument(
        "target", type=file_or_folder, metavar="TARGET", help="the file.h5 or the folder to write; must be new"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="", help="round to it (default: keep)")
    parser.add_argument(
        "--architecture",
        default="",
        metavar="NAME",
        help="write a folder as gpt2, gpt_neox, llama, mistral or qwen2 (default: what it came as, else the first "
        "that can say the model)",
    )
    parser.add_argument(
        "--shard-gb", type=float, default=5.0, metavar="GB", help="at most so much in a file of a folder (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(command=convert)


def convert(arguments: argparse.Namespace) -> int:
    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.checkpoint.huggingface.convert import convert as convert_weights

        keys = ("source", "target", "dtype", "architecture", "shard_gb")
        with _progress("converting", 0, comm) as bar:
            report = convert_weights(comm=comm, advance=bar, **{key: getattr(arguments, key) for key in keys})
        if _speaks(comm):
            _print(report.as_dict(), report.lines(), arguments.json)
        return 0

    return run_with_or_without_mpi(job)


def _add_compress(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write an archive of a checkpoint: the same bits in byte planes under Zstandard, as chunks that any HDF5 reads "
        "with its zstd filter (the package hdf5plugin). train, generate, convert and all of these commands read it as "
        "it is. Ranks share the work under mpirun or srun; the source stays."
    )
    _add_source_and_target(parser)
    parser.add_argument("--level", type=int, default=1, help="of Zstandard, 1 to 19 (default: 1, nearly the smallest)")
    parser.set_defaults(command=compress)


def compress(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.level <= 19:
        raise ConfigError(f"--level {arguments.level} is out of range; valid: 1 to 19")

    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.checkpoint.archive import compress as pack

        return _repack(arguments, comm, lambda source, target, bar: pack(source, target, comm, arguments.level, bar))

    return run_with_or_without_mpi(job)


def _add_decompress(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write the checkpoint that an archive was made of. Ranks share the work; the archive stays."
    _add_source_and_target(parser)
    parser.set_defaults(command=decompress)


def decompress(arguments: argparse.Namespace) -> int:
    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.checkpoint.archive import decompress as unpack

        return _repack(arguments, comm, lambda source, target, bar: unpack(source, target, comm, bar))

    return run_with_or_without_mpi(job)


def _add_source_and_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=file_or_folder, metavar="SOURCE", help=_NAMED)
    parser.add_argument(
        "target", type=file_or_folder, metavar="TARGET", help="a new file, or a folder for one of the same name"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _repack(arguments: argparse.Namespace, comm: MPI.Intracomm | None, work: Callable[..., Any]) -> int:
    from hpcllm.checkpoint.folder import locate, new_file
    from hpcllm.mpi.collective_errors import on_root

    source = on_root(comm, lambda: _resolved(locate(arguments.source), arguments.source))
    target = on_root(comm, lambda: new_file(arguments.target, source.name))
    with _progress(source.name, 0, comm) as bar:
        report = work(source, target, bar)
    if _speaks(comm):
        _print(report.as_dict(), report.lines(), arguments.json)
    return 0


def _by_one_process(command: Callable[[], int]) -> int:
    """Run a command on the first of the launched ranks; all get its exit code."""

    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.mpi.collective_errors import on_root

        return on_root(comm, command)

    return run_with_or_without_mpi(job)


def _open_and(named: Path, work: Callable[[Checkpoint, Callable[[int], None]], int], label: str) -> int:
    from hpcllm.checkpoint.folder import locate
    from hpcllm.checkpoint.reader import Checkpoint

    with Checkpoint.open(_resolved(locate(named), named)) as checkpoint:
        total = sum(item.spec.bytes for item in checkpoint.datasets.values())
        with _progress(label, total, None) as bar:
            return work(checkpoint, bar)


def _resolved(path: Path, named: Path) -> Path:
    if path != named:
        print(f"{named}: its newest checkpoint is {path.name}", file=sys.stderr)
    return path


def _speaks(comm: MPI.Intracomm | None) -> bool:
    return comm is None or comm.rank == 0


def _print(report: Mapping[str, Any], lines: list[str], as_json: bool) -> None:
    print(json.dumps(report) if as_json else "\n".join(lines))


@contextlib.contextmanager
def _progress(label: str, total_bytes: int, comm: MPI.Intracomm | None) -> Iterator[Callable[[int], None]]:
    """Function that takes the bytes that are done: a bar on stderr, of rank 0's share, if that is a terminal."""
    if not (_speaks(comm) and sys.stderr.isatty()):
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=total_bytes or None, desc=label, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:
        yield bar.update
