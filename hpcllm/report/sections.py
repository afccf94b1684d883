"""One run, section by section. A section whose numbers the log lacks says so, or is left out where that is usual."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpcllm.errors import HpcllmError
from hpcllm.mpi.mesh_axes import coordinates
from hpcllm.mpi.rank_names import name_ranks
from hpcllm.pipeline.explain import explain, explanation_lines, explanation_panels
from hpcllm.pipeline.measured import read_trace
from hpcllm.pipeline.picture import draw
from hpcllm.plotting import can_draw, data_uris
from hpcllm.report import figures
from hpcllm.report.facts import (
    Progress,
    large,
    mesh_text,
    progress,
    short,
    summary_rows,
    time_split,
    time_text,
    tokens_of,
    traffic,
)
from hpcllm.report.figures import Curve, Panel, curves, raw_and_smoothed
from hpcllm.report.page import Block, Figure, Pairs, Section, Table, Text, Verbatim
from hpcllm.report.preferences import preferences
from hpcllm.report.rewards import rewards
from hpcllm.report.run_folder import History, Record, Run, number, unit_of
from hpcllm.report.tasks import tasks
from hpcllm.system.energy.account import WORDS
from hpcllm.system.text import counted, percent, size_text

NO_STEPS = "No step has been logged yet."
MOST_STAGES_DRAWN = 12  # the table has all
MOST_ROWS = 12  # of checkpoints and starts, the newest
MOST_SAMPLES = 4
LOSS_HEAD = ("step", "tokens", "time", "training loss", "held-out loss", "tokens/s")
MOST_TRACES, MOST_TRACE_BYTES, MOST_TRACE_RANKS, TRACE_COLUMNS = 3, 16 << 20, 64, 100
TRAFFIC_HEAD = ("bytes a step, all ranks", "as sent", "ratio")
CHECKPOINT_COLUMNS = {
    "checkpoint_bytes": size_text,
    "checkpoint_s": short,
    "checkpoint_wait_s": short,
    "checkpoint_gb_s": short,
}


def sections(run: Run, facts: Mapping[str, Any], log_x: bool) -> list[Section]:
    """All sections of a run."""
    history = run.history
    resumes, along = [float(start["step"]) for start in history.starts[1:]], progress(history, tokens_of(run))
    run_file = Verbatim(run.run_file) if run.run_file else Text("There is no run.toml.")
    return [
        Section("Loss", _loss(history, resumes, log_x, along)),
        Section("Preferences", preferences(history, resumes, log_x, along)),
        Section("Rewards", rewards(history, resumes, log_x, along)),
        Section("Tasks", tasks(history, resumes, log_x, along)),
        Section("Generated text", _samples(run)),
        Section("Where the time goes", time_blocks({"": history}, along)),
        Section("Throughput", _throughput(history, resumes, log_x, along)),
        Section("Learning rate and gradient norm", _optimizer(history, resumes, log_x, along)),
        Section("Communication", _traffic(history, resumes)),
        Section("Memory", _memory(run)),
        Section("Energy and cost", _energy(history, facts, resumes)),
        Section("Pipeline", [block for path in run.traces[-MOST_TRACES:] for block in _trace(path)]),
        Section("Checkpoints and starts", _checkpoints(history)),
        Section("All numbers", [Pairs(summary_rows(facts)), Text(_log_note(history), faint=True)]),
        Section("Machine", _machine(history)),
        Section("Run file", [run_file]),
    ]


def _log_note(history: History) -> str:
    found = [f"{history.logged:,} logged step{'s' if history.logged != 1 else ''}"]
    if history.every > 1:
        found.append(f"one in {history.every:,} of them read in full; the loss of all")
    if history.broken:
        found.append(f"{history.broken} line(s) passed over that are no records, as a job leaves that was cut off")
    return "; ".join(found) + "."


def _loss(history: History, resumes: list[float], log_x: bool, along: Progress) -> list[Block]:
    checks = [record for record in history.validations if math.isfinite(number(record["validation_loss"]))]
    lines = raw_and_smoothed(*history.loss, 0, "training")
    note = "Faint: as logged; the line is a mean of neighbours." if len(lines) > 1 else ""
    if checks:
        steps, losses = [r["step"] for r in checks], [r["validation_loss"] for r in checks]
        lines.append(Curve(steps, losses, 1, "validation", dots=True))
    panels = [Panel(f"loss, {unit_of(history)}", lines)]
    found: list[Block] = [*curves("loss over the steps", panels, resumes, log_x, note, along)]
    bad = sum(not math.isfinite(loss) for loss in history.loss[1])
    told = [Text(f"{bad} logged step(s) had a loss that is no number.")] if bad else []
    table = [_loss_table(history, checks, along, bool(found))] if history.steps else []
    return [*(found if history.loss[0] else [Text(NO_STEPS)]), *told, *table]


def _loss_table(history: History, checks: list[Record], along: Progress, is_drawn: bool) -> Table:
    """Loss and speed at steps spread over the run, the last among them; folded away below a picture."""
    last, shown = len(history.steps) - 1, min(MOST_ROWS, len(history.steps))
    records = [history.steps[k * last // max(1, shown - 1)] for k in range(shown)]
    rows = []
    for record in records:
        step = record["step"]
        held_out = [check["validation_loss"] for check in checks if check["step"] <= step][-1:]
        hours = [hours for at, hours in zip(along.steps, along.hours, strict=True) if at <= step][-1:]
        rows.append(
            [
                f"{step:,}",
                large(step * along.tokens_per_step) if along.tokens_per_step else "",
                *(time_text(value) for value in hours),
                f"{number(record['loss']):.4f}",
                f"{held_out[0]:.4f}" if held_out else "",
                short(number(record.get("tokens_per_s"))),
            ]
        )
    return Table(LOSS_HEAD, rows, summary="as a table" if is_drawn else "")


def _samples(run: Run) -> list[Block]:
    """Text that `generate` made of the run's checkpoints, the newest few."""
    return [
        Verbatim(f"{sample['prompt']}{sample['text']}", f"{path.stem}: {counted(sample['tokens'], 'token')}", open=True)
        for path, sample in run.samples[-MOST_SAMPLES:]
    ]


