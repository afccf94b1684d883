"""One run, section by section. A section whose numbers the log lacks says so, or is left out where that is usual."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from itertools import pairwise
from typing import Any

from hpcllm.energy.account import WORDS
from hpcllm.printable import size_text
from hpcllm.report import words
from hpcllm.report.curves import Curve, Panel, draw
from hpcllm.report.drawing import swatch
from hpcllm.report.facts import traffic
from hpcllm.report.log import History, number
from hpcllm.report.memory import memory_section
from hpcllm.report.page import Section, pairs, paragraph, picture, table
from hpcllm.report.runs import Run
from hpcllm.report.starts import checkpoint_section, machine_section
from hpcllm.report.times import time_section
from hpcllm.report.traces import trace_section

NO_STEPS = "No step has been logged yet."


def sections(run: Run, facts: Mapping[str, Any], log_x: bool) -> list[Section]:
    """All of a run."""
    history = run.history
    resumes = [float(start["step"]) for start in history.starts[1:]]
    return [
        Section("Summary", pairs(words.rows(facts)) + paragraph(_log_note(history), faint=True)),
        Section("Loss", _loss(history, resumes, log_x)),
        Section("Learning rate and gradient norm", _optimizer(history, resumes, log_x)),
        Section("Throughput", _throughput(history, resumes, log_x)),
        Section("Communication", _traffic(history, resumes)),
        Section("Where the time goes", time_section({run.name: history})),
        Section("Memory", memory_section(run)),
        Section("Energy and cost", _energy(history, facts, resumes)),
        Section("Pipeline", trace_section(run)),
        Section("Checkpoints and starts", checkpoint_section(history)),
        Section("Machine", machine_section(history)),
        Section(
            "Run file", f"<pre>{escape(run.run_file)}</pre>" if run.run_file else paragraph("There is no run.toml.")
        ),
    ]


def _log_note(history: History) -> str:
    found = [f"{history.logged:,} logged step{'s' if history.logged != 1 else ''}"]
    if history.every > 1:
        found.append(f"one in {history.every:,} of them read in full; the loss of all")
    if history.broken:
        found.append(f"{history.broken} line(s) passed over that are no records, as a job leaves that was cut off")
    return "; ".join(found) + "."


def _loss(history: History, resumes: list[float], log_x: bool) -> str:
    checks = [record for record in history.validations if math.isfinite(number(record["validation_loss"]))]
    curves = [Curve(*history.loss, 0)]
    curves += [Curve([r["step"] for r in checks], [r["validation_loss"] for r in checks], 1, dots=True)]
    legend = [(swatch(0), "training")] + [(swatch(1), "validation")] * bool(checks)
    panel = Panel("loss, nats a token", curves)
    bad = sum(not math.isfinite(loss) for loss in history.loss[1])
    note = paragraph(f"{bad} logged step(s) had a loss that is no number.") if bad else ""
    found = picture(draw("loss", "loss over the steps", [panel], resumes, log_x), legend + _resume_legend(resumes))
    return (found or paragraph(NO_STEPS)) + note


def _optimizer(history: History, resumes: list[float], log_x: bool) -> str:
    panels = [
        Panel("learning rate", [Curve(*history.column("learning_rate"))], from_zero=True),
        Panel("gradient norm", [Curve(*history.column("grad_norm"))], from_zero=True),
    ]
    if "loss_scale" in history.last:
        panels.append(Panel("loss scale", [Curve(*history.column("loss_scale"))], log=True))
    note = f"{history.overflows} logged step(s) had gradients that overflowed; they are gaps in the curve."
    shown = picture(draw("optimizer", "learning rate and gradient norm over the steps", panels, resumes, log_x))
    return shown + (paragraph(note) if history.overflows else "")


def _throughput(history: History, resumes: list[float], log_x: bool) -> str:
    panels = [
        Panel("tokens/s, all ranks", [Curve(*history.column("tokens_per_s"))], from_zero=True),
        Panel("TFLOP/s a rank", [Curve(*history.column("tflops_per_device"))], from_zero=True),
    ]
    steps, mfu = history.column("mfu")
    if mfu:
        panels.append(Panel("MFU, %", [Curve(steps, [100 * value for value in mfu])], from_zero=True))
    note = "" if mfu or not history.steps else "MFU is not known: run.machine names no machine, whose peak it is of."
    shown = picture(draw("throughput", "tokens and operations a second over the steps", panels, resumes, log_x))
    return shown + (paragraph(note, faint=True) if note else "")


def _traffic(history: History, resumes: list[float]) -> str:
    kinds = traffic(history)
    if not kinds:
        why = "one rank has nobody to send to, and ranks of one node sum in memory that they share"
        return paragraph(f"No bytes went by message: {why}.") if history.steps else ""
    rows = [
        (kind, size_text(found["plain_bytes"]), size_text(found["bytes"]), f"{found['ratio']:.2f}")
        for kind, found in kinds.items()
    ]
    sent = {kind: history.column(f"{kind}_bytes") for kind in kinds}
    panels = [
        Panel(
            "MB a step, as sent",
            [Curve(x, [value / 1e6 for value in y], k) for k, (x, y) in enumerate(sent.values())],
            from_zero=True,
        ),
        Panel("ratio", [Curve(*history.column(f"{kind}_ratio"), k) for k, kind in enumerate(kinds)]),
    ]
    legend = [(swatch(k), kind) for k, kind in enumerate(kinds)]
    head = ["kind of traffic", "bytes a step, all ranks", "as sent", "ratio"]
    note = paragraph("In the mean over the second half of what was logged.", faint=True)
    return table(head, rows) + note + picture(draw("traffic", "bytes by kind of traffic", panels, resumes), legend)


def _energy(history: History, facts: Mapping[str, Any], resumes: list[float]) -> str:
    if "node_hours" not in history.last and "node_hours" not in facts:
        return ""
    rows = [(word, words.short(facts[key])) for key, word in WORDS.items() if key in facts]
    if "energy_kwh" not in facts:
        note = "Energy was not measured: the nodes told none that the run could read, or energy.source = 'none'."
        return pairs([*rows, *_cost(facts)]) + paragraph(note, faint=True)
    scope = facts.get("energy_scope", "what the nodes told")
    rows.append((f"energy of {scope}", f"{words.short(facts['energy_kwh'])} kWh"))
    rows += [("tokens a kWh", words.short(facts["tokens_per_kwh"]))] if "tokens_per_kwh" in facts else []
    steps, kwh = history.column("energy_kwh")
    panels = [
        Panel("kWh, so far", [Curve(steps, kwh)], from_zero=True),
        Panel("kW a node", [Curve(*_power(history))], from_zero=True),
    ]
    return pairs([*rows, *_cost(facts)]) + picture(draw("energy", "energy and power over the steps", panels, resumes))


def _cost(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("cost, by the prices of [energy]", f"{facts['cost']:,.2f}")] if "cost" in facts else []


def _power(history: History) -> tuple[list[float], list[float]]:
    """Steps, and the mean power of a node since the record before, kW."""
    steps, kilowatts = list[float](), list[float]()
    records = [record for record in history.steps if "energy_kwh" in record and "node_hours" in record]
    for before, now in pairwise(records):
        hours = number(now["node_hours"]) - number(before["node_hours"])
        if hours > 0:
            steps.append(float(now["step"]))
            kilowatts.append((number(now["energy_kwh"]) - number(before["energy_kwh"])) / hours)
    return steps, kilowatts


def _resume_legend(resumes: list[float]) -> list[tuple[str, str]]:
    return [("", "dotted: a later start goes on from there")] if resumes else []
