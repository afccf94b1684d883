"""The whole arithmetic of one layout's prediction, to be followed with a pocket calculator. Pure.

kernels     FLOPs, bytes, seconds of each, times how often     their sum is `compute`
tp, pp      each collective and message: bytes, ranks, GB/s    what of them is not hidden
schedule    microbatches and passes: how long the rank waits
dp          gradients and weights of a step, hidden and not
optimizer, memory
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcllm.pipeline.table import table
from hpcllm.plan.command.arithmetic import PASSES, Arithmetic, Exchanged, KernelRow, arithmetic
from hpcllm.plan.command.facts import as_dict
from hpcllm.plan.command.report import layout_text, memory_table, step_table, verdict, wrapped
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.training import training

KERNELS = ("kernel", "m x n x k, or values", "GFLOP", "MB", "ms", "at", "times", "s a step")


def lines(found: Prediction, tokens: float | None) -> list[str]:
    """For people."""
    worked = arithmetic(found)
    return [
        *wrapped(f"{found.model.name} on {found.machine.name}: {layout_text(found.layout)}"),
        *_rank(worked),
        "",
        *_kernels(worked),
        "",
        *_exchanged(worked),
        "",
        *_schedule(worked),
        "",
        *step_table(found),
        "",
        *_work(found),
        "",
        *memory_table(found),
        *wrapped(_kept(worked)),
        *wrapped(verdict(found)),
        "",
        *wrapped(_training(found, tokens)),
    ]


def as_json(found: Prediction, tokens: float | None) -> dict[str, Any]:
    """The same, with the prediction; sizes in bytes, times in seconds."""
    worked = arithmetic(found)
    return as_dict(found, tokens) | {
        "slowest_stage": found.slowest,
        "parameters_of_rank": worked.parameters,
        "kernels": [vars(row) | {"total_s": row.total_s} for row in worked.kernels],
        "exchanged": [vars(one) for one in worked.exchanged],
        "passes": [
            {
                "stage": stage,
                "forward_compute_s": one.forward.compute_s,
                "forward_tp_s": one.forward.tp_s,
                "backward_compute_s": one.backward.compute_s,
                "backward_tp_s": one.backward.tp_s,
            }
            for stage, one in enumerate(worked.step.passes)
        ],
    }


def _rank(worked: Arithmetic) -> Iterator[str]:
    found, spans = worked.found, [worked.step.spans[stage] for stage in worked.stages]
    ends = [
        name
        for name, has in (("embedding", "has_embedding"), ("head", "has_head"))
        if any(getattr(s, has) for s in spans)
    ]
    yield (
        f"of stage {found.slowest}, which ends last: {worked.blocks} block{'s' * (worked.blocks != 1)}"
        f"{''.join(f', the {end}' for end in ends)}; {worked.parameters:,.0f} parameters a rank"
    )
    yield (
        f"microbatches: {found.global_batch} samples / (dp {found.layout.dp} x micro-batch {found.layout.micro_batch}) "
        f"= {worked.step.microbatches}"
    )


def _kernels(worked: Arithmetic) -> Iterator[str]:
    for part in dict.fromkeys(row.part for row in worked.kernels):
        for way, words in PASSES.items():
            rows = [row for row in worked.kernels if (row.part, row.way) == (part, way)]
            if rows:
                yield f"{part}, {words}"
                yield from table(KERNELS, [_kernel(row) for row in rows])
    total_s = sum(row.total_s for row in worked.kernels)
    yield f"all of these: {total_s:.4g} s a step (compute)"


def _kernel(row: KernelRow) -> list[str]:
    rate = (
        f"{row.flops / row.seconds / 1e12:.1f} TFLOP/s"
        if row.flops
        else f"{row.moved_bytes / row.seconds / 1e9:.0f} GB/s"
    )
    return [
        row.name,
        row.shape,
        f"{row.flops / 1e9:.4g}" if row.flops else "",
        f"{row.moved_bytes / 1e6:.4g}",
        f"{1e3 * row.seconds:.4g}",
        rate,
        str(row.times),
        f"{row.total_s:.4g}",
    ]


def _exchanged(worked: Arithmetic) -> Iterator[str]:
    if not worked.exchanged:
        yield "no collectives: tp, pp and dp are 1"
        return
    formula = "collectives/cost.py" if worked.found.layout.trainer == "hpcllm" else "plan/network/library.py"
    yield f"collectives and messages, once each; formulas: {formula}"
    head = ("axis", "operation", "ranks", "nodes", "MB", "ms", "GB/s (MB / ms)", "how")
    yield from table(head, [_exchange(one) for one in worked.exchanged])


def _exchange(one: Exchanged) -> list[str]:
    ranks, nodes = str(one.ranks), str(one.nodes)
    size, taken = f"{one.size_bytes / 1e6:.4g}", f"{1e3 * one.seconds:.4g}"
    return [one.axis, one.operation, ranks, nodes, size, taken, f"{one.size_bytes / one.seconds / 1e9:.3g}", one.how]


def _schedule(worked: Arithmetic) -> Iterator[str]:
    """What a microbatch takes on each stage, and how the bubble comes about."""
    found, layout, m = worked.found, worked.found.layout, worked.step.microbatches
    mine = [worked.step.passes[stage] for stage in worked.stages]
    forward = sum(one.forward.compute_s for one in mine), sum(one.forward.tp_s for one in mine)
    backward = sum(one.backward.compute_s for one in mine), sum(one.backward.tp_s for one in mine)
    yield "a microbatch on each virtual stage, in ms"
    yield from _stages(worked)
    yield f"compute   {m} x ({forward[0]:.5g} + {backward[0]:.5g}) s = {found.compute_s:.4g} s"
    yield f"tp        {m} x ({forward[1]:.5g} + {backward[1]:.5g}) s = {found.tp_s:.4g} s that nothing hides"
    yield (
        f"bubble    {layout.schedule} of {layout.pp} rank{'s' * (layout.pp > 1)} and {layout.chunks} "
        f"chunk{'s' * (layout.chunks > 1)}, run action by action: {found.bubble_s:.4g} s of waiting"
    )
    if layout.schedule in ("1f1b", "gpipe") and layout.pp > 1:
        each_s = sum(forward) + sum(backward)
        yield f"          were all stages like this one: (pp - 1) x {each_s:.4g} s = {(layout.pp - 1) * each_s:.4g} s"
    yield f"pp        the same with messages: {found.pp_s:.4g} s more"
    all_s, hidden_s = found.dp_exposed_s + found.dp_hidden_s, found.dp_hidden_s
    yield f"dp        {all_s:.4g} s of exchange, less {hidden_s:.4g} s behind work: {found.dp_exposed_s:.4g} s"
    yield f"optimizer {found.optimizer_s:.4g} s, by the bytes that it reads and writes"


def _stages(worked: Arithmetic) -> list[str]:
    """Neighbours that are alike share a line."""
    head = ("stage", "blocks", "forward", "tp", "backward", "tp", "messages")
    alike: list[tuple[int, int, list[str]]] = []
    for stage, (span, one, sent) in enumerate(
        zip(worked.step.spans, worked.step.passes, worked.step.times, strict=True)
    ):
        times_s = (one.forward.compute_s, one.forward.tp_s, one.backward.compute_s, one.backward.tp_s)
        cells = [f"{span.last_block - span.first_block}", *(f"{1e3 * each_s:.4g}" for each_s in times_s)]
        cells.append(f"{1e3 * (sent.send_forward_s + sent.send_backward_s):.3g}")
        first = alike.pop()[0] if alike and alike[-1][2] == cells else stage
        alike.append((first, stage, cells))
    names = [f"{first}" if first == last else f"{first}-{last}" for first, last, _ in alike]
    return table(head, [[name, *cells] for name, (_, _, cells) in zip(names, alike, strict=True)])


def _kept(worked: Arithmetic) -> str:
    """Bytes a parameter that stay from step to step."""
    stage, n = worked.found.memory[worked.found.slowest], worked.parameters
    parts = " + ".join(f"{size / n:.4g}" for size in (stage.parameters, stage.gradients, stage.optimizer))
    return (
        f"stage {stage.stage} keeps of each of its {n:,.0f} parameters {parts} = {stage.allocated_bytes / n:.4g} bytes "
        "(weight, gradient, optimizer)"
    )


def _training(found: Prediction, tokens: float | None) -> str:
    cost, power = training(found, tokens), found.machine.power
    days = f"{cost.tokens:.4g} tokens / {found.tokens_per_s:,.0f} tokens/s = {cost.days:.4g} days"
    hours = f"x 24 x {cost.nodes} nodes = {cost.node_hours:,.0f} node-hours"
    return f"{days}; {hours}; x {power.node_w / 1000:g} kW = {cost.energy_kwh:,.0f} kWh (estimate)"


def _work(found: Prediction) -> Iterator[str]:
    """FLOPs in both conventions."""
    tokens, devices, seconds = found.global_batch * found.model.sequence, found.layout.devices, found.iteration_time_s
    model = found.model.flops_per_token * tokens
    yield f"work of the model: {found.model.flops_per_token:.4g} FLOPs a token x {tokens:,} tokens = {model:.4g} FLOPs"
    yield (
        f"  / {seconds:.4g} s / {devices} devices = {found.tflops_per_device_model:.4g} TFLOP/s; "
        f"/ peak {found.machine.device.peak_bf16_tflops:g} = MFU {found.mfu:.2%}"
    )
    yield (
        f"with what is made again: {found.hardware_flops:.4g} FLOPs, "
        f"{found.tflops_per_device_hardware:.4g} TFLOP/s a device"
    )
