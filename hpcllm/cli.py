"""The commands, one thin function each. Nothing heavy is imported before a command is known to be run.

Exit codes: 0 done, 1 failed, 2 user error, 75 stopped early with a checkpoint: the same command goes on.
130, 143: ended by Ctrl-C, by SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hpcllm
from hpcllm.checkpoint import command as checkpoint
from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.plan.command import plan_arguments

if TYPE_CHECKING:
    from hpcllm.summary import Summary


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # of what stands behind the output


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one command, return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
        if sys.stdout:  # None where it was closed: `inspect >&-`
            sys.stdout.flush()
        return code
    except HpcllmError as error:
        print(f"hpcllm: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `inspect | head`
        _forget_output()
        return 0
    except KeyboardInterrupt:
        print("hpcllm: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename:
            raise
        _forget_output()
        print(f"hpcllm: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


def _forget_output() -> None:
    """What is left of the output goes nowhere; else the interpreter would fail to write it once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcllm",
        description="Training code for large language models that is native to MPI.",
        epilog="In a batch job: srun python -m hpcllm train run.toml. Exit codes: 0 done, 1 failed, 2 user error, "
        "75 stopped early with a checkpoint (by its time limit, a signal, a file STOP): the same command goes on.",
    )
    parser.add_argument("--version", action="version", version=f"hpcllm {hpcllm.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_prepare(commands.add_parser("prepare", help="turn text into a token store"))
    _add_preflight(commands.add_parser("preflight", help="is this allocation fit to run? in a minute, on one page"))
    _add_train(commands.add_parser("train", help="train a model, or go on where the run stopped"))
    _add_plan(commands.add_parser("plan", help="time, memory and cost of layouts on a machine, and the best of them"))
    _add_memory(commands.add_parser("memory", help="what each rank of a run will hold, before the job is queued"))
    _add_layout(commands.add_parser("layout", help="which rank goes where, what crosses nodes, and a better order"))
    _add_generate(commands.add_parser("generate", help="continue a prompt with a trained model"))
    checkpoint.add_parsers(
        commands.add_parser("checkpoint", help="inspect, verify, diff, convert, compress or decompress checkpoints")
    )
    _add_report(commands.add_parser("report", help="one page of pictures and numbers of a run, or of several"))
    _add_schedule(
        commands.add_parser("schedule", help="prove, time and draw a pipeline schedule before the job is queued")
    )
    return parser


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Clean text, drop duplicates, train or load a tokenizer, write one HDF5 token store. "
        "Ranks share the work under mpirun or srun; any number of them writes the same file."
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        type=checkpoint.file_or_folder,
        metavar="INPUT",
        help="files or folders: text, .jsonl, also .gz and .zst; none: the source of the Python standard library",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the token store to write")
    parser.add_argument("--field", default="text", help="what holds the text in a line of .jsonl (default: text)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="size of a new tokenizer (default: 4096)")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a byte-level tokenizer.json to use instead")
    parser.add_argument(
        "--validation-fraction", type=float, default=0.02, help="share of the documents to hold out (default: 0.02)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the train/validation split (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(command=prepare)


def prepare(arguments: argparse.Namespace) -> int:
    from hpcllm.data.prepare import PrepareOptions
    from hpcllm.data.prepare import prepare as prepare_store
    from hpcllm.job import run_job

    keys = ("output", "field", "vocabulary", "tokenizer", "validation_fraction", "seed")
    options = PrepareOptions(inputs=tuple(arguments.inputs), **{key: getattr(arguments, key) for key in keys})

    def job(world) -> int:  # type: ignore[no-untyped-def]
        report = prepare_store(options, world)
        if world.rank == 0:
            print(json.dumps(report.as_dict()) if arguments.json else "\n".join(report.lines()))
        return 0

    return run_job(job)


def _add_run_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN.toml", help="the run file")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a key of the run file, as in --set mesh.dp=4; may be repeated",
    )


def _add_preflight(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check the allocation that it is started in, as in srun python -m hpcllm preflight run.toml: MPI, cores, "
        "devices, network, memory, files, versions; then measure matrix products, messages, files and codecs. Exit "
        "code 1 if a run would break or take far longer than it should."
    )
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN.toml", help="a run file to check as well")
    _add_overrides(parser)
    parser.add_argument("--quick", action="store_true", help="no measurements: a second instead of half a minute")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(command=preflight)


def preflight(arguments: argparse.Namespace) -> int:
    from hpcllm.job import run_job

    def job(world) -> int:  # type: ignore[no-untyped-def]
        from hpcllm.preflight.command import run

        return run(arguments, world)

    return run_job(job)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train as a run file says. On a run folder with a checkpoint it goes on from the newest one."
    _add_run_file(parser)
    parser.add_argument("--restart", action="store_true", help="begin at step 0; the old run folder is renamed")
    parser.add_argument(
        "--dry-run", action="store_true", help="check all that train checks before it begins; start and write nothing"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="of the job to check, with --dry-run (default: those launched, or dp x pp x tp)",
    )
    parser.add_argument("--json", action="store_true", help="print the closing table as JSON")
    parser.set_defaults(command=train)


def train(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        from hpcllm.dry_run import run as try_out

        return try_out(arguments)
    if arguments.ranks is not None:
        raise ConfigError("--ranks is for --dry-run; the ranks of a run are those that mpirun or srun starts")
    from hpcllm.job import TO_BE_CONTINUED, StopSignals, run_job

    def job(world) -> int:  # type: ignore[no-untyped-def]
        from hpcllm import config
        from hpcllm.together import on_root

        tables = on_root(world, lambda: config.to_tables(config.load(arguments.run, arguments.overrides)))
        checked = config.from_tables(tables)
        from hpcllm.preflight.start import start
        from hpcllm.train import train as run  # after the run file is known to be right: it takes seconds

        start(world, checked.run.device, checked.limits.stall_s)
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            summary = run(checked, world, signals, arguments.restart)
        if world.rank == 0:
            print(json.dumps(summary.as_dict()) if arguments.json else f"\n{summary.text()}", flush=True)
        signals.keep_out()  # all is done; and a job that is requeued is ended at once
        if not summary.stopped_by:
            return 0
        on_root(world, lambda: print(_what_goes_on(summary), file=sys.stderr if arguments.json else None, flush=True))
        return TO_BE_CONTINUED

    with StopSignals() as signals:
        return run_job(job)


def _what_goes_on(summary: Summary) -> str:
    """Of a run that has stopped, and is put back into the queue if its run file says so."""
    from hpcllm.slurm import back_into_queue

    if summary.config.run.requeue:
        return back_into_queue(summary.not_requeued)
    return "the same command goes on from the checkpoint"


def _add_plan(parser: argparse.ArgumentParser) -> None:
    plan_arguments.add_arguments(parser)
    parser.set_defaults(command=plan)


def plan(arguments: argparse.Namespace) -> int:
    from hpcllm.plan.command.plan_command import run

    return run(arguments)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predict the memory of each rank of a run: parameters, gradients, optimizer, activations, buffers. Nothing is "
        "run, so it answers at once on a login node."
    )
    _add_run_file(parser)
    parser.add_argument("--ranks", type=int, metavar="N", help="of the job (default: dp x pp x tp of the run file)")
    parser.add_argument("--json", action="store_true", help="print as JSON, sizes in bytes")
    parser.set_defaults(command=memory)


def memory(arguments: argparse.Namespace) -> int:
    from hpcllm.plan.command.memory_command import run

    return run(arguments)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show which rank of a run holds what on which node, count the bytes of a step that cross nodes, and look for "
        "an order of the ranks with fewer. Nothing is run, so it answers at once on a login node."
    )
    _add_run_file(parser)
    parser.add_argument("--ranks", type=int, metavar="N", help="of the job (default: dp x pp x tp of the run file)")
    parser.add_argument("--ranks-per-node", type=int, metavar="K", help="default: the devices of run.machine's nodes")
    parser.add_argument("--ranks-per-package", type=int, metavar="P", help="default: of run.machine, or 1")
    parser.add_argument(
        "--reorder",
        nargs="?",
        const="MPICH_RANK_ORDER",
        metavar="FILE",
        help="write the better order as Cray MPICH reads it (default: MPICH_RANK_ORDER)",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON, sizes in bytes")
    parser.set_defaults(command=layout)


def layout(arguments: argparse.Namespace) -> int:
    from hpcllm.reorder.command import run

    return run(arguments)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continue a prompt with a trained model; the text appears as it is made. In one process, or under mpirun or "
        "srun on as many ranks as --tp times --pp says, which share the model."
    )
    parser.add_argument(
        "checkpoint",
        type=checkpoint.file_or_folder,
        metavar="CHECKPOINT",
        help="a checkpoint, a run folder, or a Hugging Face folder",
    )
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="at most so many new tokens (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="draw from the likeliest only; 0: from all (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each layer (default: 1)")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="stages of layers (default: 1)")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="what to compute in (default: fp32)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one (default)"
    )
    parser.add_argument("--json", action="store_true", help="print text and speed as JSON, at the end")
    parser.set_defaults(command=generate)


