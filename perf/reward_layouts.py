"""Do other layouts write the texts of one process while they learn from rewards? 20 updates, all texts compared.

    python perf/rewards.py FOLDER sort               makes the base that this begins with
    python perf/reward_layouts.py FOLDER sort        one process, then 2 ranks as dp, tp, pp; goes on where it ended

A run's texts follow from its weights and its seeds; another layout rounds elsewhere, and where a draw lies that near to
a border, a text becomes another one. With dp = 2 the texts of the first replica are compared: the first half.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from rewards import FAMILIES, GRPO, from_base

from hpcllm.system.output import say, write_whole
from hpcllm.system.text import table

STEPS = 20
LAYOUTS = ("one process", "dp", "tp", "pp")
ALL_TEXTS = (  # the log shows three of a step
    "import sys; from hpcllm.cli.main import main; from hpcllm.finetuning import grpo; grpo.SHOWN_TEXTS = 10**6; "
    "sys.exit(main())"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("family", choices=list(FAMILIES))
    arguments = parser.parse_args()
    logs = [learned(arguments.folder, arguments.family, layout) for layout in LAYOUTS]
    head = ["layout", "texts", "other texts", "first in step", "updates"]
    say(table(head, list(rows(logs))), wide=True)


def learned(folder: Path, name: str, layout: str) -> Path:
    """Make the run of a layout, unless it is there; return its log."""
    log = folder / "runs" / f"{name}-{layout.replace(' ', '-')}" / "log.jsonl"
    text = GRPO.format(steps=STEPS).replace("every_steps = 5\n", "every_steps = 1\n")
    write_whole(folder / "layouts.toml", text)
    more = [] if layout == LAYOUTS[0] else [f"mesh.{layout}=2"]
    more += ["pipeline.microbatches=2"] if layout == "pp" else []
    start = ["mpirun", "-n", "2"] if layout != LAYOUTS[0] else []
    words = [*start, sys.executable, "-c", ALL_TEXTS, "finetune", "layouts.toml"]
    words += from_base(name, log.parent.name, *more)
    subprocess.run(words, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return log


def texts_of(log: Path) -> list[list[str]]:
    """Return the texts of each step, each with its prompt."""
    records = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [[each["prompt"] + each["text"] for each in record["texts"]] for record in records if "texts" in record]


def rows(logs: list[Path]) -> Iterator[list[str]]:
    alone, *others = map(texts_of, logs)
    for layout, steps in zip(LAYOUTS[1:], others, strict=True):
        pairs = [list(zip(steps[k], alone[k], strict=False)) for k in range(STEPS)]
        wrong = [sum(a != b for a, b in step) for step in pairs]
        first = next((str(k + 1) for k, number in enumerate(wrong) if number), "-")
        yield [f"{layout} = 2", str(len(list(chain(*pairs)))), str(sum(wrong)), first, str(len(steps))]


if __name__ == "__main__":
    main()
