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
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcllm.config import machines
from hpcllm.config import schema as run_file
from hpcllm.config.schema import Config, ModelConfig, RunConfig
from hpcllm.errors import ConfigError
from hpcllm.plan.cost import training_cost
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.stage_memory import PARTS, StageMemory
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.run_config import config_of
from hpcllm.system.text import table

SPLIT = {
    "compute": "compute_s",
    "tensor parallel": "tp_s",
    "stage to stage": "pp_s",
    "bubble": "bubble_s",
    "data parallel": "dp_exposed_s",
    "optimizer": "optimizer_s",
}
TRAINERS = {
    "megatron": "that of Megatron-LM, DeepSpeed and kin, as in published tables; trainer=hpcllm in --layout: ours",
    "hpcllm": "hpcllm",
}
MOST_STAGES = 12  # lines of a table
COLUMNS = 120  # width of a page
REMEDIES = {  # part of memory -> what lowers it, in the words of --layout
    "parameters": "more tp or pp; with pp=1 shard=all",
    "gradients": "shard=states+gradients, more tp or pp",
    "optimizer": "shard=states with dp above 1, more tp or pp",
    "activations": "recompute=selective or full, a smaller micro_batch, sequence_parallel=true with tp, more tp",
    "buffers": "more tp or pp",
    "reserved": "a smaller micro_batch",
}
# part of a step -> what it is, what would make it less
STEP_PARTS = {
    "compute_s": ("work of the devices", "less recomputation, larger microbatches, faster devices"),
    "tp_s": ("messages inside layers (tp)", "less tp, or tp within the fastest links, sequence_parallel"),
    "pp_s": ("waiting for messages between stages", "fewer stages, smaller microbatches, a codec"),
    "bubble_s": ("waiting for other stages", "more samples a step, fewer stages, smaller microbatches, zb-v or chunks"),
    "dp_exposed_s": ("sums of gradients and weights over replicas", "more samples a step, fewer replicas, a codec"),
    "optimizer_s": ("the optimizer's update", "shard=states, more tp or pp"),
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
    what = [line for text in _what(found) for line in wrapped(text)]
    judged = (verdict(found), *_speed(found), cost_text(found, tokens), f"bottleneck: {bottleneck(found)}")
    end = [line for text in judged for line in wrapped(text)]
    return [*what, "", *step_table(found), "", *memory_table(found), "", *end]


def wrapped(text: str) -> list[str]:
    """Break a text into lines of COLUMNS."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


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
    rows = [[name, *cells] for name, cells in _stages(found.memory)]
    if len(rows) > MOST_STAGES:
        left = len(rows) - MOST_STAGES
        rows = [*rows[: MOST_STAGES - 2], [f"... {left} more lines; --json has all", ""], *rows[-2:]]
    return table(head, rows, "")


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


def _what(found: Prediction) -> Iterator[str]:
    layout, model = found.layout, found.model
    count = training_cost(found).nodes
    yield (
        f"{model.name}, {count_text(model.parameters)} parameters; {found.global_batch} samples of "
        f"{model.sequence} tokens a step"
    )
    yield (
        f"{found.machine.name}: {layout.devices} x {found.machine.device.name} on {count} node{'s' * (count > 1)} of "
        f"{found.machine.device.per_node}"
    )
    microbatches = layout.microbatches(found.global_batch)
    yield f"layout: {layout_text(layout)}; {microbatches} microbatch{'es' * (microbatches > 1)}"
    yield f"trainer: {TRAINERS[layout.trainer]}"
    if found.machine.assumed:
        yield f"assumed, for the machine's file does not say: {', '.join(found.machine.assumed)}"


def step_table(found: Prediction) -> list[str]:
    """Write how the time of a step divides."""
    total_s = found.iteration_time_s
    rows = [
        [name, f"{_seconds(found, key):.4g} s", f"{_seconds(found, key) / total_s:.1%}"] for name, key in SPLIT.items()
    ]
    rows.append(["step", f"{total_s:.4g} s", ""])
    split = table(["of the rank that ends last", "time", "share"], rows, "")
    if found.dp_hidden_s:
        split.append(f"and {found.dp_hidden_s:.4g} s of data parallel traffic are hidden behind work")
    return split


def _seconds(found: Prediction, key: str) -> float:
    seconds: float = getattr(found, key)
    return seconds


def _speed(found: Prediction) -> Iterator[str]:
    yield (
        f"{found.tflops_per_device_model:.3g} TFLOP/s a device of the model's work, "
        f"{found.tflops_per_device_hardware:.3g} with recomputation; MFU {found.mfu:.1%} of "
        f"{found.machine.device.peak_bf16_tflops:g}; {found.tokens_per_s:,.0f} tokens/s"
    )


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f}" if size_bytes >= 1e9 else f"{size_bytes / 1e9:.3g}"


def count_text(count: float) -> str:
    """Write '175 billion'."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def cost_text(found: Prediction, tokens: float | None) -> str:
    """Write days, node-hours and energy of a training."""
    cost = training_cost(found, tokens)
    return (
        f"{count_text(cost.tokens)} tokens: {cost.days:.3g} days, {cost.node_hours:,.0f} node-hours, "
        f"{cost.energy_kwh:,.0f} kWh (an estimate: {found.machine.power.node_w:,.0f} W a node)"
    )


def _stages(memory: Sequence[StageMemory]) -> Iterator[tuple[str, list[str]]]:
    """Yield name and cells of each stage; neighbours with the same digits share a line."""
    alike: list[tuple[int, int, list[str]]] = []
    for stage in memory:
        sizes = [*(getattr(stage, part) for part in PARTS[:-1]), stage.peak_bytes, stage.reserved, stage.device_bytes]
        cells = [_gb(size) for size in sizes]
        if alike and alike[-1][2] == cells:
            alike[-1] = (alike[-1][0], stage.stage, cells)
        else:
            alike.append((stage.stage, stage.stage, cells))
    for first, last, cells in alike:
        yield (f"stage {first}" if first == last else f"stages {first}-{last}"), cells


def bottleneck(found: Prediction) -> str:
    """Name the largest part of a step besides work that has to be done, and what would make it less."""
    seconds = {part: getattr(found, part) for part in STEP_PARTS}
    waits = max((part for part in STEP_PARTS if part != "compute_s"), key=lambda part: seconds[part])
    share = found.compute_s / found.iteration_time_s
    work = f"{share:.0%} of a step is work of the devices, at {found.tflops_per_device_hardware:.3g} TFLOP/s over all"
    if seconds[waits] < 0.02 * found.iteration_time_s:
        return f"{work}; nothing else takes 2 %: only {STEP_PARTS['compute_s'][1]} would help"
    what, remedy = STEP_PARTS[waits]
    return (
        f"{work}; most of the rest is {what}, {seconds[waits]:.3g} s or {seconds[waits] / found.iteration_time_s:.0%}; "
        f"less with {remedy}"
    )


def as_dict(found: Prediction, tokens: float | None) -> dict[str, Any]:
    """Return the facts of --json: units in the keys, gb = 1e9 bytes. tokens: to train on; None: a usual number."""
    layout, cost = found.layout, training_cost(found, tokens)
    return {
        **{key: getattr(found, key) for key in (*TIMES, *RATES)},
        "memory_gb_per_stage": list(found.memory_gb_per_stage),
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
        "machine": found.machine.name,
        "assumed_of_machine": list(found.machine.assumed),
    }


def write_run_file(path: Path, found: Prediction, machine: str, tokens: float | None) -> None:
    """Write a new run file. machine: as requested. Raises ConfigError if the file exists, or cannot be written."""
    text = run_text(found, machine, tokens)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--write {str(path)!r} cannot be written: {error.strerror or error}") from error


def run_text(found: Prediction, machine: str, tokens: float | None) -> str:
    """Return the run file. tokens: to train on, in whole steps; None: a usual number."""
    import tomli_w

    tables = _different(_config(found, machine, tokens))
    data = tables.pop("data")
    body = [tomli_w.dumps({title: table}) for title, table in tables.items()]
    store = f"{STORE} # to be filled in: what `python -m hpcllm prepare` wrote\n"
    body.insert(2, tomli_w.dumps({"data": data}).replace("[data]\n", "[data]\n" + store))
    return "\n".join([*_run_file_head(found), "", *body])


def _config(found: Prediction, machine: str, tokens: float | None) -> Config:
    config = config_of(found.model, found.layout, found.global_batch)
    name = f"{found.model.name.replace(' ', '')}-{found.layout.devices}"
    steps = math.ceil(training_cost(found, tokens).tokens / (found.global_batch * found.model.sequence))
    known = machine if machine in machines.names() else str(Path(machine).resolve())
    run = RunConfig(name=name, steps=steps, machine=known)
    return dataclasses.replace(config, run=run)


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


def _run_file_head(found: Prediction) -> list[str]:
    worst, device, count = found.largest, found.machine.device, training_cost(found).nodes
    return [
        f"# By `hpcllm plan` for {found.layout.devices} devices of {found.machine.name} ({count} node"
        f"{'s' * (count > 1)}). Predicted:",
        f"#   a step {found.iteration_time_s:.4g} s, {found.tokens_per_s:,.0f} tokens/s, MFU {found.mfu:.1%}",
        f"#   memory {worst.device_bytes / 1e9:.1f} of {device.usable_bytes / 1e9:.1f} GB on stage {worst.stage}",
        "# `python -m hpcllm train --dry-run` checks it; keys and what they mean: hpcllm/config/schema.py.",
    ]