def generate(arguments: argparse.Namespace) -> int:
    from hpcllm.generate_command import run

    return run(arguments)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write one HTML page on a run: loss, speed, traffic, where the time went, memory, energy and cost, pipeline, "
        "checkpoints, machine, run file. Several runs are laid side by side. It may be running still."
    )
    parser.add_argument("runs", nargs="+", type=checkpoint.file_or_folder, metavar="RUN", help="a run folder")
    parser.add_argument(
        "--output",
        type=checkpoint.file_or_folder,
        metavar="FILE",
        help="the page (default: RUN/report/index.html; of several runs: report.html)",
    )
    parser.add_argument("--log-x", action="store_true", help="steps on a logarithmic axis")
    parser.add_argument("--open", action="store_true", help="show it in a browser")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON; a page only with --output")
    parser.set_defaults(command=report)


def report(arguments: argparse.Namespace) -> int:
    from hpcllm.report.command import run

    return run(arguments)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prove that a pipeline schedule runs to its end, and show how much of the time its ranks idle and what they "
        "hold. Nothing is run, so it answers at once on a login node."
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="gpipe, 1f1b, interleaved, zb-h1, zb-v, or custom, with --file"
    )
    parser.add_argument("--file", metavar="FILE", help="custom: the schedule as text, as --write writes it")
    parser.add_argument("--stages", metavar="P", help="ranks of one pipeline (mesh.pp)")
    parser.add_argument("--microbatches", metavar="M", help="of one step (pipeline.microbatches)")
    parser.add_argument("--chunks", metavar="V", help="pieces of the model on each rank (default: the schedule's own)")
    parser.add_argument(
        "--times",
        metavar="F=1,B=2,W=1,send=0.1",
        help="of one microbatch, in any unit: forward, whole backward, its weight part, a message "
        "(default: F=1, B=2 F, W=B/2, send=0)",
    )
    parser.add_argument("--recompute", action="store_true", help="each backward pass does the forward pass again")
    parser.add_argument(
        "--bytes", metavar="SIZE", help="of one message, as in 4MiB: microbatch x sequence x hidden x 4"
    )
    parser.add_argument("--compare", action="store_true", help="all schedules side by side, without NAME")
    parser.add_argument("--measured", metavar="TRACE", help="explain a step that was run, from its trace, without NAME")
    parser.add_argument("--draw", metavar="FILE", help="draw a picture, .svg or .png")
    parser.add_argument(
        "--write", metavar="FILE", help="write the schedule as text, to change it and read it by --file"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(command=schedule)


def schedule(arguments: argparse.Namespace) -> int:
    from hpcllm.pipeline.command import run

    return run(arguments)
