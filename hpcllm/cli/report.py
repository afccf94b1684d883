"""The command `report`: run folders -> one HTML page, or the numbers of its tables as JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from hpcllm.checkpoint.file_layout import temporary_path
from hpcllm.cli.options import add_json, file_or_folder
from hpcllm.errors import ConfigError
from hpcllm.plotting import require_matplotlib
from hpcllm.report.comparison import comparison
from hpcllm.report.facts import facts
from hpcllm.report.page import Text, render
from hpcllm.report.run_folder import Run, read_runs
from hpcllm.report.sections import sections
from hpcllm.system.text import printable_path, size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Write one HTML page on a run: loss, speed, traffic, where the time went, memory, energy and cost, pipeline, "
        "checkpoints, machine, run file. Several runs are laid side by side. It may be running still."
    )
    parser.add_argument("runs", nargs="+", type=file_or_folder, metavar="RUN", help="a run folder")
    words = "the page (default: RUN/report/index.html; of several runs: report.html)"
    parser.add_argument("--output", type=file_or_folder, metavar="FILE", help=words)
    parser.add_argument("--log-x", action="store_true", help="steps on a logarithmic axis")
    parser.add_argument("--open", action="store_true", help="show it in a browser")
    add_json(parser, "print the numbers as JSON; a page only with --output")


def run(arguments: argparse.Namespace) -> int:
    """Write the page, or print JSON. Raises UserError."""
    runs = read_runs(arguments.runs)
    if arguments.json:
        found = [facts(each) for each in runs]
        print(json.dumps(found[0] if len(found) == 1 else found))
        if not arguments.output:
            return 0
    folders = arguments.runs
    usual = folders[0] / "report" / "index.html" if len(folders) == 1 else Path("report.html")
    path = arguments.output or usual
    html = make(runs, arguments.log_x)
    _write(path, html)
    if not arguments.json:
        print(f"{printable_path(str(path))}: {size_text(len(html.encode()))}")
    if arguments.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def make(runs: Sequence[Run], log_x: bool = False) -> str:
    """The page of one run, or of several side by side. Raises ConfigError without matplotlib."""
    require_matplotlib("a report has pictures: it")
    found = [facts(each) for each in runs]
    made = Text(f"Made by hpcllm report at {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC.", faint=True)
    if len(runs) == 1:
        return render(runs[0].name, [Text(found[0]["state"]), made], sections(runs[0], found[0], log_x))
    title = f"{len(runs)} runs: {', '.join(each.name for each in runs)}"
    return render(title, [made], comparison(runs, found, log_x))


def _write(path: Path, html: str) -> None:
    """Write the page, whole or not at all. Raises ConfigError."""
    try:
        if path.name == "index.html":
            path.parent.mkdir(exist_ok=True)
        with temporary_path(path, None) as temporary:
            temporary.write_text(html, encoding="utf-8")
            temporary.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{str(path)!r} cannot be written: {reason}; --output names another file") from error
