"""The command `report`: run folders -> one HTML page, or the numbers of its tables as JSON."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from hpcllm.checkpoint.file_layout import temporary_path
from hpcllm.cli.options import file_or_folder
from hpcllm.errors import ConfigError
from hpcllm.plotting import can_draw
from hpcllm.report.comparison import comparison
from hpcllm.report.facts import facts
from hpcllm.report.headline import headline
from hpcllm.report.page import Text, render
from hpcllm.report.run_folder import Run, read_runs
from hpcllm.report.sections import sections
from hpcllm.system.output import add_output, is_json_alone, write_json
from hpcllm.system.text import printable_path, size_text

NO_PICTURES = "The page has no pictures, as matplotlib is not installed: pip install matplotlib adds them."


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
    add_output(parser, "the numbers as JSON (alone: a page only with --output)")


def run(arguments: argparse.Namespace) -> int:
    """Write the page, or print JSON. Raises UserError."""
    runs = read_runs(arguments.runs)
    if arguments.json:
        found = [facts(each) for each in runs]
        write_json(arguments, found[0] if len(found) == 1 else found)
        if is_json_alone(arguments) and not arguments.output:
            return 0
    folders = arguments.runs
    path = arguments.output or (page_path(folders[0]) if len(folders) == 1 else Path("report.html"))
    html = make(runs, arguments.log_x)
    _write(path, html)
    if not can_draw():
        print(f"hpcllm: note: {NO_PICTURES}", file=sys.stderr)
    if not is_json_alone(arguments):
        print(f"{printable_path(str(path))}: {size_text(len(html.encode()))}")
    if arguments.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def page_path(run_folder: Path) -> Path:
    """Usual place of the page of one run."""
    return run_folder / "report" / "index.html"


def write_page(run_folder: Path) -> list[str]:
    """Write the page of a run that has ended; returns what tells where it is and opens it. Raises UserError."""
    path = page_path(run_folder)
    _write(path, make(read_runs([run_folder])))
    opener = "open" if sys.platform == "darwin" else "xdg-open"
    has_display = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    where = printable_path(str(path.resolve()))
    return [f"report: {where}", *([f"to open it: {opener} {shlex.quote(where)}"] if has_display else [])]


def make(runs: Sequence[Run], log_x: bool = False) -> str:
    """The page of one run, or of several side by side; without matplotlib its tables, and what to install."""
    found = [facts(each) for each in runs]
    made = Text(f"Made by hpcllm report at {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC.", faint=True)
    lead = [made] if can_draw() else [Text(NO_PICTURES), made]
    if len(runs) == 1:
        return render(runs[0].name, [*headline(runs[0], found[0]), *lead], sections(runs[0], found[0], log_x))
    title = f"{len(runs)} runs: {', '.join(each.name for each in runs)}"
    return render(title, lead, comparison(runs, found, log_x))


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
