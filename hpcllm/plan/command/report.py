"""One layout's prediction as text: step, memory of each stage, speed. Pure.

what      model, batch, machine, layout, whose trainer
step      compute + tp + pp + bubble + dp exposed + optimizer, each with its share
memory    a line a stage; stages that are alike in what is shown share one
verdict   fits, or by how much not, on which stage, and what would help
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from hpcllm.pipeline.table import table
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.stage_memory import PARTS, StageMemory
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.searching.reasons import bottleneck
from hpcllm.plan.training import training

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
COLUMNS = 120  # of a line
HELP = {  # what lowers a part, in the words of --layout
    "parameters": "more tp or pp; with pp=1 shard=all",
    "gradients": "shard=states+gradients, more tp or pp",
    "optimizer": "shard=states with dp above 1, more tp or pp",
    "activations": "recompute=selective or full, a smaller micro_batch, sequence_parallel=true with tp, more tp",
    "buffers": "more tp or pp",
    "reserved": "a smaller micro_batch",
}


def lines(found: Prediction, tokens: float | None) -> list[str]:
    """The whole report of one layout."""
    what = [line for text in _what(found) for line in wrapped(text)]
    judged = (verdict(found), *_speed(found), cost_text(found, tokens), f"bottleneck: {bottleneck(found)}")
    end = [line for text in judged for line in wrapped(text)]
    return [*what, "", *step_table(found), "", *memory_table(found), "", *end]


def wrapped(text: str) -> list[str]:
    """As wide as a page is."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def layout_text(layout: Layout) -> str:
    """'tp=8 pp=8 dp=2, micro-batch 1, interleaved with 2 chunks, recompute full, shard states, ...'."""
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
    return layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else "")


def memory_table(found: Prediction) -> list[str]:
    """GB of each stage's rank that holds most."""
    head = ["GB of a rank", *PARTS[:-1], "tensors", "reserved", "in all"]
    rows = [[name, *cells] for name, cells in _stages(found.memory)]
    if len(rows) > MOST_STAGES:
        left = len(rows) - MOST_STAGES
        rows = [*rows[: MOST_STAGES - 2], [f"... {left} more lines; --json has all", ""], *rows[-2:]]
    return table(head, rows, "")


def verdict(found: Prediction) -> str:
    """Whether it fits, and what would help if not."""
    worst, usable = found.largest, found.machine.device.usable_bytes
    need = f"stage {worst.stage} needs {worst.device_bytes / 1e9:.1f} GB of the {usable / 1e9:.1f} GB"
    need += f" that a process can use of {found.machine.device.name} ({found.machine.device.memory_gb:g} GB)"
    if found.fits:
        return f"fits: {need}"
    part = max(PARTS, key=lambda name: getattr(worst, name))
    over = (worst.device_bytes - usable) / 1e9
    most = f"most of it, {getattr(worst, part) / 1e9:.1f} GB, are {part}"
    return f"DOES NOT FIT, by {over:.1f} GB: {need}; {most}: {HELP[part]}"


def _what(found: Prediction) -> Iterator[str]:
    layout, model = found.layout, found.model
    count = training(found).nodes
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
    """Where the time of a step goes."""
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
        f"{found.tflops_per_device_hardware:.3g} with what is made again; MFU {found.mfu:.1%} of "
        f"{found.machine.device.peak_bf16_tflops:g}; {found.tokens_per_s:,.0f} tokens/s"
    )


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f}" if size_bytes >= 1e9 else f"{size_bytes / 1e9:.3g}"


def count_text(count: float) -> str:
    """'175 billion'."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def cost_text(found: Prediction, tokens: float | None) -> str:
    cost = training(found, tokens)
    return (
        f"{count_text(cost.tokens)} tokens: {cost.days:.3g} days, {cost.node_hours:,.0f} node-hours, "
        f"{cost.energy_kwh:,.0f} kWh (an estimate: {found.machine.power.node_w:,.0f} W a node)"
    )


def _stages(memory: Sequence[StageMemory]) -> Iterator[tuple[str, list[str]]]:
    """Neighbours with the same digits share a line."""
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
