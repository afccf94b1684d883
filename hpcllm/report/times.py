"""Where the seconds of a step went: over the steps of one run, and as a bar of each of several."""

from __future__ import annotations

from collections.abc import Mapping

from hpcllm.report import bars
from hpcllm.report.drawing import patch
from hpcllm.report.facts import time_split
from hpcllm.report.log import History
from hpcllm.report.page import paragraph, picture, table


def time_section(histories: Mapping[str, History]) -> str:
    """Of one run over its steps, and of each as a bar."""
    splits = {name: split for name, history in histories.items() if (split := time_split(history))}
    if not splits:
        return paragraph("The log does not say where the time of its steps went; it was written by an older version.")
    parts = [part for part in bars.TIME_COLOURS if any(split.get(part) for split in splits.values())]
    legend = [(patch(bars.TIME_COLOURS[part]), bars.TIME_WORDS[part]) for part in parts]
    is_one = len(histories) == 1
    over_steps = bars.time_over_steps("time", next(iter(histories.values()))) if is_one else ""
    letters = {name: "mean" if is_one else letter(k) for k, name in enumerate(histories)}
    bar = bars.time_bars("timebars", {letters[name]: split for name, split in splits.items()})
    note = (
        "Means over the ranks. The bubble is what the schedule idles by itself, at most what was waited; reading, "
        "computing and waiting make a step, and logs, checkpoints and validation lie between steps."
    )
    shown = picture(over_steps, legend) + picture(bar, () if over_steps else legend)
    head = ["seconds a step", *("" if is_one else letters[name] for name in splits), *["share"] * is_one]
    rows = [[bars.TIME_WORDS[part], *(f"{split.get(part, 0):.3g}" for split in splits.values())] for part in parts]
    if is_one:
        (split,) = splits.values()
        rows = [
            [*row, f"{100 * split[part] / sum(split.values()):.1f} %"] for row, part in zip(rows, parts, strict=True)
        ]
    return shown + table(head, rows) + paragraph(note, faint=True)


def letter(number: int) -> str:
    """A, B, .., Z, A2, ..: what a run is called in a picture."""
    return chr(ord("A") + number % 26) + (str(number // 26 + 1) if number >= 26 else "")
