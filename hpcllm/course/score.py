"""Points of a check, and the page that says how they came about. Pure.

records of the ranks --> Part per law, race, prediction: points, what was seen, hint --> lines, facts for JSON
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcllm.course.lab import POINTS, Lab, Prediction, Race, Row
from hpcllm.course.runner import Outcome, Record
from hpcllm.system.text import table

EXACT = 1e-9  # share by which a prediction that has to be exact may be off
PRINTED_LINES = 10  # of what a file printed, shown beside a hint


@dataclass(frozen=True)
class Part:
    """Result of a law, a race or a prediction."""

    stage: str
    name: str
    about: str
    points: int
    earned: float = 0.0
    seen: str = "not reached"
    hint_key: str = ""
    hint: str = ""
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Grade:
    """Points of one file in one lab, part by part."""

    lab: str
    title: str
    parts: tuple[Part, ...]
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)  # seed, machine, hash of the code
    printed: tuple[str, ...] = ()  # the last lines that the file printed, of all ranks

    @property
    def earned(self) -> float:
        return sum(part.earned for part in self.parts)

    @property
    def all_laws_hold(self) -> bool:
        return all(part.earned == part.points for part in self.parts if part.stage == "laws")

    @property
    def first_hint(self) -> Part | None:
        return next((part for part in self.parts if part.hint_key), None)

    def of_stage(self, stage: str) -> float:
        """Return the points earned in a stage."""
        return sum(part.earned for part in self.parts if part.stage == stage)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        head = {"lab": self.lab, "earned": self.earned, "points": POINTS, "laws_hold": self.all_laws_hold}
        rest = {"printed": list(self.printed), "parts": [asdict(part) for part in self.parts]}
        return head | {"seconds": self.seconds, **self.facts, **rest}


def grade(lab: Lab, outcome: Outcome, facts: dict[str, Any]) -> Grade:
    """Turn the records of a check into points."""
    parts = (*_laws(lab, outcome), *_races(lab, outcome), *_predictions(lab, outcome))
    printed = tuple(outcome.printed.splitlines()[-PRINTED_LINES:])
    return Grade(lab.name, lab.title, parts, round(outcome.seconds, 1), facts, printed)


def _fault_of(outcome: Outcome, lab: Lab, stage: str, number: int) -> dict[str, str]:
    """Return the fields of the part where the check ended early: what was seen, and the hint."""
    fault = outcome.fault
    if fault is None:
        return {}
    first = fault.get("stage") in (None, "load") and (stage, number) == ("laws", 0)
    if not first and (fault.get("stage"), fault.get("part")) != (stage, number):
        return {}
    key = str(fault["hint"])
    return {"seen": _case_words(fault) + str(fault["shown"]), "hint_key": key, "hint": lab.hint(key)}


def _case_words(fault: Record) -> str:
    """'3 ranks, n = 5: ', where a case is known that the message does not tell."""
    if "case" not in fault or "rank" in str(fault["shown"]).split(":")[0]:
        return ""
    ranks = fault["ranks"]
    words = [f"{ranks} rank{'' if ranks == 1 else 's'}"]
    words += [
        f"{key} = {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in fault["case"].items()
    ]
    return f"{', '.join(words)}: "


def _laws(lab: Lab, outcome: Outcome) -> Iterator[Part]:
    held = {record["part"] for record in outcome.of_rank_0("held")}
    for number, law in enumerate(lab.laws):
        found: dict[str, Any] = {"earned": law.points, "seen": "holds"} if number in held else {}
        found = found or _fault_of(outcome, lab, "laws", number)
        yield Part("laws", law.name, law.about, law.points, **found)


def _races(lab: Lab, outcome: Outcome) -> Iterator[Part]:
    for number, race in enumerate(lab.races):
        records = [record for record in outcome.of_rank_0("row") if record["part"] == number]
        rows = tuple(Row(**record["row"]) for record in records)
        found: dict[str, Any] = _fault_of(outcome, lab, "races", number)
        if rows and not found:
            found = _raced(lab, race, rows)
        yield Part("races", race.name, race.about, race.points, rows=rows, **found)


def _raced(lab: Lab, race: Race, rows: Sequence[Row]) -> dict[str, Any]:
    ratio = statistics.median(race.ratio(row) for row in rows)
    share = next((share for most, share in race.bands if ratio <= most), 0.0)
    words = f"times off what was {race.against}" if race.both_ways else f"of {race.against}"
    found: dict[str, Any] = {"earned": race.points * share, "seen": f"{ratio:.2f} {words}"}
    if share < 1:
        found |= {"hint_key": race.hint, "hint": lab.hint(race.hint)}
        found["seen"] += f"; full points up to {race.bands[0][0]:g}"
    return found


def _predictions(lab: Lab, outcome: Outcome) -> Iterator[Part]:
    records = {record["part"]: record for record in outcome.of_rank_0("measured")}
    for number, prediction in enumerate(lab.predictions):
        found: dict[str, Any] = _fault_of(outcome, lab, "predictions", number)
        if number in records:
            found = _predicted(prediction, records[number]["predicted"], records[number]["measured"])
            if records[number]["predicted"] is not None and "earned" not in found:
                key = f"predicts_{prediction.key}"
                found |= {"hint_key": key, "hint": lab.hint(key if key in lab.hints else "predicts")}
        yield Part("predictions", prediction.key, prediction.question, prediction.points, **found)


def _predicted(prediction: Prediction, predicted: float | None, measured: float) -> dict[str, Any]:
    """Judge a prediction; a wrong one is not told the number, but on which side of it it lies."""
    if predicted is None:
        return {"seen": "no number is given"}
    if not (0 < predicted < math.inf and 0 < measured < math.inf):
        return {"seen": f"{predicted:g} cannot be: a positive number is asked for"}
    if max(predicted / measured, measured / predicted) <= prediction.within + EXACT:
        return {"earned": prediction.points, "seen": f"{predicted:.4g}, measured {measured:.4g}"}
    side = "too high" if predicted > measured else "too low"
    allowed = "" if prediction.within == 1 else f", by more than {prediction.within:g} times"
    return {"seen": f"{predicted:g} is {side}{allowed}"}


def grade_lines(found: Grade) -> list[str]:
    """Lines of the page of one grade."""
    lines = [f"lab {found.lab}: {found.title}", ""]
    for stage in ("laws", "races", "predictions"):
        parts = [part for part in found.parts if part.stage == stage]
        rows = [[part.name, f"{part.earned:g} of {part.points}", part.about] for part in parts]
        words = [row.pop() for row in rows]
        numbers = table([stage, "points"], rows, indent="", gap="  ")
        lines += [f"{line}  {about}" for line, about in zip(numbers, ["", *words], strict=True)]
        lines += [f"  {part.name}: {part.seen}" for part in parts if _worth_saying(part)]
        lines.append("")
    if hinted := found.first_hint:
        if found.printed:
            lines += ["the ranks printed last:", *(f"  {line}" for line in found.printed), ""]
        lines += [f"hint: {hinted.hint}", ""]
    return [*lines, f"{found.earned:g} of {POINTS} points, {found.seconds:g} s"]


def _worth_saying(part: Part) -> bool:
    return part.seen not in ("holds", "not reached")
