"""The page: short for any number of nodes, honest about what differs, fit for JSON."""

from __future__ import annotations

import dataclasses
import json

from made_up_allocations import frontier, laptop, perlmutter, with_hardware, with_ranks, with_variable

from hpcllm.preflight.checks import check
from hpcllm.preflight.page import Measured, Page, draw


def page(allocation, measured=()) -> Page:
    return Page(allocation, "Slurm job 7, 59 min left", check(allocation), list(measured), took_s=1.5)


def test_ten_thousand_equal_nodes_are_drawn_once():
    lines = list(page(frontier(9000)).lines())
    assert lines[0] == "hpcllm preflight: 72000 ranks on 9000 nodes, Slurm job 7, 59 min left (took 1.5 s)"
    assert len(lines) < 30
    assert max(map(len, lines)) < 160
    text = "\n".join(lines)
    assert "9000 nodes alike, ranks 0-7 of frontier0000 are drawn" in text
    assert "|- NUMA 0   cores 0-15,64-79   cxi0 25 GB/s" in text
    assert "rank 4   cores 1-7    device 4 of 8   0000:d1:00.0   NUMA 0" in text
    assert lines[-1] == "fit to run"


def test_ranks_of_a_cpu_node_stand_in_one_line():
    base = perlmutter(1)
    facts = base.nodes[0].facts
    ranks = tuple(dataclasses.replace(facts.ranks[0], cores=(core,), device=None) for core in range(64))
    node = dataclasses.replace(base.nodes[0], ranks=tuple(range(64)), facts=dataclasses.replace(facts, ranks=ranks))
    lines = list(draw(dataclasses.replace(base, nodes=(node,), launched=64)))
    assert len(lines) == 1 + 4 + 4 * 16  # up to 16 ranks of a domain have a line each
    crowded = tuple(dataclasses.replace(rank, cores=(core // 2,)) for core, rank in enumerate(ranks))
    node = dataclasses.replace(node, facts=dataclasses.replace(facts, ranks=crowded))
    lines = list(draw(dataclasses.replace(base, nodes=(node,), launched=64)))
    assert any("ranks 0-31   1 core each of 0-15" in line for line in lines)


def test_kinds_of_nodes_are_drawn_apart_and_many_are_counted():
    gpus = frontier().nodes[0].facts.hardware.gpus
    text = "\n".join(draw(with_hardware(frontier(5), [3], gpus=gpus[:7])))
    assert "frontier[0000-0002,0004]: 4 nodes alike" in text
    assert "frontier0003: ranks 24-31" in text
    many = frontier(20)
    for number in range(20):
        many = with_hardware(many, [number], quota_cores=float(number + 100))
    lines = list(draw(many))
    assert lines[-1].startswith("frontier[0006-0013], ... (14 nodes): 14 more kinds of nodes")


def test_findings_are_printed_with_place_and_fix():
    lines = list(page(with_variable(frontier(2), "FI_MR_CACHE_MONITOR", "memhooks")).lines())
    start = next(index for index, line in enumerate(lines) if line.startswith("  SLOW  "))
    assert [line[:8] for line in lines[start : start + 3]] == ["  SLOW  ", " where  ", "   fix  "]
    assert lines[-1] == "not fit to run: 1 finding to fix first"
    noted = list(page(with_variable(frontier(2), "CXI_FORK_SAFE", None)).lines())
    assert noted[-1] == "fit to run; 1 note"


def test_json_has_all_of_it():
    allocation = with_ranks(laptop(2), lambda _, rank: dataclasses.replace(rank, cores=(0,)))
    told = json.loads(
        json.dumps(page(allocation, [Measured("matrix products", "fast", {"gflop_s": [1.0, 2.0]})]).as_dict())
    )
    assert told["fit"] is False
    assert told["ranks"] == 2
    assert [finding["severity"] for finding in told["findings"]] == ["slow"]
    assert told["findings"][0].keys() == {"severity", "what", "where", "fix"}
    assert told["measured"] == {"matrix products": {"gflop_s": [1.0, 2.0]}}
    assert told["nodes"][0]["name"] == "laptop"
    assert told["kinds"][told["nodes"][0]["kind"]]["ranks"][1]["cores"] == "0"
    assert told["kinds"][0]["hardware"]["topology"]["cores"] == {"numa 0": "0-3"}


def test_text_from_elsewhere_steers_no_terminal():
    evil = with_ranks(laptop(1), lambda _, rank: dataclasses.replace(rank, fault="\x1b[2J"))
    assert all(line.isprintable() for line in page(evil).lines())
