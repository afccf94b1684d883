"""The command `plan`: predict a layout, or search for the best; print, explain, draw, write a run file. Pure.

    --layout     --> predict --> report.py                                                            both also as JSON
    --devices    --> search  --> ranking.py      a row --> explain.py, run file (report.py)     rows --> picture.py
    --calibrate  --> a machine file

The options are built for every command, so all that works on them is imported when `plan` runs. Exit codes: 0 answered,
also that a layout does not fit; 1 nothing that was searched fits.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcllm.cli.options import count, count_to, file_or_folder, options_given, spelled
from hpcllm.errors import ConfigError
from hpcllm.plotting import picture_path
from hpcllm.system.output import add_output, show
from hpcllm.system.raw_files import writing

if TYPE_CHECKING:
    from hpcllm.plan.layout_search import Search
    from hpcllm.plan.picture import Curve
    from hpcllm.plan.prediction import Prediction

COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MOST_ROWS = 1000
MORE = ("sequence", "tokens", "explain", "write", "plot", "json")
TAKES = {  # options of each form; the first ones are needed
    "--devices": ("machine", "model", "devices", "global_batch", "constraints", "top", "row", *MORE),
    "--layout": ("machine", "model", "layout", "global_batch", "devices", *MORE),
    "--calibrate": ("calibrate", "output", "json"),
}
NEEDS = {"--devices": 4, "--layout": 3, "--calibrate": 1}
WHY = {
    "machine": "a name of hpcllm/config/machines, or a file like those",
    "model": "a preset, as gpt3-175b, or a shape, as layers=24,hidden=2048,heads=16,vocab=50304,sequence=2048",
    "devices": "how many there are to use, or --layout for one as given",
    "global_batch": "samples of a step over all devices; usual are 1 to 4 million tokens, as 1024 samples of 2048",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    parser.description = (
        "Predict memory, step time and cost of training a model on a machine, and search the layouts for the fastest "
        "that fits; or predict one layout as given. Nothing is run, so it answers at once on a laptop."
    )
    row = count_to(MOST_ROWS)
    add = parser.add_argument_group("the question").add_argument
    add("--machine", metavar="NAME", help="of hpcllm/config/machines, or a file like those")
    add("--model", metavar="NAME", help="a preset, or a shape: layers=24,hidden=2048,heads=16,vocab=...")
    add("--devices", type=count, metavar="N", help="to use; a device is what one rank drives")
    add("--global-batch", type=count, metavar="N", help="samples of a step, over all devices")
    add("--sequence", type=count, metavar="N", help="tokens of a sample (default: the model's longest)")
    add("--tokens", type=token_count, metavar="N", help="to train on, as 300e9 or 300B (default: 20 a parameter)")
    words = "predict this one; another trainer's, unless it says trainer=hpcllm"
    add("--layout", metavar="tp=8,pp=8,...", help=words)
    words = "search only layouts like this; may be repeated"
    add("--constraints", action="append", default=[], metavar="tp<=8,recompute=none|full", help=words)
    answer = parser.add_argument_group("the answer")
    add = answer.add_argument
    add("--top", type=row, metavar="N", help="rows of the table (default: 10)")
    words = "the whole arithmetic of a row (default: the first)"
    add("--explain", nargs="?", const=1, type=row, metavar="N", help=words)
    add("--row", type=row, metavar="N", help="the row that --write takes (default: 1)")
    add("--write", type=new_file, metavar="RUN.toml", help="write a run file of the best layout, or of --row")
    add("--plot", type=picture_path, metavar="FILE", help="draw times, memory and scaling: .svg or .png")
    add_output(answer, "the answer as JSON, units in the keys")
    add = parser.add_argument_group("a machine of your own").add_argument
    add("--calibrate", nargs="+", metavar="RESULTS.json", help="make a machine file of what was measured on it")
    add("--output", metavar="FILE", help="with --calibrate: the machine file to write")


def token_count(text: str) -> float:
    """Convert '300e9', '300B' or '1.4T'."""
    match = re.fullmatch(r"([0-9.]{1,20}(?:[eE][+]?[0-9]{1,2})?) ?([KMBT]?)", text, re.ASCII)
    try:
        value = float(match[1]) * COUNTS[match[2]] if match else math.nan
    except ValueError:  # as 1.2.3
        value = math.nan
    if not 1 <= value <= 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; valid: 1 to 1e18, as 300e9, 300B or 1.4T")
    return value


def new_file(text: str) -> Path:
    """Convert the name of a file that is not there yet."""
    path = file_or_folder(text)
    if path.exists():
        raise argparse.ArgumentTypeError(f"{text!r} is there already; valid: the name of a new file")
    return path


class Answer(NamedTuple):
    """Result for people and for programs."""

    rows: Sequence[Prediction]  # the best first; of --layout the one
    lines: list[str]
    facts: dict[str, Any]  # for --json
    search: Search | None = None  # if there was one


def run(arguments: argparse.Namespace) -> int:
    """Answer one form of the command. Raises UserError."""
    form = "--calibrate" if arguments.calibrate else "--devices" if arguments.layout is None else "--layout"
    given = options_given(arguments, "plan", form, TAKES)
    if "row" in given and "write" not in given:
        raise ConfigError("--row is the row that --write takes; valid: with --write, or --explain N")
    for key in TAKES[form][: NEEDS[form]]:
        if key not in given:
            raise ConfigError(f"plan needs {spelled([key])}: {WHY[key]}")
    if form == "--calibrate":
        return _calibrate(arguments)
    answer = _predict(arguments) if form == "--layout" else _search(arguments)
    _write_files(arguments, answer)
    show(arguments, answer.facts, answer.lines)
    return 0 if answer.rows else 1


def _calibrate(arguments: argparse.Namespace) -> int:
    """Print the machine file, or write it."""
    from hpcllm.plan.time.calibration import machine_text

    text, output = machine_text([Path(path) for path in arguments.calibrate]), arguments.output
    if output is None:
        print(text, end="")
        return 0
    with writing(f"--output {output!r}"):
        Path(output).write_text(text, encoding="utf-8")
    print(f"written: {output}; use it as --machine {output}")
    return 0


def _predict(arguments: argparse.Namespace) -> Answer:
    """Predict the one layout of --layout."""
    from hpcllm.plan import explain, report
    from hpcllm.plan.prediction import predict

    batch, tokens = arguments.global_batch, arguments.tokens
    found = predict(arguments.machine, arguments.model, _layout(arguments), batch, arguments.sequence)
    if arguments.explain not in (None, 1):
        raise ConfigError(f"--explain {arguments.explain}: --layout is one layout; valid: --explain alone")
    if arguments.write and found.layout.trainer != "hpcllm":
        raise ConfigError("--write makes a run file of our trainer: say trainer=hpcllm in --layout")
    if arguments.explain:
        return Answer([found], explain.lines(found, tokens), explain.as_json(found, tokens))
    return Answer([found], report.lines(found, tokens), report.as_dict(found, tokens))


def _layout(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read --layout; dp is what --devices leaves, if the layout does not say it. Raises ConfigError."""
    from hpcllm.plan.layouts import parse_pairs

    pairs, devices = parse_pairs("layout", arguments.layout), arguments.devices
    if devices is None:
        return pairs
    sizes = [pairs.get(axis, 1) for axis in ("tp", "pp")]
    rest = sizes[0] * sizes[1] if all(type(size) is int and size > 0 for size in sizes) else 1
    pairs.setdefault("dp", max(devices // rest, 1))
    if type(pairs["dp"]) is int and pairs["dp"] * rest != devices:
        raise ConfigError(
            f"--devices {devices} are not dp x pp x tp = {pairs['dp']} x {sizes[1]} x {sizes[0]} of --layout; "
            f"valid: --devices {pairs['dp'] * rest}, or leave one of them out"
        )
    return pairs


def _search(arguments: argparse.Namespace) -> Answer:
    """Search the best layouts for --devices."""
    from hpcllm.plan import explain, ranking
    from hpcllm.plan.layout_search import search

    tokens, written, row = arguments.tokens, arguments.row or 1, arguments.explain or 1
    found = search(
        arguments.machine,
        arguments.model,
        arguments.devices,
        arguments.global_batch,
        sequence=arguments.sequence,
        top=max(arguments.top or 10, written, row),
        constraints=arguments.constraints,
    )
    best = found.best
    if not best:
        return Answer([], ranking.nothing(found), ranking.as_dict(found, tokens))
    for option, chosen in (("--explain", row), ("--row", written)):
        if chosen > len(best):
            raise ConfigError(f"{option} {chosen}: {len(best)} layouts were found; valid: 1 to {len(best)}")
    if arguments.explain:
        lines, facts = explain.lines(best[row - 1], tokens), explain.as_json(best[row - 1], tokens)
        return Answer(best, lines, facts, found)
    return Answer(best, ranking.lines(found, tokens), ranking.as_dict(found, tokens), found)


def _write_files(arguments: argparse.Namespace, answer: Answer) -> None:
    """Draw the picture and write the run file. Raises ConfigError."""
    if arguments.plot and answer.rows:
        from hpcllm.plan.picture import draw

        draw(answer.rows, _curves(answer.search), arguments.plot)
        answer.lines.append(f"drawn: {arguments.plot}")
    if arguments.write and answer.rows:
        from hpcllm.plan.report import write_run_file

        row = arguments.row or 1
        write_run_file(arguments.write, answer.rows[row - 1], arguments.machine, arguments.tokens)
        answer.lines.append(f"written: {arguments.write}, of row {row}; data.store is left to be filled in")


def _curves(found: Search | None) -> dict[str, Curve]:
    """Return tokens/s over devices; of a search only."""
    from hpcllm.plan.sensitivity import scaling

    if found is None:
        return {}
    labels = {f"{found.global_batch} samples a step": False, "as many samples a device": True}
    return {label: scaling(found, batch_grows) for label, batch_grows in labels.items()}
