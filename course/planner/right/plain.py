"""Term by term, as the sheet tells it."""

from dataclasses import replace

from hpcllm.course.labs.planner.given import Layout


def matrices(model):
    return 4 * model.hidden * model.hidden + (3 if model.gated else 2) * model.hidden * model.ffn


def parameters(model):
    table = model.vocabulary * model.hidden
    return model.layers * (matrices(model) + 2 * model.hidden) + 2 * table + model.hidden


def flops(model, tokens):
    weights = model.layers * matrices(model) + model.vocabulary * model.hidden
    scores = 4 * model.layers * model.hidden * model.sequence
    return 3 * tokens * (2 * weights + scores)


def device_parameters(model, layout):
    table = model.vocabulary * model.hidden / layout.tp
    layers = model.layers // layout.pp
    n = layers * (matrices(model) / layout.tp + 2 * model.hidden) + table
    if layout.pp == 1:
        n += table + model.hidden
    return n


def activations(model, layout, batch):
    tokens = layout.micro_batch * model.sequence
    stream = 2 * tokens * model.hidden
    inner = 4 * model.hidden + (4 if model.gated else 2) * model.ffn
    layer = 4 * stream + 2 * tokens * inner / layout.tp
    m = batch // (layout.dp * layout.micro_batch)
    held = min(layout.pp, m) * model.layers // layout.pp
    if layout.recompute:
        return held * stream + layer
    return held * layer


def memory_bytes(model, layout, batch):
    n = device_parameters(model, layout)
    states = 12 * n
    if layout.shard:
        states /= layout.dp
    return {
        "parameters": 2 * n,
        "gradients": 2 * n,
        "states": states,
        "activations": activations(model, layout, batch),
    }


def ring(p, ranks, size, machine):
    near, far = machine.near_bytes_per_s, machine.far_bits_per_s / 8
    rate = near if ranks <= machine.node else far
    return 2 * (p - 1) * machine.latency_s + 2 * (p - 1) / p * size / rate


def step_seconds(model, layout, machine, batch):
    m = batch // (layout.dp * layout.micro_batch)
    work = flops(model, batch * model.sequence)
    if layout.recompute:
        work *= 4 / 3
    work /= layout.dp * layout.tp * layout.pp * machine.peak_flops_per_s * machine.efficiency
    message = 2 * layout.micro_batch * model.sequence * model.hidden
    sums = 6 if layout.recompute else 4
    layers = model.layers / layout.pp
    travel = m * layers * sums * ring(layout.tp, layout.tp, message, machine)
    bubble = (work + travel) * (layout.pp - 1) / m
    gradients = 2 * device_parameters(model, layout)
    return work + travel + bubble + ring(layout.dp, layout.dp * layout.tp, gradients, machine)


def sustained_efficiency(model, layout, machine, batch, seconds):
    whole = step_seconds(model, layout, replace(machine, efficiency=1.0), batch)
    half = step_seconds(model, layout, replace(machine, efficiency=0.5), batch)
    work = half - whole
    return work / (seconds - (whole - work))


def best_layout(model, machine, devices, batch):
    best, best_seconds = None, float("inf")
    for tp in range(1, devices + 1):
        for pp in range(1, devices // tp + 1):
            if devices % (tp * pp) or model.layers % pp:
                continue
            if model.heads % tp or model.ffn % tp or model.vocabulary % tp:
                continue
            dp = devices // (tp * pp)
            for micro_batch in range(1, batch // dp + 1):
                if batch % (dp * micro_batch):
                    continue
                for recompute in (False, True):
                    layout = Layout(dp, tp, pp, micro_batch, recompute, True)
                    if sum(memory_bytes(model, layout, batch).values()) > machine.memory_bytes:
                        continue
                    seconds = step_seconds(model, layout, machine, batch)
                    if seconds < best_seconds:
                        best, best_seconds = layout, seconds
    return best


PREDICTIONS = {"billions": 175.2, "gigabytes": 18.34, "seconds": 71.8}
