"""Print the prediction of one layout: as text, as JSON, as a run file. Pure but for the file that `write` makes.

what      model, batch, machine, layout, whose trainer
step      compute + tp + pp + bubble + dp exposed + optimizer, each with its share
memory    a line a stage; stages that are alike in what is shown share one
verdict   fits, or by how much not, on which stage, and what would help

Run file: layout + model + batch --> run_config.config_of --> keys that differ from defaults --> RUN.toml. The token
store, the learning rate and where the run lives stay the user's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcllm.config import machines
from hpcllm.config import schema as run_file
from hpcllm.config.schema import Config, ModelConfig, RunConfig
from hpcllm.plan.cost import training_cost
from hpcllm.plan.interval import INSIDE, MANY
from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import Machine
from hpcllm.plan.memory.stage_memory import PARTS
from hpcllm.plan.models import Model, padded_vocabulary
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.run_config import config_of
from hpcllm.system.raw_files import writing
from hpcllm.system.text import table

TRAINERS = {
    "megatron": "that of Megatron-LM, DeepSpeed and kin, as in published tables; trainer=hpcllm in --layout: ours",
    "hpcllm": "hpcllm",
}
UNEVEN = 0.05  # share by which a stage works longer than the mean before it is named
ROW_BYTES = 16  # whole rows that matrix units need: time/roofline.py
MOST_STAGES = 12  # lines of a table
COLUMNS = 80  # width of a page
REMEDIES = {  # part of memory -> what lowers it, in the words of --layout
    "parameters": "more tp or pp; with pp=1 shard=all",
    "gradients": "shard=states+gradients, more tp or pp",
    "optimizer": "shard=states with dp above 1, more tp or pp",
    "activations": "recompute=selective or full, a smaller micro_batch, sequence_parallel=true with tp, more tp",
    "buffers": "more tp or pp",
    "reserved": "a smaller micro_batch",
}
# part of a step -> its name, what it is, what would make it less
STEP_PARTS: dict[str, tuple[str, str, str]] = {
    "compute_s": ("compute", "work of the devices", "less recomputation, larger microbatches, faster devices"),
    "tp_s": (
        "tensor parallel",
        "messages inside layers (tp)",
        "less tp, or tp within the fastest links, sequence_parallel",
    ),
    "pp_s": ("stage to stage", "waiting for messages between stages", "fewer stages, smaller microbatches, a codec"),
    "bubble_s": (
        "bubble",
        "waiting for other stages",
        "more samples a step, fewer stages, smaller microbatches, zb-v or chunks",
    ),
    "dp_exposed_s": (
        "data parallel",
        "sums of gradients and weights over replicas",
        "more samples a step, fewer replicas, a codec",
    ),
    "optimizer_s": ("optimizer", "the optimizer's update", "shard=states, more tp or pp"),
}
TIMES = (
    "iteration_time_s", "compute_s", "tp_s", "pp_s", "bubble_s", "dp_exposed_s", "dp_hidden_s", "optimizer_s",
)  # fmt: skip
RATES = ("tflops_per_device_model", "tflops_per_device_hardware", "mfu", "tokens_per_s")
STORE = 'store = ""'
ALWAYS = {  # keys written also where they have their defaults: they are the layout
    "data": ("sequence_length", "global_batch"),
    "mesh": ("dp", "pp", "tp"),
    "pipeline": ("schedule", "microbatches"),
}


def lines(found: Prediction, tokens: float | None) -> list[str]:
    """Write the whole report of one layout."""
    layout, model, machine, cost = found.layout, found.model, found.machine, training_cost(found, tokens)
    microbatches = layout.microbatches(found.global_batch)
    what = [
        f"{model.name}, {count_text(model.parameters)} parameters{padding(model)}; {found.global_batch} samples of "
        f"{model.sequence} tokens a step",
        f"{machine.name}: {layout.devices} x {machine.device.name} on {cost.nodes} node{'s' * (cost.nodes > 1)} of "
        f"{machine.device.per_node}",
        f"layout: {layout_text(layout)}; {microbatches} microbatch{'es' * (microbatches > 1)}",
        f"trainer: {TRAINERS[layout.trainer]}",
    ]
    what += too_many(machine, layout.devices)
    if machine.assumed:
        what.append(f"assumed, for the machine's file does not say: {', '.join(machine.assumed)}")
    judged = [
        verdict(found),
        f"a step takes {interval_text(found)}",
        f"{found.tflops_per_device_model:.3g} TFLOP/s a device of the model's work, "
        f"{found.tflops_per_device_hardware:.3g} with recomputation; MFU {found.mfu:.1%} of "
        f"{machine.device.peak_bf16_tflops:g}; {found.tokens_per_s:,.0f} tokens/s",
        f"{count_text(cost.tokens)} tokens: {cost.days:.3g} days, {cost.node_hours:,.0f} node-hours, "
        f"{cost.energy_kwh:,.0f} kWh (an estimate: {machine.power.node_w:,.0f} W a node)",
        f"bottleneck: {bottleneck(found)}",
    ]
    return [*wrapped(*what), "", *step_table(found), "", *memory_table(found), "", *wrapped(*judged)]


def padding(model: Model) -> str:
    """Say to what a preset's vocabulary was padded; nothing where it was not."""
    return f", vocabulary {model.unpadded} padded to {model.shape.vocabulary}" if model.unpadded else ""


