"""What replicas exchange: by sharding and trainer, and how much of it can be hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.plan.layouts import parse_layout
from hpcllm.plan.machine import read_machine
from hpcllm.plan.models import read_model
from hpcllm.plan.time.network import Network
from hpcllm.plan.time.passes import Exchange, ends_s, exchange, gradient_bytes, hideable_s, summed_bytes

SHARDS = ("none", "states", "states+gradients", "all")
TRAINERS = ("megatron", "hpcllm")


def exchanged(layout: str, microbatches: int = 4) -> Exchange:
    parsed = parse_layout(layout)
    return exchange(1e9, 24, parsed, microbatches, Network(read_machine("lumi-g"), parsed))


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


@given(
    st.sampled_from(["states+gradients", "all"]),
    st.sampled_from(TRAINERS),
    st.sampled_from([2, 16, 512]),
    st.floats(0, 1),
)
def test_beside_passes_only_that_share_is_hidden_that_a_layout_says(shard, trainer, dp, hidden) -> None:
    text = f"dp={dp},shard={shard},trainer={trainer}"
    silent, told = exchanged(text), exchanged(f"{text},hidden={hidden:.4f}")
    assert silent.total_s == told.total_s
    shown = hideable_s(replace(silent, forward_s=0.0), 100.0, 200.0)
    assert shown == 0
    assert hideable_s(replace(told, forward_s=0.0), 100.0, 200.0) == pytest.approx(told.passes_s * round(hidden, 4))


@given(st.sampled_from(TRAINERS), st.sampled_from([2, 8, 64, 1024]), st.integers(1, 64))
def test_a_block_in_more_messages_is_never_faster(trainer: str, dp: int, messages: int) -> None:
    text = f"dp={dp},shard=all,trainer={trainer}"
    fewer, more = (exchanged(f"{text},messages={count}").passes_s for count in (messages, messages + 1))
    assert fewer <= more * (1 + 1e-12)


def test_the_weights_of_a_block_are_one_message_of_ours_and_one_a_matrix_of_others() -> None:
    for trainer, messages in (("hpcllm", 1), ("megatron", 4)):
        text = f"dp=64,shard=all,trainer={trainer}"
        assert exchanged(text) == exchanged(f"{text},messages={messages}")
        assert exchanged(text).passes_s < exchanged(f"{text},messages={messages + 1}").passes_s


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