def _optimizer(history: History, resumes: list[float], log_x: bool, along: Progress) -> list[Block]:
    panels = [
        Panel("learning rate", [Curve(*history.column("learning_rate"))], from_zero=True),
        Panel("gradient norm", [Curve(*history.column("grad_norm"))], from_zero=True),
    ]
    if "loss_scale" in history.last:
        panels.append(Panel("loss scale", [Curve(*history.column("loss_scale"))], log=True))
    note = f"{history.overflows} logged step(s) had gradients that overflowed; they are gaps in the curve."
    shown = curves("learning rate and gradient norm over the steps", panels, resumes, log_x, progress=along)
    return [*shown, *([Text(note)] if history.overflows else [])]


def _throughput(history: History, resumes: list[float], log_x: bool, along: Progress) -> list[Block]:
    panels = [
        Panel("tokens/s, all ranks", [Curve(*history.column("tokens_per_s"))], from_zero=True),
        Panel("TFLOP/s a rank", [Curve(*history.column("tflops_per_device"))], from_zero=True),
    ]
    steps, mfu = history.column("mfu")
    if mfu:
        panels.append(Panel("MFU, %", [Curve(steps, [100 * value for value in mfu])], from_zero=True))
    note = "MFU is not known: run.machine names no machine whose peak could be divided by."
    shown = curves("tokens and operations a second over the steps", panels, resumes, log_x, progress=along)
    return [*shown, *([] if mfu or not history.steps else [Text(note, faint=True)])]


def _traffic(history: History, resumes: list[float]) -> list[Block]:
    if not traffic(history):
        why = "one rank has nobody to send to, and ranks of one node sum in memory that they share"
        return [Text(f"No bytes went by message: {why}.")] if history.steps else []
    kinds = list(traffic(history))
    sent = {kind: history.column(f"{kind}_bytes") for kind in kinds}
    megabytes = [Curve(x, [value / 1e6 for value in y], k, kind) for k, (kind, (x, y)) in enumerate(sent.items())]
    ratios = [Curve(*history.column(f"{kind}_ratio"), k, kind) for k, kind in enumerate(kinds)]
    return [
        Table(["kind of traffic", *TRAFFIC_HEAD], traffic_rows(history)),
        Text("In the mean over the second half of what was logged.", faint=True),
        *curves(
            "bytes by kind of traffic",
            [Panel("MB a step, as sent", megabytes, from_zero=True), Panel("ratio", ratios)],
            resumes,
        ),
    ]


