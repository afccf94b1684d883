"""A search that finds nothing says what stands in the way, and what it advises is there."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hpcllm.plan.layout_search import Search, search
from hpcllm.plan.machine import read_machine
from hpcllm.plan.prediction import predict
from hpcllm.plan.ranking import lines, nothing, obstacles
from hpcllm.plan.report import lines as report_lines

MODEL = {"layers": 6, "hidden": 96, "heads": 12, "kv_heads": 4, "ffn": 256, "vocab": 512, "sequence": 64}


def found(constraints: str, devices: int = 16, batch: int = 64) -> Search:
    return search("lumi-g", MODEL, devices, batch, top=1, constraints=constraints)


@pytest.mark.parametrize(
    ("wrong", "pattern", "key"),
    [
        ("tp=8", r"tp = 8 does not divide 12 heads and 4 key and value heads; .*: tp = (\d+)", "tp"),
        ("tp=3", r"tp = 3 does not divide 4 key and value heads and 256 ffn channels; .*: tp = (\d+)", "tp"),
        ("pp=8", r"pp = 8 is more stages than there are blocks; at most pp = (\d+)", "pp"),
    ],
)
def test_what_cannot_be_is_named_with_a_neighbour_that_can(wrong, pattern, key):
    nowhere = found(wrong)
    (line,) = obstacles(nowhere)
    advice = re.fullmatch(pattern, line)
    assert advice, line
    assert "tp = " in " ".join(nothing(nowhere)) or key == "pp"
    devices = int(advice[1]) * 2
    assert obstacles(found(f"{key}={advice[1]}", devices=devices)) == []


def test_a_batch_that_replicas_cannot_share_is_named_with_its_neighbours():
    with_rest = found("tp=4,pp=1", batch=61)
    assert with_rest.idle
    (line,) = obstacles(with_rest)
    batches = re.search(r"dp = 4 of 16 devices with tp = 4, pp = 1; the nearest that do: (\d+) and (\d+)", line)
    assert batches, line
    assert "the nearest that do" in " ".join(lines(with_rest, None))
    for batch in map(int, batches.groups()):
        assert found("tp=4,pp=1", batch=batch).idle == 0


def test_nothing_is_in_the_way_of_what_was_found():
    assert obstacles(found("tp=4")) == []


@pytest.mark.parametrize("nodes", [1, 2])
def test_more_devices_than_the_machine_has_are_said(nodes):
    lumi = read_machine("lumi-g")
    machine, each = dataclasses.replace(lumi, nodes=nodes), lumi.device.per_node
    for devices in (each, 2 * each):
        asked = search(machine, MODEL, devices, 64, top=1, constraints="tp=4,pp=1")
        one = predict(machine, asked.model, asked.best[0].layout, 64)
        for told in (lines(asked, None), report_lines(one, None)):
            says = f"MORE DEVICES THAN THERE ARE: {devices}, and {machine.name} has {nodes * each} on" in " ".join(told)
            assert says == (devices > nodes * each)
