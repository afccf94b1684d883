"""The command `plan`: predict a layout, or search for the best; print, explain, draw, write a run file. Pure.

    --layout     --> predict --> report.py                                                            both also as JSON
    --devices    --> search  --> ranking.py      a row --> explain.py, run file (report.py)     rows --> picture.py
    --calibrate  --> a machine file

The options are built for every command, so all that works on them is imported when `plan` runs. Exit codes: 0 answered,
also that a layout does not fit; 1 nothing that was searched fits.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcllm.cli.options import parse_count
from hpcllm.errors import ConfigError

if TYPE_CHECKING:
    from hpcllm.plan.layout_search import Search
    from hpcllm.plan.picture import Curve
    from hpcllm.plan.prediction import Prediction

COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
ROWS, MOST_ROWS = ("top", "explain", "rank"), 1000
MORE = ("sequence", "tokens", "explain", "write", "plot")
TAKES = {  # options of each form, beside --json; the first ones are needed
    "--devices": ("machine", "model", "devices", "global_batch", "constraints", "top", "rank", *MORE),
    "--layout": ("machine", "model", "layout", "global_batch", "devices", *MORE),
    "--calibrate": ("calibrate", "output"),
}
NEEDS = {"--devices": 4, "--layout": 3, "--calibrate": 1}
WHY = {
    "machine": "a name of hpcllm/config/machines, or a file like those",
    "model": "a preset, as gpt3-175b, or a shape, as layers=24,hidden=2048,heads=16,vocab=50304,sequence=2048",
    "devices": "how many there are to use, or --layout for one as given",
    "global_batch": "samples of a step over all devices; usual are 1 to 4 million tokens, as 1024 samples of 2048",
    "layout": "as in tp=8,pp=8,dp=2,micro_batch=1,recompute=full",
    "calibrate": "what `python -m hpcllm.perf step --calibrate` wrote",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    parser.description = (
        "Predict memory, step time and cost of training a model on a machine, and search the layouts for the fastest "
        "that fits; or predict one layout as given. Nothing is run, so it answers at once on a laptop."
    )
    request = parser.add_argument_group("the question")
    request.add_argument("--machine", metavar="NAME", help="of hpcllm/config/machines, or a file like those")
    request.add_argument(
        "--model", metavar="NAME", help="a preset, or a shape: layers=24,hidden=2048,heads=16,vocab=..."
    )
    request.add_argument("--devices", metavar="N", help="to use; a device is what one rank drives")
    request.add_argument("--global-batch", metavar="N", help="samples of a step, over all devices")
    request.add_argument("--sequence", metavar="N", help="tokens of a sample (default: the model's longest)")
    request.add_argument("--tokens", metavar="N", help="to train on, as 300e9 or 300B (default: 20 a parameter)")
    request.add_argument(
        "--layout", metavar="tp=8,pp=8,...", help="predict this one; another trainer's, unless it says trainer=hpcllm"
    )
    request.add_argument(
        "--constraints",
        action="append",
        default=[],
        metavar="tp<=8,recompute=none|full",
        help="search only layouts like this; may be repeated",
    )
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--top", metavar="N", help="rows of the table (default: 10)")
    answer.add_argument(
        "--explain", nargs="?", const="1", metavar="RANK", help="the whole arithmetic of a row (default: the first)"
    )
    answer.add_argument("--rank", metavar="RANK", help="the row that --write takes (default: 1)")
    answer.add_argument("--write", metavar="RUN.toml", help="write a run file of the best layout, or of --rank")
    answer.add_argument("--plot", metavar="FILE", help="draw times, memory and scaling: .svg or .png")
    answer.add_argument("--json", action="store_true", help="print as JSON, units in the keys")
    measured = parser.add_argument_group("a machine of your own")
    measured.add_argument(
        "--calibrate", nargs="+", metavar="RESULTS.json", help="make a machine file of what was measured on it"
    )
    measured.add_argument("--output", metavar="FILE", help="with --calibrate: the machine file to write")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of a search or of one layout, each checked by itself."""

    machine: str
    model: str
    devices: int | None
    layout: str  # empty: search
    global_batch: int | None  # None: given by the layout
    sequence: int | None
    tokens: float | None  # to train on; None: a usual number for the model
    constraints: tuple[str, ...]
    top: int
    explain: int | None  # a rank of the table
    rank: int  # rank of the row that is written
    write: Path | None
    plot: Path | None