def traffic_rows(history: History, name: str = "") -> list[list[str]]:
    """A row a kind of traffic, under TRAFFIC_HEAD; name: of the run, before the kind."""
    return [
        [name + kind, size_text(found["plain_bytes"]), size_text(found["bytes"]), f"{found['ratio']:.2f}"]
        for kind, found in traffic(history).items()
    ]


def time_blocks(histories: Mapping[str, History], along: Progress | None = None) -> list[Block]:
    """Seconds of a step by part, a bar a run; of one run, whose name is not shown, also over its steps.

    along: of one run.
    """
    splits = {name: split for name, history in histories.items() if (split := time_split(history))}
    if not splits:
        return [Text("The log does not say where the time of its steps went; it was written by an older version.")]
    is_one = len(histories) == 1
    over_steps = figures.time_over_steps(next(iter(histories.values())), along) if along else []
    bars = figures.time_bars({name or "mean": split for name, split in splits.items()}, legend=not over_steps)
    rows = []
    for part, (label, _) in figures.TIMES.items():
        if any(split.get(part) for split in splits.values()):
            shares = [percent(split.get(part, 0) / sum(split.values())) for split in splits.values()]
            seconds = [f"{split.get(part, 0):.3g}" for split in splits.values()]
            rows.append([label, *seconds, *(shares if is_one else [])])
    note = (
        "Means over the ranks, without the first logged step of each start. The bubble is what the schedule idles by "
        "itself, at most what was waited; reading, computing and waiting make a step, and logs, checkpoints and "
        "validation lie between steps."
    )
    head = ["", "seconds a step", "share"] if is_one else ["seconds a step", *splits]
    return [*over_steps, *bars, Table(head, rows), Text(note, faint=True)]


def _memory(run: Run) -> list[Block]:
    """Memory of tensors as it was measured, beside what was predicted: for each stage and its ranks."""
    if not run.history.memory:
        return [Text("The log does not say how much memory the ranks take.")] if run.history.steps else []
    record = run.history.memory[-1]
    kinds = [kind for kind in figures.MEMORY if f"{kind}_memory_bytes" in record]
    rows, bars = [], dict[str, dict[str, float]]()
    for name, ranks, sizes in _stages(run, record):
        measured = {kind: number(sizes[f"{kind}_memory_bytes"]) for kind in kinds}
        predicted = {kind: number(sizes.get(f"{kind}_memory_predicted_bytes")) for kind in kinds}
        rows.append([ranks, *(f"{size_text(measured[kind])} ({size_text(predicted[kind])})" for kind in kinds)])
        bars |= {f"{name}measured": measured, f"{name}predicted": predicted}
    note = "Tensors, the most of any rank, in the first step of the last start: measured (predicted)."
    head = ["", *(figures.MEMORY[kind][0] for kind in kinds)]
    drawn = figures.memory_bars(bars if len(rows) <= MOST_STAGES_DRAWN else {})
    return [Table(head, rows), Text(note, faint=True), *drawn]


def _stages(run: Run, record: Record) -> list[tuple[str, str, Record]]:
    """(short name, name with ranks, sizes) of each pipeline stage, or of all ranks where the log knows no stages."""
    stages = record.get("memory_stages")
    if not isinstance(stages, list) or len(stages) < 2:
        return [("", "all ranks", record)]
    return [(f"stage {k} ", f"stage {k} ({_ranks_of(run, k)})", sizes) for k, sizes in enumerate(stages)]


def _ranks_of(run: Run, stage: int) -> str:
    sizes = run.history.starts[-1]["start"].get("mesh", {}) if run.history.starts else {}
    order = run.key("mesh", "order")
    if not (sizes and isinstance(order, str)):
        return "its ranks"
    ranks = range(math.prod(sizes.values()))
    return name_ranks((rank for rank in ranks if coordinates(rank, sizes, order)["pp"] == stage), 3)