def too_many(machine: Machine, devices: int) -> list[str]:
    """Say that a machine has fewer devices than are planned with; nothing if it has enough, or that is not known."""
    most = machine.nodes * machine.device.per_node
    if not most or devices <= most:
        return []
    return [f"MORE DEVICES THAN THERE ARE: {devices:,}, and {machine.name} has {most:,} on {machine.nodes:,} nodes"]


def interval_text(found: Prediction) -> str:
    """Write '1.7 to 2.4 s, ...'."""
    low_s, high_s = found.interval_s
    return (
        f"{low_s:.4g} to {high_s:.4g} s: so far off are {INSIDE:.0%} of published runs with "
        f"{'more than' if found.layout.dp > MANY else 'up to'} {MANY} replicas, none of them of our trainer"
    )


def wrapped(*texts: str) -> list[str]:
    """Break texts into lines of COLUMNS."""
    wrap = textwrap.TextWrapper(COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False).wrap
    return [line for text in texts for line in wrap(text)]


def layout_text(layout: Layout) -> str:
    """Write 'tp=8 pp=8 dp=2, micro-batch 1, interleaved with 2 chunks, recompute full, shard states, ...'."""
    words = [
        f"tp={layout.tp} pp={layout.pp} dp={layout.dp}",
        f"micro-batch {layout.micro_batch}",
        schedule_text(layout),
        f"recompute {layout.recompute}",
        f"shard {layout.shard}",
        *(["sequence parallel"] if layout.sequence_parallel else []),
        layout.precision,
        *([f"attention {layout.attention}"] if layout.trainer != "hpcllm" else []),
        *([f"codecs {layout.policy}"] if layout.policy != "none" else []),
        *([f"order {layout.order}"] if layout.order != Layout.order else []),
    ]
    return ", ".join(words)


def schedule_text(layout: Layout) -> str:
    """Write 'interleaved x2' for 2 chunks."""
    return layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else "")


def memory_table(found: Prediction) -> list[str]:
    """Write the GB of each stage's rank that holds most."""
    head = ["GB of a rank", *PARTS[:-1], "tensors", "reserved", "in all"]
    keys = (*PARTS[:-1], "peak_bytes", "reserved", "device_bytes")
    sizes = ([getattr(stage, key) / 1e9 for key in keys] for stage in found.memory)
    alike = merged([f"{gb:.2f}" if gb >= 1 else f"{gb:.3g}" for gb in each] for each in sizes)
    rows = [[f"stage{'s' * ('-' in numbers)} {numbers}", *cells] for numbers, *cells in alike]
    if len(rows) > MOST_STAGES:
        left = len(rows) - MOST_STAGES
        rows = [*rows[: MOST_STAGES - 2], [f"... {left} more lines; --json has all", ""], *rows[-2:]]
    return table(head, rows, "")


