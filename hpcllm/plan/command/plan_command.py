"""The command `plan`: predict a layout, or search for the best; print, explain, draw, write a run file. Pure.

    --layout     --> predict --> report.py                                  facts.py: the same as JSON
    --devices    --> search  --> ranking.py      a row --> explain.py, run file (written.py)     rows --> picture.py
    --calibrate  --> a machine file

Exit codes: 0 answered, also that a layout does not fit; 1 nothing that was searched fits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcllm.errors import ConfigError
from hpcllm.plan.command import explain, facts, ranking, report, written
from hpcllm.plan.command.picture import Curve, draw
from hpcllm.plan.command.question import Question, form, question
from hpcllm.plan.layouts import parse_pairs
from hpcllm.plan.prediction import Prediction, predict
from hpcllm.plan.searching.search import Search, search
from hpcllm.plan.searching.what_if import scaling
from hpcllm.plan.time.calibration import machine_text


class Answer(NamedTuple):
    """The same for people and for programs."""

    rows: Sequence[Prediction]  # the best first; of --layout the one
    lines: list[str]
    facts: dict[str, Any]  # for --json
    search: Search | None = None  # if there was one


def run(arguments: argparse.Namespace) -> int:
    """One form of the command. Raises UserError."""
    asked_for = form(arguments)
    if asked_for == "--calibrate":
        return _calibrate(arguments)
    asked = question(arguments)
    answer = FORMS[asked_for](asked)
    _carry_out(asked, answer)
    print(json.dumps(answer.facts) if arguments.json else "\n".join(answer.lines))
    return 0 if answer.rows else 1


def _calibrate(arguments: argparse.Namespace) -> int:
    """Print the machine file, or write it."""
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


def _one(asked: Question) -> Answer:
    found = predict(asked.machine, asked.model, _layout(asked), asked.global_batch, asked.sequence)
    if asked.explain not in (None, 1):
        raise ConfigError(f"--explain {asked.explain}: --layout is one layout; valid: --explain alone")
    if asked.write and found.layout.trainer != "hpcllm":
        raise ConfigError("--write makes a run file of our trainer: say trainer=hpcllm in --layout")
    if asked.explain:
        return Answer([found], explain.lines(found, asked.tokens), explain.as_json(found, asked.tokens))
    return Answer([found], report.lines(found, asked.tokens), facts.as_dict(found, asked.tokens))


def _layout(asked: Question) -> dict[str, Any]:
    """dp is what the devices leave, if the layout does not say it. Raises ConfigError."""
    pairs = parse_pairs("layout", asked.layout)
    if asked.devices is None:
        return pairs
    sizes = [pairs.get(axis, 1) for axis in ("tp", "pp")]
    rest = sizes[0] * sizes[1] if all(type(size) is int and size > 0 for size in sizes) else 1
    pairs.setdefault("dp", max(asked.devices // rest, 1))
    if type(pairs["dp"]) is int and pairs["dp"] * rest != asked.devices:
        raise ConfigError(
            f"--devices {asked.devices} are not dp x pp x tp = {pairs['dp']} x {sizes[1]} x {sizes[0]} of --layout; "
            f"valid: --devices {pairs['dp'] * rest}, or leave one of them out"
        )
    return pairs


def _best(asked: Question) -> Answer:
    assert asked.devices is not None
    assert asked.global_batch is not None
    found = search(
        asked.machine,
        asked.model,
        asked.devices,
        asked.global_batch,
        sequence=asked.sequence,
        top=max(asked.top, asked.rank, asked.explain or 0),
        constraints=asked.constraints,
    )
    tokens = asked.tokens
    if not found.best:
        return Answer([], ranking.nothing(found), ranking.as_dict(found, tokens))
    for option, rank in (("--explain", asked.explain or 1), ("--rank", asked.rank)):
        if rank > len(found.best):
            raise ConfigError(f"{option} {rank}: {len(found.best)} layouts were found; valid: 1 to {len(found.best)}")
    if asked.explain:
        row = found.best[asked.explain - 1]
        return Answer(found.best, explain.lines(row, tokens), explain.as_json(row, tokens), found)
    return Answer(found.best, ranking.lines(found, tokens), ranking.as_dict(found, tokens), found)


FORMS = {"--layout": _one, "--devices": _best}


def _carry_out(asked: Question, answer: Answer) -> None:
    """What is written beside the answer. Raises ConfigError."""
    if asked.plot and answer.rows:
        draw(answer.rows, _curves(answer.search), asked.plot)
        answer.lines.append(f"drawn: {asked.plot}")
    if asked.write and answer.rows:
        row = answer.rows[asked.rank - 1]
        written.write(asked.write, row, asked.machine, asked.tokens)
        answer.lines.append(f"written: {asked.write}, of rank {asked.rank}; data.store is left to be filled in")


def _curves(found: Search | None) -> dict[str, Curve]:
    """Tokens/s over devices; of a search only."""
    if found is None:
        return {}
    ways = {f"{found.global_batch} samples a step": False, "as many samples a device": True}
    points = {label: scaling(found, batch_grows) for label, batch_grows in ways.items()}
    return {label: [(one.devices, one.predicted.tokens_per_s) for one in curve] for label, curve in points.items()}
