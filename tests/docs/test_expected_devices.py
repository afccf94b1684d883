"""What docs/how-to/gpus.md expects of a device is what `hpcllm plan` says: its table against the command beside it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hpcllm.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "gpus.md").read_text(encoding="utf-8")
TEXT = PAGE[PAGE.index("## What is expected of one") :]
MACHINES = {"H100 SXM": ("dgx-h100",), "MI250X, one GCD": ("frontier", "lumi-g")}
LINES = [line.strip("|") for line in TEXT.splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in line.split("|")] for line in LINES[1:]]


def command(machine: str) -> list[str]:
    """The page's command, for one of the machines that it names."""
    words = re.search(r"```bash\n(hpcllm plan .*?)```", TEXT, re.DOTALL)
    assert words
    said = shlex.split(words[1].replace("\\\n", " "))[1:]
    said[said.index("--machine") + 1] = machine
    return said


def numbers(cell: str) -> list[str]:
    return [number.replace(",", "") for number in re.findall(r"[\d,]*\d(?:\.\d+)?", cell)]


def rounded_as(value: float, told: str) -> bool:
    """True if the value, to as many digits as are told, is what is told."""
    digits = told.replace(".", "") if "." in told else told.rstrip("0")
    return float(f"{value:.{len(digits)}g}") == pytest.approx(float(told), rel=1e-12)


def test_the_page_has_a_row_for_each_device():
    assert {row[0] for row in ROWS} == MACHINES.keys()


@pytest.mark.parametrize(("row", "machine"), [(row, machine) for row in ROWS for machine in MACHINES[row[0]]])
def test_a_row_is_what_the_planner_says(capsys, row, machine):
    assert main([*command(machine), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    _, step_s, interval_s, mfu, tokens, memory = map(numbers, row)
    told = {
        "step": (facts["iteration_time_s"], *step_s),
        "at least": (facts["interval_low_s"], interval_s[0]),
        "at most": (facts["interval_high_s"], interval_s[1]),
        "MFU": (100 * facts["mfu"], *mfu),
        "tokens/s": (facts["tokens_per_s"], *tokens),
        "memory": (facts["memory_gb_per_stage"][0]["device"], *memory),
    }
    assert {name: pair for name, pair in told.items() if not rounded_as(*pair)} == {}