def merged(rows: Iterable[list[str]]) -> list[list[str]]:
    """Put neighbours with the same cells into one row, behind their numbers: '3' or '3-5'."""
    found = []
    for cells, alike in itertools.groupby(enumerate(rows), lambda pair: pair[1]):
        numbers = [str(number) for number, _ in alike]
        found.append(["-".join(dict.fromkeys((numbers[0], numbers[-1]))), *cells])
    return found


def verdict(found: Prediction) -> str:
    """Say whether the layout fits, and what would help if not."""
    worst, usable = found.largest, found.machine.device.usable_bytes
    need = f"stage {worst.stage} needs {worst.device_bytes / 1e9:.1f} GB of the {usable / 1e9:.1f} GB"
    need += f" that a process can use of {found.machine.device.name} ({found.machine.device.memory_gb:g} GB)"
    if found.fits:
        return f"fits: {need}"
    part = max(PARTS, key=lambda name: getattr(worst, name))
    over = (worst.device_bytes - usable) / 1e9
    most = f"most of it, {getattr(worst, part) / 1e9:.1f} GB, are {part}"
    return f"DOES NOT FIT, by {over:.1f} GB: {need}; {most}: {REMEDIES[part]}"


def step_table(found: Prediction) -> list[str]:
    """Write how the time of a step divides."""
    parts = {name: getattr(found, key) for key, (name, *_) in STEP_PARTS.items()}
    step_s = found.iteration_time_s
    rows = [[name, f"{part_s:.4g} s", f"{part_s / step_s:.1%}"] for name, part_s in parts.items()]
    split = table(["of the rank that ends last", "time", "share"], [*rows, ["step", f"{step_s:.4g} s", ""]], "")
    if found.dp_hidden_s:
        split.append(f"and {found.dp_hidden_s:.4g} s of data parallel traffic are hidden behind work")
    return split