class Answer(NamedTuple):
    """Result for people and for programs."""

    rows: Sequence[Prediction]  # the best first; of --layout the one
    lines: list[str]
    facts: dict[str, Any]  # for --json
    search: Search | None = None  # if there was one


def run(arguments: argparse.Namespace) -> int:
    """Answer one form of the command. Raises UserError."""
    form = _form(arguments)
    if form == "--calibrate":
        return _calibrate(arguments)
    request = _request(arguments)
    answer = _predict(request) if form == "--layout" else _search(request)
    _write_files(request, answer)
    print(json.dumps(answer.facts) if arguments.json else "\n".join(answer.lines))
    return 0 if answer.rows else 1


def _form(arguments: argparse.Namespace) -> str:
    """Return the form of the command, a key of TAKES. Raises ConfigError for options that do not go together."""
    given = {key for keys in TAKES.values() for key in keys if getattr(arguments, key) not in (None, [])}
    found = "--calibrate" if "calibrate" in given else "--layout" if "layout" in given else "--devices"
    wrong = [_option(key) for key in sorted(given) if key not in TAKES[found]]
    if wrong:
        takes = ", ".join(map(_option, TAKES[found]))
        raise ConfigError(f"plan {found} does not take {', '.join(wrong)}; it takes {takes}, --json")
    if "rank" in given and "write" not in given:
        raise ConfigError("--rank is the row that --write takes; valid: with --write, or --explain RANK")
    missing = [key for key in TAKES[found][: NEEDS[found]] if key not in given]
    if missing:
        raise ConfigError(f"plan needs {_option(missing[0])}: {WHY[missing[0]]}")
    return found


def _request(arguments: argparse.Namespace) -> Request:
    """Check the text of each option. Raises ConfigError."""
    from hpcllm.plotting import picture_path

    if arguments.write is not None and Path(arguments.write).exists():
        raise ConfigError(f"--write {arguments.write!r} is there already; valid: the name of a new file")
    return Request(
        machine=arguments.machine,
        model=arguments.model,
        layout=arguments.layout or "",
        constraints=tuple(arguments.constraints),
        tokens=None if arguments.tokens is None else _tokens(arguments.tokens),
        top=_count(arguments, "top") or 10,
        rank=_count(arguments, "rank") or 1,
        write=None if arguments.write is None else Path(arguments.write),
        plot=None if arguments.plot is None else picture_path(arguments.plot),
        **{key: _count(arguments, key) for key in ("devices", "global_batch", "sequence", "explain")},
    )


def _count(arguments: argparse.Namespace, key: str) -> Any:
    text = getattr(arguments, key)
    if text is None:
        return None
    number = parse_count(key.replace("_", "-"), text)
    if key in ROWS and number > MOST_ROWS:
        raise ConfigError(f"{_option(key)} {number} is out of range; valid: 1 to {MOST_ROWS}")
    return number


