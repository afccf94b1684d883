"""Tables of shapes and of tensors, summed up with NumPy; layouts as columns of an array."""

from dataclasses import replace

import numpy as np

from hpcllm.course.labs.planner.given import Layout


def shapes(model):
    """Rows of (count, inputs, outputs) of all matrices of products, the output layer last."""
    h, f = model.hidden, model.ffn
    return np.array(
        [(4 * model.layers, h, h), ((2 + model.gated) * model.layers, h, f), (1, h, model.vocabulary)], dtype=np.int64
    )


def parameters(model):
    table, norms = model.vocabulary * model.hidden, (2 * model.layers + 1) * model.hidden
    return int(shapes(model).prod(axis=1).sum() + table + norms)


def flops(model, tokens):
    dense = 2.0 * shapes(model).prod(axis=1).sum()
    attention = 2.0 * 2 * model.layers * model.sequence * model.hidden
    return float(tokens * (dense + attention) * (1 + 2))


def held(model, layout):
    """Parameters of the first stage, on one device."""
    counts = shapes(model).astype(float).prod(axis=1)
    layers, head = counts[:2].sum() / layout.pp, counts[2]
    norms = 2 * model.layers / layout.pp
    last = layout.pp == 1
    return (layers + head + last * head) / layout.tp + (norms + last) * model.hidden


def memory_bytes(model, layout, batch):
    n, tokens = held(model, layout), layout.micro_batch * model.sequence
    whole = np.array([model.hidden] * 4)  # two norms: what goes in, what comes out
    split = np.array([model.hidden] * 4 + [model.ffn] * (4 if model.gated else 2))
    layer = 2 * tokens * (whole.sum() + split.sum() / layout.tp)
    in_flight = min(layout.pp, batch // (layout.dp * layout.micro_batch))
    kept = in_flight * model.layers / layout.pp
    activations = kept * 2 * tokens * model.hidden + layer if layout.recompute else kept * layer
    kinds = np.array([2, 2, 12 / (layout.dp if layout.shard else 1)]) * n
    return dict(zip(("parameters", "gradients", "states", "activations"), map(float, [*kinds, activations])))


def parts(model, layout, machine, batch):
    """Seconds at full efficiency, and seconds that have nothing to do with it."""
    rates = {True: machine.near_bytes_per_s, False: machine.far_bits_per_s / 8}
    m = batch / layout.dp / layout.micro_batch
    stretch = 1 + (layout.pp - 1) / m
    devices = layout.dp * layout.tp * layout.pp
    work = (
        flops(model, batch * model.sequence) * (4 / 3 if layout.recompute else 1) / devices / machine.peak_flops_per_s
    )
    sums = np.array([2, 2, 2 * layout.recompute]).sum() * model.layers / layout.pp * m
    size = 2 * layout.micro_batch * model.sequence * model.hidden
    over_tp = 2 * (layout.tp - 1) * (machine.latency_s + size / layout.tp / rates[layout.tp <= machine.node])
    size = 2 * held(model, layout)
    rate = rates[layout.tp * layout.dp <= machine.node]
    over_dp = 2 * (layout.dp - 1) * (machine.latency_s + size / layout.dp / rate)
    return work * stretch, sums * over_tp * stretch + over_dp


def step_seconds(model, layout, machine, batch):
    work, rest = parts(model, layout, machine, batch)
    return work / machine.efficiency + rest


def sustained_efficiency(model, layout, machine, batch, seconds):
    work, rest = parts(model, layout, machine, batch)
    return work / (seconds - rest)


def best_layout(model, machine, devices, batch):
    grid = np.indices((devices, devices, devices, batch, 2)).reshape(5, -1) + np.array([[1], [1], [1], [1], [0]])
    dp, tp, pp, micro_batch, _ = grid
    good = (dp * tp * pp == devices) & (model.layers % pp == 0) & (batch % (dp * micro_batch) == 0)
    good &= np.gcd.reduce([model.heads, model.ffn, model.vocabulary]) % tp == 0
    layouts = [Layout(*map(int, column[:4]), bool(column[4]), shard=True) for column in grid[:, good].T]
    enough = [each for each in layouts if sum(memory_bytes(model, each, batch).values()) <= machine.memory_bytes]
    seconds = [step_seconds(model, each, replace(machine), batch) for each in enough]
    return enough[int(np.argmin(seconds))] if enough else None


PREDICTIONS = {"billions": 175.206838272, "gigabytes": 18.3, "seconds": 71.8}
