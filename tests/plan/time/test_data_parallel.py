"""What replicas exchange: by sharding and trainer, and how much of it can be hidden."""

from __future__ import annotations

import pytest

from hpcllm.plan.layouts import parse_layout
from hpcllm.plan.machine import read_machine
from hpcllm.plan.models import read_model
from hpcllm.plan.time.network import Network
from hpcllm.plan.time.passes import Exchange, ends_s, exchange, gradient_bytes, hideable_s, summed_bytes

SHARDS = ("none", "states", "states+gradients", "all")
TRAINERS = ("megatron", "hpcllm")


def exchanged(layout: str, microbatches: int = 4) -> Exchange:
    parsed = parse_layout(layout)
    return exchange(1e9, parsed, microbatches, Network(read_machine("lumi-g"), parsed))


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("shard", SHARDS)
def test_one_replica_exchanges_nothing(trainer: str, shard: str) -> None:
    assert exchanged(f"tp=8,trainer={trainer},shard={shard}") == Exchange()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_sharding_more_travels_more(trainer: str) -> None:
    each = {shard: exchanged(f"dp=16,trainer={trainer},shard={shard}").total_s for shard in SHARDS}
    assert each["none"] > 0
    assert each["states"] < each["states+gradients"] < each["all"]


@pytest.mark.parametrize("shard", ["states+gradients", "all"])
def test_what_travels_with_each_microbatch_grows_with_them(shard: str) -> None:
    few, many = (exchanged(f"dp=16,shard={shard}", microbatches).passes_s for microbatches in (2, 6))
    assert many == pytest.approx(3 * few)


def test_ours_hides_what_megatron_does_not() -> None:
    for shard in ("none", "states"):
        ours, others = (exchanged(f"dp=16,shard={shard},trainer={trainer}") for trainer in ("hpcllm", "megatron"))
        assert ours.after_s == 0 < ours.backward_s
        assert others.total_s == others.after_s


@pytest.mark.parametrize("forward_s", [0.0, 0.1, 100.0])
@pytest.mark.parametrize("shard", SHARDS)
def test_nothing_hides_more_than_there_is(forward_s: float, shard: str) -> None:
    done = exchanged(f"dp=16,trainer=hpcllm,shard={shard}")
    assert 0 <= hideable_s(done, forward_s, 2 * forward_s) <= done.total_s
    assert hideable_s(done, forward_s, 2 * forward_s) <= hideable_s(done, 2 * forward_s, 4 * forward_s)


@pytest.mark.parametrize(
    ("layout", "kept", "summed"),
    [
        ("precision=bf16", 6, 4),
        ("precision=fp16", 2, 2),
        ("precision=bf16,gradient_bytes=2", 2, 2),
        ("precision=fp32", 4, 4),
        ("precision=bf16,trainer=hpcllm", 4, 4),
    ],
)
def test_bytes_of_a_gradient(layout: str, kept: int, summed: int) -> None:
    assert gradient_bytes(parse_layout(layout)) == kept
    assert summed_bytes(parse_layout(layout)) == summed


def test_both_ends_sum_an_embedding_that_they_share() -> None:
    machine, layout = read_machine("jean-zay-a100"), parse_layout("tp=4,pp=12,dp=8,precision=fp16")
    tied, apart = (
        read_model(f"layers=72,hidden=14336,heads=64,ffn=57344,vocab=250880,sequence=2048,tied={tied}")
        for tied in ("true", "false")
    )
    assert ends_s(tied, layout, Network(machine, layout)) > 0.1
    assert ends_s(apart, layout, Network(machine, layout)) == 0
    alone = parse_layout("tp=4,dp=8")
    assert ends_s(tied, alone, Network(machine, alone)) == 0
