"""Passes of a microbatch: what each layout adds to them, or takes from them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hpcllm.model.shapes import StageSpan
from hpcllm.plan.layouts import Layout, parse_layout
from hpcllm.plan.machine import Machine, read_machine
from hpcllm.plan.models import read_model
from hpcllm.plan.time.network import Network
from hpcllm.plan.time.passes import Passes, optimizer_s, passes

GPT = "layers=8,hidden=4096,heads=32,ffn=16384,vocab=50304,sequence=2048"
LLAMA = "layers=8,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,sequence=4096,gated=true"
WHOLE = StageSpan(0, 8, True, True)
MACHINES = ("dgx-a100", "lumi-g", "dgx-h100")
TRAINERS = ("megatron", "hpcllm")


def timed(machine: str | Machine, model: str, layout: str | Layout, span: StageSpan = WHOLE) -> Passes:
    machine, layout = read_machine(machine), parse_layout(layout)
    return passes(read_model(model), layout, span, machine, Network(machine, layout))


def total_s(each: Passes) -> float:
    return each.forward.total_s + each.backward.total_s


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_tp_never_makes_a_pass_longer(machine: str, model: str, trainer: str) -> None:
    each = [timed(machine, model, f"tp={tp},micro_batch=2,trainer={trainer}") for tp in (1, 2, 4, 8)]
    for one, more in itertools.pairwise(each):
        assert more.forward.compute_s < one.forward.compute_s < 2.2 * more.forward.compute_s
        assert total_s(more) < total_s(one)
        assert more.forward.tp_s > 0
    assert each[0].forward.tp_s == each[0].backward.tp_s == 0


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_recomputation_costs_up_to_a_forward_pass(model: str, trainer: str) -> None:
    none, selective, full = (
        timed("dgx-a100", model, f"tp=2,recompute={level},trainer={trainer}") for level in ("none", "selective", "full")
    )
    assert none.forward == full.forward
    if trainer == "hpcllm":  # whose norm adds up in its own kernel, but where its input is kept to compute it again
        assert none.forward.total_s <= selective.forward.total_s < 1.05 * none.forward.total_s
    else:
        assert none.forward == selective.forward
    assert none.backward.total_s < selective.backward.total_s < full.backward.total_s
    again_s = full.backward.total_s - none.backward.total_s
    assert 0.7 * none.forward.total_s < again_s < none.forward.total_s  # all but the head's
    assert none.weight_s == full.weight_s


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_the_backward_pass_is_about_two_forward_passes_and_a_third_of_all_is_weights(machine: str, model: str) -> None:
    each = timed(machine, model, "micro_batch=4")
    assert 1.5 < each.backward.total_s / each.forward.total_s < 2.7
    assert 0.22 < each.weight_s / total_s(each) < 0.42


def test_spans_add_up() -> None:
    first, middle, last = (StageSpan(0, 3, True, False), StageSpan(3, 5, False, False), StageSpan(5, 8, False, True))
    parts = [timed("dgx-a100", GPT, "tp=4,recompute=full", span) for span in (first, middle, last)]
    whole = timed("dgx-a100", GPT, "tp=4,recompute=full")
    assert sum(map(total_s, parts)) == pytest.approx(total_s(whole))
    assert sum(part.weight_s for part in parts) == pytest.approx(whole.weight_s)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("key", ["hbm_gb_s", "gemm_bf16_tflops"])
def test_a_better_device_is_never_slower(trainer: str, key: str) -> None:
    machine = read_machine("frontier")
    device = dataclasses.replace(machine.device, **{key: 1.5 * getattr(machine.device, key)})
    layout = f"tp=4,trainer={trainer},sequence_parallel=true"
    assert total_s(timed(dataclasses.replace(machine, device=device), LLAMA, layout)) < total_s(
        timed(machine, LLAMA, layout)
    )


@pytest.mark.parametrize("layout", ["shard=none", "shard=states,dp=8"])
def test_adamw_takes_the_longer_the_more_it_updates_and_holds(layout: str) -> None:
    machine = read_machine("lumi-g")
    each = [optimizer_s(held, updated, parse_layout(layout), machine) for held, updated in ((1e9, 1e8), (1e9, 1e9))]
    assert 0 < each[0] < each[1] < 0.1
    assert optimizer_s(2e9, 1e9, parse_layout(layout), machine) > each[1]


@pytest.mark.parametrize("trainer", ["hpcllm", "megatron"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_forward_pass_waits_for_two_sums_a_block_or_their_halves(trainer, blocks):
    machine, model = read_machine("dgx-a100"), read_model("llama-7b", 2048)
    size = 2 * 2048 * model.shape.hidden
    for parallel, operations in ((False, ("allreduce",)), (True, ("allgather", "reduce_scatter"))):
        layout = Layout(tp=4, sequence_parallel=parallel, trainer=trainer)
        network = Network(machine, layout)
        found = passes(model, layout, StageSpan(1, 1 + blocks, False, False), machine, network)
        each_s = sum(network.tensor_s(operation, size) for operation in operations)
        assert found.forward.tp_s == pytest.approx(2 * blocks * each_s)
