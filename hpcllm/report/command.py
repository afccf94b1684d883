"""The command `report`: run folders -> one HTML page, or the numbers of its tables as JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from hpcllm.checkpoint.skeleton import aside
from hpcllm.errors import ConfigError
from hpcllm.printable import printable_path, size_text
from hpcllm.report.comparison import comparison
from hpcllm.report.facts import facts
from hpcllm.report.page import page, paragraph
from hpcllm.report.runs import Run, read_runs
from hpcllm.report.sections import sections


def run(arguments: argparse.Namespace) -> int:
    """Write the page, or print JSON. Raises UserError."""
    runs = read_runs(arguments.runs)
    if arguments.json:
        found = [facts(each) for each in runs]
        print(json.dumps(found[0] if len(found) == 1 else found))
        if not arguments.output:
            return 0
    path = arguments.output or _usual_place(arguments.runs)
    html = make(runs, arguments.log_x)
    _write(path, html)
    if not arguments.json:
        print(f"{printable_path(str(path))}: {size_text(len(html.encode()))}")
    if arguments.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def make(runs: Sequence[Run], log_x: bool = False) -> str:
    """The page of one run, or of several side by side. Raises ConfigError without matplotlib."""
    found = [facts(each) for each in runs]
    made = f"Made by hpcllm report at {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC."
    if len(runs) == 1:
        lead = paragraph(found[0]["state"]) + paragraph(made, faint=True)
        return page(runs[0].name, lead, sections(runs[0], found[0], log_x))
    title = f"{len(runs)} runs: {', '.join(each.name for each in runs)}"
    return page(title, paragraph(made, faint=True), comparison(runs, found, log_x))


def _usual_place(folders: Sequence[Path]) -> Path:
    return folders[0] / "report" / "index.html" if len(folders) == 1 else Path("report.html")


def _write(path: Path, html: str) -> None:
    """Whole or not at all. Raises ConfigError."""
    try:
        if path.name == "index.html":
            path.parent.mkdir(exist_ok=True)
        with aside(path, None) as temporary:
            temporary.write_text(html, encoding="utf-8")
            temporary.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{str(path)!r} cannot be written: {reason}; --output names another file") from error
