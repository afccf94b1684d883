"""Laws of the network over all machines and many layouts: more bandwidth is never slower, more bytes never faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collectives.made_up_rates import made_up

from hpcllm.collectives.cost import cost_s
from hpcllm.collectives.tuning import Shape, Tuning
from hpcllm.config import machines
from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import Machine, read_machine
from hpcllm.plan.time.network import VOLUME, Network, bus_gb_s

NAMES = [name for name in machines.names() if "device" in machines.load(name)]
OF_NODES = [name for name in NAMES if "torus" not in read_machine(name).fabric.topology]  # a torus has none
TRAINERS = ("hpcllm", "megatron")
OPERATIONS = ("allreduce", "reduce_scatter", "allgather")
POLICIES = ("none", "mzhybrid", "hpcllm")
MIB = 1 << 20
SHAPES = [  # tp, pp, dp
    (1, 1, 2), (1, 1, 8), (1, 1, 64), (2, 1, 4), (2, 3, 5), (3, 2, 4), (4, 2, 8), (8, 4, 2), (8, 8, 16), (16, 2, 2),
    (8, 2, 512), (1, 64, 32),
]  # fmt: skip


def layouts(trainer: str, policy: str = "none") -> list[Layout]:
    orders = ("tp,dp,pp", "tp,pp,dp", "dp,tp,pp")
    return [
        Layout(tp=tp, pp=pp, dp=dp, trainer=trainer, policy=policy, order=order)
        for tp, pp, dp in SHAPES
        for order in orders
    ]


def times(machine: Machine, layout: Layout, size_bytes: float) -> list[float]:
    """Of everything that a layout can ask of the network."""
    network = Network(machine, layout)
    collectives = [ask(name, size_bytes) for ask in (network.tensor_s, network.data_s) for name in OPERATIONS]
    messages = [network.message_s(size_bytes, rank, rank + 1) for rank in range(min(layout.pp - 1, 9))]
    return [*collectives, *messages]


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", NAMES)
def test_more_bytes_are_never_faster(name, trainer):
    """Where our rules take another algorithm from one size on, that may be the sooner one, but not by much."""
    machine, slack = read_machine(name), 3 if trainer == "hpcllm" else 1
    for layout in layouts(trainer):
        before = times(machine, layout, 1)
        for size_bytes in (1024, 64 * 1024 + 2, 200_000, 14 * MIB, 700 * MIB, 6 << 30):
            after = times(machine, layout, size_bytes)
            assert all(0 <= less <= more * slack for less, more in zip(before, after, strict=True)), (
                layout,
                size_bytes,
            )
            before = after


@pytest.mark.parametrize("trainer", TRAINERS)
def test_twice_the_bytes_take_longer_but_not_more_than_twice_as_long(trainer):
    machine = read_machine("lumi-g")
    for layout in layouts(trainer):
        for once, twice in zip(times(machine, layout, 256 * MIB), times(machine, layout, 512 * MIB), strict=True):
            assert once <= twice <= 2.001 * once, layout


def better_in(machine: Machine, part: str, key: str) -> Machine:
    old = getattr(machine, part)
    factor = 0.5 if key == "latency_s" else 2
    value = min(1.0, factor * getattr(old, key)) if key.endswith("share") else factor * getattr(old, key)
    return replace(machine, **{part: replace(old, **{key: value})})


BETTER = [
    *(("links", key) for key in ("pair_gb_s", "package_gb_s", "device_gb_s", "message_share", "collective_gb_s")),
    *(("fabric", key) for key in ("nic_gb_s", "nics_per_node", "mpi_share", "message_share", "collective_share")),
    ("fabric", "group_taper"), ("fabric", "group_nodes"), ("links", "latency_s"), ("fabric", "latency_s"),
]  # fmt: skip


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("part", "key"), BETTER)
def test_a_better_network_is_never_slower(part, key, trainer):
    for name in ("lumi-g", "leonardo", "dgx-a100", "meta-h100", "summit"):
        machine = read_machine(name)
        better = better_in(machine, part, key)
        for layout in layouts(trainer):
            for size_bytes in (4096, 64 * MIB):
                pairs = zip(times(better, layout, size_bytes), times(machine, layout, size_bytes), strict=True)
                assert all(new <= old * (1 + 1e-12) for new, old in pairs), (name, layout)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_costs_nothing(name, trainer):
    network = Network(read_machine(name), Layout(trainer=trainer, pp=4))
    for operation in OPERATIONS:
        assert network.tensor_s(operation, MIB) == network.data_s(operation, MIB) == 0.0


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", NAMES)
def test_more_replicas_on_more_nodes_are_never_faster(name, trainer):
    """With all devices of a node in one group of tp: each replica is a node more."""
    machine = read_machine(name)
    for operation in OPERATIONS:
        made = [Layout(tp=machine.device.per_node, dp=dp, trainer=trainer) for dp in (2, 3, 4, 8, 32, 128, 1024)]
        seconds = [Network(machine, layout).data_s(operation, 256 * MIB) for layout in made]
        assert seconds == sorted(seconds)


@pytest.mark.parametrize("name", OF_NODES)
def test_a_group_inside_a_node_is_not_slower_than_one_of_as_many_nodes(name):
    machine = read_machine(name)
    ranks, per_node = machine.device.per_node, machine.device.per_node
    for operation in OPERATIONS:
        inside = Network(machine, Layout(tp=ranks, trainer="megatron")).tensor_s(operation, 64 * MIB)
        across = Network(machine, Layout(tp=per_node, dp=ranks, trainer="megatron")).data_s(operation, 64 * MIB)
        assert inside <= across


@pytest.mark.parametrize("name", OF_NODES)
def test_no_group_gets_more_than_its_links(name):
    """Bus bandwidth of a library's group: at most what its node's links, or its part of the NICs, carry."""
    machine = read_machine(name)
    for layout in layouts("megatron"):
        network = Network(machine, layout)
        for axis in ("tp", "dp"):
            group = network.spread(axis)
            if group.ranks > 1:
                assert bus_gb_s(group, machine) <= machine.links.device_gb_s
            if group.nodes > 1:
                assert bus_gb_s(group, machine) * group.together <= machine.fabric.node_gb_s * (1 + 1e-12)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_all_groups_together_move_no_more_than_the_nics(trainer):
    """Two devices a node or eight: a node's groups share the same NICs, so each takes longer with more of them."""
    few = read_machine("selene")
    many = replace(few, device=replace(few.device, per_node=16))
    for operation in OPERATIONS:
        alone, crowded = (
            Network(machine, Layout(tp=machine.device.per_node, dp=16, trainer=trainer)).data_s(operation, 1 << 30)
            for machine in (few, many)
        )
        assert crowded == pytest.approx(2 * alone, rel=0.05)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_codec_pays_between_nodes_as_its_ratio_says_and_only_for_our_trainer(policy):
    machine = read_machine("dgx-a100")
    for trainer in TRAINERS:
        layout = Layout(tp=8, pp=8, dp=16, trainer=trainer)
        plain = Network(machine, layout).data_s("reduce_scatter", 1 << 30)
        coded = Network(machine, replace(layout, policy=policy)).data_s("reduce_scatter", 1 << 30)
        if trainer == "megatron" or policy == "none":
            assert coded == plain
        else:
            assert plain / 5 < coded < plain