def _energy(history: History, facts: Mapping[str, Any], resumes: list[float]) -> list[Block]:
    if "node_hours" not in history.last and "node_hours" not in facts:
        return []
    rows = [(word, short(facts[key])) for key, word in WORDS.items() if key in facts]
    cost = [("cost, by the prices of [energy]", f"{facts['cost']:,.2f}")] if "cost" in facts else []
    if "energy_kwh" not in facts:
        note = "Energy was not measured: the nodes told none that the run could read, or energy.source = 'none'."
        return [Pairs([*rows, *cost]), Text(note, faint=True)]
    scope = facts.get("energy_scope", "what the nodes told")
    rows.append((f"energy of {scope}", f"{short(facts['energy_kwh'])} kWh"))
    rows += [("tokens a kWh", short(facts["tokens_per_kwh"]))] if "tokens_per_kwh" in facts else []
    panels = [
        Panel("kWh, so far", [Curve(*history.column("energy_kwh"))], from_zero=True),
        Panel("kW a node", [Curve(*_node_kilowatts(history))], from_zero=True),
    ]
    return [Pairs([*rows, *cost]), *curves("energy and power over the steps", panels, resumes)]


def _node_kilowatts(history: History) -> tuple[list[float], list[float]]:
    """Steps, and the mean power of a node since the record before, kW."""
    steps, kilowatts = list[float](), list[float]()
    records = [record for record in history.steps if "energy_kwh" in record and "node_hours" in record]
    for before, now in pairwise(records):
        hours = number(now["node_hours"]) - number(before["node_hours"])
        if hours > 0:
            steps.append(float(now["step"]))
            kilowatts.append((number(now["energy_kwh"]) - number(before["energy_kwh"])) / hours)
    return steps, kilowatts


def _trace(path: Path) -> list[Block]:
    """The pipeline as it ran, drawn above its ideal and explained."""
    try:
        if path.stat().st_size > MOST_TRACE_BYTES:
            return [Text(f"{path.name} is too large to be drawn here; `schedule --measured` draws it.")]
        explanations = [explain(measured) for measured in read_trace(path)]
    except (HpcllmError, OSError) as error:
        return [Text(f"{path.name}: {error}")]
    told = Verbatim("\n".join(explanation_lines(explanations, TRACE_COLUMNS)), f"{path.name} explained")
    panels = explanation_panels(explanations)
    if len(panels[0].rows) > MOST_TRACE_RANKS or not can_draw():
        return [told]
    with draw(panels, "ms").figure() as made:
        return [Figure(data_uris(made, themes=False), f"pipeline, {path.name}", wide=True), told]


def _checkpoints(history: History) -> list[Block]:
    """Checkpoints written, how often the run was started, where and with what, and how it ended."""
    rows = []
    for record in history.checkpoints[-MOST_ROWS:]:
        values = {key: number(record.get(key)) for key in CHECKPOINT_COLUMNS}  # older versions did not log all
        cells = [show(values[key]) if math.isfinite(values[key]) else "" for key, show in CHECKPOINT_COLUMNS.items()]
        rows.append([f"step {record['step']:,}", *cells])
    more = len(history.checkpoints) - len(rows)
    note = [Text(f"and {more} before them", faint=True)] if more else []
    head = ["checkpoint", "size", "seconds", "of which steps waited", "GB/s"]
    found: list[Block] = [Table(head, rows), *note, Pairs(_starts(history))]
    return found if history.checkpoints or history.starts or history.ends else []


def _starts(history: History) -> list[tuple[str, str]]:
    """Each start, and how the last one ended as far as it said."""
    found = []
    for k, record in list(enumerate(history.starts))[-MOST_ROWS:]:
        start = record["start"]
        slurm = start.get("slurm") or {}
        job = f", Slurm job {slurm['job_id']}" if slurm.get("job_id") else ""
        job = f", Flux job {start['flux_job']}" if start.get("flux_job") else job
        where = f"{start.get('ranks', '?')} ranks on {start.get('hosts', '?')}{job}"
        found.append((f"start {k + 1}", f"from step {record['step']:,}, {start.get('time', '')}, {where}"))
    for record in history.ends[-1:]:
        end = record["end"]
        why = f", stopped by {end['stopped_by']}" if end.get("stopped_by") else ""
        found.append(("last end", f"after step {record['step']:,}, {end.get('time', '')}{why}"))
    return found


def _machine(history: History) -> list[Block]:
    if not history.starts:
        why = "The log does not say where the run was: an older version wrote it."
        return [Text(why)] if history.steps else []
    start = history.starts[-1]["start"]
    rows = [(key.replace("_", " "), mesh_text(value)) for key, value in start.items() if value not in ("", {}, None)]
    return [Text("Of the last start.", faint=True), Pairs(rows)]
