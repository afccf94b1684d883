"""Section of a run that learns from rewards: do they rise, what do texts become, does the sampler agree."""

from __future__ import annotations

from typing import Any

from hpcllm.report.facts import Progress
from hpcllm.report.figures import Curve, Panel, curves
from hpcllm.report.page import Block, Table, Text
from hpcllm.report.run_folder import History, number
from hpcllm.system.text import printable

ROWS = (
    ("reward", "mean reward of the texts"),
    ("groups_without_signal", "share of texts whose group has one reward"),
    ("length", "tokens of a text"),
    ("cut_share", "share of texts without an end"),
    ("entropy", "entropy, nats a token"),
    ("kl", "KL to the reference, nats a token"),
    ("sampler_difference", "sampler and training, mean difference in nats"),
    ("sampler_difference_most", "largest difference since the line before"),
    ("generation_s", "seconds of generating since the line before"),
    ("rewards_s", "seconds of rewarding since the line before"),
)
TEXT_HEAD = ("prompt", "text", "reward")


def rewards(history: History, resumes: list[float], log_x: bool, along: Progress) -> list[Block]:
    """Draw and list the figures of GRPO, and the texts that were logged last; [] where the log has none."""
    last = history.last
    if "groups_without_signal" not in last:
        return []
    checked = [record for record in history.validations if "validation_reward" in record]
    steps, values = [r["step"] for r in checked], [number(r["validation_reward"]) for r in checked]
    held_out = [Curve(steps, values, 1, "held out, likeliest", dots=True)] if checked else []
    panels = [
        Panel("reward", [Curve(*history.column("reward"), 0, "training, drawn"), *held_out]),
        Panel("tokens of a text", [Curve(*history.column("length"), 0, "length")], from_zero=True),
        Panel("entropy, nats a token", [Curve(*history.column("entropy"), 0, "entropy")], from_zero=True),
    ]
    figures = Table(("", "last logged"), [[words, f"{number(last[key]):.3g}"] for key, words in ROWS if key in last])
    return [*curves("rewards over the steps", panels, resumes, log_x, progress=along), figures, *_texts(last)]


def _texts(record: dict[str, Any]) -> list[Block]:
    """List the texts of a record; a log may have come from anyone."""
    found = record.get("texts")
    texts = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    rows = [
        [
            printable(str(each.get("prompt", ""))),
            printable(str(each.get("text", ""))),
            f"{number(each.get('reward')):g}",
        ]
        for each in texts
    ]
    return [Text("Texts of the step that was logged last:"), Table(TEXT_HEAD, rows)] if rows else []