def test_neighbouring_stages_of_a_node_do_not_use_its_nics():
    machine = read_machine("selene")
    for trainer in TRAINERS:
        network = Network(machine, Layout(tp=2, pp=8, trainer=trainer))
        assert network.message_s(64 * MIB, 0, 1) < network.message_s(64 * MIB, 3, 4) / 5  # 3 is the node's last stage


def test_loss_of_a_busy_network_grows_with_the_nodes():
    """arXiv:2408.14090: half of an all-reduce's rate is lost on Leonardo at 1024 devices, almost nothing on LUMI."""
    for name, loss in (("leonardo", 0.5), ("lumi-g", 1.0), ("alps", 1.0)):
        machine = read_machine(name)
        calm = replace(machine, fabric=replace(machine.fabric, loss_per_doubling=0.0))
        group = Network(machine, Layout(tp=machine.device.per_node, dp=256, trainer="megatron")).spread("dp")
        assert bus_gb_s(group, machine) / bus_gb_s(group, calm) == pytest.approx(loss)


def test_volumes_are_those_of_the_operations():
    machine = read_machine("selene")
    machine = replace(machine, fabric=replace(machine.fabric, loss_per_doubling=0.0))
    network = Network(machine, Layout(tp=8, dp=4, trainer="megatron"))
    for operation in OPERATIONS:
        alone = network.data_s(operation, 4 << 30) - network.data_s(operation, 2 << 30)
        assert alone == pytest.approx(VOLUME[operation] * (2 << 30) * 3 / 4 / (0.85 * 25e9), rel=1e-6)


@pytest.mark.parametrize("operation", ["allgather", "reduce_scatter"])
def test_many_ranks_make_messages_of_one_size_slow_long_before_their_first_word_is_through(operation):
    """A NIC pays for each rank's part: a byte costs the more, the more ranks share a message of its size."""
    machine = read_machine("selene")
    times = [
        Network(machine, Layout(dp=dp, trainer="megatron")).data_s(operation, 1 << 30)
        for dp in (16, 64, 256, 1024, 4096)
    ]
    assert times == sorted(times)
    assert times[-1] > 4 * times[0]
    hop_s = machine.fabric.latency_s
    assert times[-1] > 4095 * hop_s


def test_rates_that_were_measured_are_those_of_the_formulas():
    """On CPUs of one node, where the links of the machine file have no say."""
    rates = made_up()
    machine = replace(read_machine("lumi-g"), tuning=Tuning(rates, {}))
    machine = replace(machine, device=replace(machine.device, family="cpu", per_node=4))
    network = Network(machine, Layout(dp=4, policy="none"))
    raw = rates.codings["raw", "float32"]
    for size_bytes in (100_000, 10 * MIB):
        expected = cost_s("reduce_scatter", "node_window", size_bytes, raw, Shape(4, 1, 4), rates)
        assert network.data_s("reduce_scatter", size_bytes) == expected