def count_text(count: float) -> str:
    """Write '175 billion'."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def bottleneck(found: Prediction) -> str:
    """Name the largest part of a step besides work that has to be done, and what would make it less."""
    step_s = found.iteration_time_s
    waits_s, key = max((getattr(found, part), part) for part in STEP_PARTS if part != "compute_s")
    share = found.compute_s / step_s
    work = f"{share:.0%} of a step is work of the devices, at {found.tflops_per_device_hardware:.3g} TFLOP/s over all"
    if waits_s < 0.02 * step_s:
        return f"{work}; nothing else takes 2 %: only {STEP_PARTS['compute_s'][2]} would help"
    _, what, remedy = STEP_PARTS[key]
    text = f"{work}; most of the rest is {what}, {waits_s:.3g} s or {waits_s / step_s:.0%}; less with {remedy}"
    return text + (_busiest(found) if key == "bubble_s" and found.busier > UNEVEN else "")


def _busiest(found: Prediction) -> str:
    """Name the stage that the others wait for, and why it works longer."""
    vocabulary, tp = found.model.shape.vocabulary, found.layout.tp
    text = f"; stage {found.busiest} works {found.busier:.0%} longer than the mean of all, which wait for it"
    if vocabulary * found.layout.item_bytes % (ROW_BYTES * tp) == 0:
        return text
    return text + (
        f": vocabulary {vocabulary} over tp = {tp} are no whole rows of {ROW_BYTES} bytes, so the head leaves the "
        f"matrix units; vocab={padded_vocabulary(vocabulary)} does not"
    )


def as_dict(found: Prediction, tokens: float | None) -> dict[str, Any]:
    """Return the facts of --json: units in the keys, gb = 1e9 bytes. tokens: to train on; None: a usual number."""
    layout, cost = found.layout, training_cost(found, tokens)
    return {
        **{key: getattr(found, key) for key in (*TIMES, *RATES)},
        "interval_low_s": found.interval_s[0],
        "interval_high_s": found.interval_s[1],
        "interval_share": INSIDE,
        "busiest_stage": found.busiest,
        "busiest_works_longer": found.busier,
        "memory_gb_per_stage": [stage.as_gb() for stage in found.memory],
        "memory_gb_usable": found.machine.device.usable_bytes / 1e9,
        "fits": found.fits,
        "tokens": cost.tokens,
        "days": cost.days,
        "node_hours": cost.node_hours,
        "device_hours": cost.device_hours,
        "energy_kwh_estimate": cost.energy_kwh,
        "trainer": layout.trainer,
        "layout": dataclasses.asdict(layout),
        "layout_text": layout.text(),
        "devices": layout.devices,
        "nodes": cost.nodes,
        "microbatches": layout.microbatches(found.global_batch),
        "global_batch": found.global_batch,
        "sequence_length": found.model.sequence,
        "model": found.model.name,
        "parameters": found.model.parameters,
        "vocabulary": found.model.shape.vocabulary,
        "devices_of_machine": found.machine.nodes * found.machine.device.per_node,
        "machine": found.machine.name,
        "assumed_of_machine": list(found.machine.assumed),
    }


def write_run_file(path: Path, found: Prediction, machine: str, tokens: float | None) -> None:
    """Write a new run file. machine: as requested. tokens: to train on, in whole steps; None: a usual number.

    Raises ConfigError if the file exists, or cannot be written.
    """
    config, cost = config_of(found.model, found.layout, found.global_batch), training_cost(found, tokens)
    name = f"{found.model.name.replace(' ', '')}-{found.layout.devices}"
    steps = math.ceil(cost.tokens / (found.global_batch * found.model.sequence))
    known = machine if machine in machines.names() else str(Path(machine).resolve())
    tables = _different(dataclasses.replace(config, run=RunConfig(name=name, steps=steps, machine=known)))
    text = _run_file_text(found, cost.nodes, tables)
    with writing(f"--write {str(path)!r}"), path.open("x", encoding="utf-8") as file:
        file.write(text)


def _different(config: Config) -> dict[str, dict[str, Any]]:
    """Return table -> keys whose values differ from defaults and preset."""
    usual = run_file.to_tables(Config())
    usual["model"] = dataclasses.asdict(ModelConfig()) | run_file.preset(config.model.preset)
    tables = {
        title: {
            key: value for key, value in table.items() if value != usual[title][key] or key in ALWAYS.get(title, ())
        }
        for title, table in run_file.to_tables(config).items()
    }
    tables["model"] = {"preset": config.model.preset} | tables["model"]
    if config.pipeline.chunks == 1:
        del tables["pipeline"]["chunks"]
    return {title: table for title, table in tables.items() if table}


def _run_file_text(found: Prediction, nodes: int, tables: dict[str, dict[str, Any]]) -> str:
    import tomli_w

    worst, device, (low_s, high_s) = found.largest, found.machine.device, found.interval_s
    head = [
        f"# By `hpcllm plan` for {found.layout.devices} devices of {found.machine.name} ({nodes} node"
        f"{'s' * (nodes > 1)}). Predicted:",
        f"#   a step {found.iteration_time_s:.4g} s ({low_s:.3g} to {high_s:.3g}), {found.tokens_per_s:,.0f} tokens/s",
        f"#   MFU {found.mfu:.1%}",
        f"#   memory {worst.device_bytes / 1e9:.1f} of {device.usable_bytes / 1e9:.1f} GB on stage {worst.stage}",
        "# `python -m hpcllm train --dry-run` checks it; keys and what they mean: hpcllm/config/schema.py.",
    ]
    data = tables.pop("data")
    body = [tomli_w.dumps({title: table}) for title, table in tables.items()]
    store = f"{STORE} # to be filled in: what `python -m hpcllm prepare` wrote\n"
    body.insert(2, tomli_w.dumps({"data": data}).replace("[data]\n", "[data]\n" + store))
    return "\n".join([*head, "", *body])
