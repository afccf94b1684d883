"""Run all variants of all labs through real checks: are the wrong ones rejected, by the right hint, and no right one?

    course/LAB/right/*.py      correct, of different style
    course/LAB/wrong.toml      wrong ones: the first of right/ with something replaced, and the hints that may come

    python course/campaign.py results.jsonl --repeat 3 [--only NAME] [--busy 2] [--report]

Goes on where it was ended: what is in the file is not run again. --busy: processes that compute beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcllm.course.catalogue import LABS, load_lab
from hpcllm.course.processes import leaving_at_signals
from hpcllm.course.runner import run_check
from hpcllm.course.score import grade
from hpcllm.system.text import percent, table

HERE = Path(__file__).parent
BASES = {  # of the wrong variants
    "latency": "plain",
    "allreduce": "ring",
    "codec": "plain",
    "pipeline": "loops",
    "tensor_parallel": "plain",
    "zero": "plain",
    "checkpoint": "plain",
    "planner": "plain",
}


@dataclass(frozen=True)
class Variant:
    """One file that might be handed in. hints: those of which one has to come; empty: it is right."""

    lab: str
    name: str
    text: str
    hints: tuple[str, ...] = ()


def variants() -> Iterator[Variant]:
    """Yield every variant of every lab."""
    for lab, base in BASES.items():
        for path in sorted((HERE / lab / "right").glob("*.py")):
            yield Variant(lab, path.stem, path.read_text(encoding="utf-8"))
        source = (HERE / lab / "right" / f"{base}.py").read_text(encoding="utf-8")
        for name, fault in tomllib.loads((HERE / lab / "wrong.toml").read_text(encoding="utf-8")).items():
            yield Variant(lab, name, replaced(source, name, fault["replace"]), tuple(fault["hints"]))


def replaced(text: str, name: str, pairs: Sequence[Sequence[str]]) -> str:
    """Replace the first of each; raises ValueError where there is nothing to replace."""
    for old, new in pairs:
        if old not in text:
            raise ValueError(f"{name}: not in the source: {old!r}")
        text = text.replace(old, new, 1)
    return text


def run(variant: Variant, number: int) -> dict[str, Any]:
    """Check one variant, and say what came."""
    with tempfile.TemporaryDirectory(prefix="hpcllm campaign ") as folder:
        file = Path(folder).resolve() / f"{variant.lab}.py"
        file.write_text(variant.text, encoding="utf-8")
        lab = load_lab(LABS[variant.lab])
        outcome = run_check(LABS[variant.lab], file, f"campaign {number}", lambda _: None)
        found = grade(lab, outcome, {})
    hinted = found.first_hint
    races = {part.name: [part.earned, part.seen] for part in found.parts if part.stage == "races"}
    return {
        "lab": variant.lab, "variant": variant.name, "number": number, "is_right": not variant.hints,
        "earned": found.earned, "laws_hold": found.all_laws_hold, "hint": hinted.hint_key if hinted else "",
        "expected": variant.hints, "seconds": found.seconds, "races": races, "seen": hinted.seen if hinted else "",
    }  # fmt: skip


def report(results: Sequence[dict[str, Any]]) -> list[str]:
    """Count what was rejected, by which hint, lab by lab."""
    rows = []
    for lab in dict.fromkeys(result["lab"] for result in results):
        mine = [result for result in results if result["lab"] == lab]
        wrong, right = ([r for r in mine if r["is_right"] == is_right] for is_right in (False, True))
        rejected = [r for r in wrong if r["hint"]]
        hinted = [r for r in wrong if r["hint"] in r["expected"]]
        accepted = [r for r in right if r["laws_hold"]]
        full = [r for r in right if r["earned"] == 100]
        shares = [share(rejected, wrong), share(hinted, wrong), share(accepted, right), share(full, right)]
        rows.append([lab, str(len(wrong)), *shares[:2], str(len(right)), *shares[2:]])
    head = ["lab", "wrong", "rejected", "right hint", "right", "accepted", "100 points"]
    lines = table(head, rows, indent="", gap="  ")
    missed = [r for r in results if not r["is_right"] and r["hint"] not in r["expected"]]
    missed += [r for r in results if r["is_right"] and r["earned"] < 100]
    return [*lines, "", *(f"{r['lab']} {r['variant']}: {r['earned']:g}, {r['hint']!r}: {r['seen']}" for r in missed)]


def share(part: Sequence[Any], whole: Sequence[Any]) -> str:
    return percent(len(part) / len(whole), 0) if whole else "-"


def compute() -> None:
    """Keep a core busy."""
    while True:
        sum(range(100_000))


def main() -> None:
    """Run what is not yet in the file, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--repeat", type=int, default=1, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="variants whose LAB/NAME has this in it")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute beside it")
    parser.add_argument("--report", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    results = [json.loads(line) for line in lines]
    done = {(r["lab"], r["variant"], r["number"]) for r in results}
    left = [(v, k) for k in range(arguments.repeat) for v in variants() if (v.lab, v.name, k) not in done]
    busy = [multiprocessing.Process(target=compute, daemon=True) for _ in range(arguments.busy)]
    for process in busy:
        process.start()
    for variant, number in left:
        if arguments.report or arguments.only not in f"{variant.lab}/{variant.name}":
            continue
        results.append(run(variant, number))
        with arguments.results.open("a") as file:
            file.write(json.dumps(results[-1]) + "\n")
        print(
            json.dumps({key: results[-1][key] for key in ("lab", "variant", "hint", "earned", "seconds")}), flush=True
        )
    print("\n".join(report(results)))


if __name__ == "__main__":
    with leaving_at_signals():
        main()