def _tokens(text: str) -> float:
    match = re.fullmatch(r"([0-9.]{1,20}(?:[eE][+]?[0-9]{1,2})?) ?([KMBT]?)", text, re.ASCII)
    try:
        value = float(match[1]) * COUNTS[match[2]] if match else math.nan
    except ValueError:  # as 1.2.3
        value = math.nan
    if not 1 <= value <= 1e18:
        raise ConfigError(f"--tokens {text!r} is no number of tokens; valid: 1 to 1e18, as 300e9, 300B or 1.4T")
    return value


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _calibrate(arguments: argparse.Namespace) -> int:
    """Print the machine file, or write it."""
    from hpcllm.plan.time.calibration import machine_text

    text = machine_text([Path(path) for path in arguments.calibrate])
    if arguments.output is None:
        print(text, end="")
        return 0
    try:
        Path(arguments.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {arguments.output!r} cannot be written: {error.strerror or error}") from error
    print(f"written: {arguments.output}; use it as --machine {arguments.output}")
    return 0


def _predict(request: Request) -> Answer:
    """Predict the one layout of --layout."""
    from hpcllm.plan import explain, report
    from hpcllm.plan.prediction import predict

    found = predict(request.machine, request.model, _layout(request), request.global_batch, request.sequence)
    if request.explain not in (None, 1):
        raise ConfigError(f"--explain {request.explain}: --layout is one layout; valid: --explain alone")
    if request.write and found.layout.trainer != "hpcllm":
        raise ConfigError("--write makes a run file of our trainer: say trainer=hpcllm in --layout")
    if request.explain:
        return Answer([found], explain.lines(found, request.tokens), explain.as_json(found, request.tokens))
    return Answer([found], report.lines(found, request.tokens), report.as_dict(found, request.tokens))


def _layout(request: Request) -> dict[str, Any]:
    """Read --layout; dp is what --devices leaves, if the layout does not say it. Raises ConfigError."""
    from hpcllm.plan.layouts import parse_pairs

    pairs = parse_pairs("layout", request.layout)
    if request.devices is None:
        return pairs
    sizes = [pairs.get(axis, 1) for axis in ("tp", "pp")]
    rest = sizes[0] * sizes[1] if all(type(size) is int and size > 0 for size in sizes) else 1
    pairs.setdefault("dp", max(request.devices // rest, 1))
    if type(pairs["dp"]) is int and pairs["dp"] * rest != request.devices:
        raise ConfigError(
            f"--devices {request.devices} are not dp x pp x tp = {pairs['dp']} x {sizes[1]} x {sizes[0]} of --layout; "
            f"valid: --devices {pairs['dp'] * rest}, or leave one of them out"
        )
    return pairs


def _search(request: Request) -> Answer:
    """Search the best layouts for --devices."""
    from hpcllm.plan import explain, ranking
    from hpcllm.plan.layout_search import search

    assert request.devices is not None
    assert request.global_batch is not None
    found = search(
        request.machine,
        request.model,
        request.devices,
        request.global_batch,
        sequence=request.sequence,
        top=max(request.top, request.rank, request.explain or 0),
        constraints=request.constraints,
    )
    best, tokens = found.best, request.tokens
    if not best:
        return Answer([], ranking.nothing(found), ranking.as_dict(found, tokens))
    for option, rank in (("--explain", request.explain or 1), ("--rank", request.rank)):
        if rank > len(best):
            raise ConfigError(f"{option} {rank}: {len(best)} layouts were found; valid: 1 to {len(best)}")
    if request.explain:
        row = best[request.explain - 1]
        return Answer(best, explain.lines(row, tokens), explain.as_json(row, tokens), found)
    return Answer(best, ranking.lines(found, tokens), ranking.as_dict(found, tokens), found)


def _write_files(request: Request, answer: Answer) -> None:
    """Draw the picture and write the run file. Raises ConfigError."""
    if request.plot and answer.rows:
        from hpcllm.plan.picture import draw

        draw(answer.rows, _curves(answer.search), request.plot)
        answer.lines.append(f"drawn: {request.plot}")
    if request.write and answer.rows:
        from hpcllm.plan.report import write_run_file

        write_run_file(request.write, answer.rows[request.rank - 1], request.machine, request.tokens)
        answer.lines.append(f"written: {request.write}, of rank {request.rank}; data.store is left to be filled in")


def _curves(found: Search | None) -> dict[str, Curve]:
    """Return tokens/s over devices; of a search only."""
    from hpcllm.plan.sensitivity import scaling

    if found is None:
        return {}
    labels = {f"{found.global_batch} samples a step": False, "as many samples a device": True}
    points = {label: scaling(found, batch_grows) for label, batch_grows in labels.items()}
    return {label: [(one.devices, one.predicted.tokens_per_s) for one in curve] for label, curve in points.items()}
