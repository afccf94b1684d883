"""The usual mistakes in formulas of lab 8, by the keys of their hints: what Rules they come to. Pure.

a number of the student's, and the formula as a function of Rules --> the key of the first mistake that gives the number
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hpcllm.course.labs.planner.ours import NEAR, RIGHT, Rules

Changes = tuple[dict[str, Any], ...]

SIZES: Mapping[str, Changes] = {
    "one_table": ({"tables": 1},),
    "no_norms": ({"norms": 0},),
    "attention_matrices": ({"square": 3}, {"square": 1}),
    "gate": ({"gated": 2}, {"plain": 3}, {"gated": 4}),
}
FLOPS: Mapping[str, Changes] = {
    "backward": ({"passes": 1}, {"passes": 2}),
    "per_weight": ({"per_weight": 1, "scores": 2}, {"per_weight": 1}),
    "scores": ({"scores": 0}, {"scores": 2}),
    "lookup": ({"products": 2}, {"products": 2, "norm_products": 1}, {"products": 2, "norm_products": 1, "scores": 0}),
    "no_head": ({"products": 0},),
    "gate": SIZES["gate"],
    "attention_matrices": SIZES["attention_matrices"],
}
WEIGHTS: Mapping[str, Changes] = {
    "tables_whole": ({"tables_by_tp": False},),
    "norms_split": ({"norms_by_tp": True},),
    "stage": ({"layers_by_pp": False},),
    "head_stage": ({"first_has_head": True}, {"layers_by_pp": False, "first_has_head": True}),
}
STATES: Mapping[str, Changes] = {
    "states_by_tp": ({"states_by_tp": False},),
    "shard": ({"shard": False}, {"shard": True}),
    "bytes_each": tuple({"bytes_each": each} for each in ((4, 4, 12), (2, 4, 12), (2, 2, 8), (4, 4, 8), (2, 2, 16))),
}
ACTIVATIONS: Mapping[str, Changes] = {
    "held": ({"held": "one"}, {"held": "all"}, {"held": "stages"}),
    "batch_for_micro": ({"samples": "batch"},),
    "samples": ({"samples": "one"},),
    "keeps_all": ({"keeps_all": True},),
    "layer_at_work": ({"layer_at_work": False},),
    "streams": ({"streams_by_tp": True}, {"kept_by_tp": False}),
    "stage": ({"layers_by_pp": False},),
    "bytes_kept": ({"activation_bytes": 4}, {"activation_bytes": 1}, {"activation_bytes": 16}),
    "gate": ({"gated_kept": 2}, {"plain_kept": 4}, {"gated_kept": 3}),
}
TIME: Mapping[str, Changes] = {
    "again": ({"again": 0},),
    "efficiency": ({"efficiency": False},),
    "work_by": ({"work_by": "tp pp"}, {"work_by": "dp"}, {"step_samples": "twice"}),
    "micro_for_batch": ({"step_samples": "micro_batch"},),
    "bubble": ({"bubble": "(p - 1) / (m + p - 1)"}, {"bubble": "p / m"}, {"bubble": "2 (p - 1) / m"}),
    "no_bubble": ({"bubble": "none"},),
    "bubble_batch": ({"microbatches": "of all"}, {"microbatches": "samples"}),
    "bubble_waits": ({"bubble_waits": False},),
    "tp_once": ({"sums": 1}, {"backward_sums": False, "again_sums": False}),
    "tp_again": ({"again_sums": False},),
    "tp_microbatches": ({"tp_microbatches": False},),
    "tp_layers": ({"tp_layers": False},),
    "ring": (
        {"ring": "(p - 1) / p", "messages": "p - 1"},
        *({"ring": each} for each in ("(p - 1) / p", "2 (p - 1)", "1", "2")),
    ),
    "latency": tuple({"messages": each} for each in ("0", "1", "p - 1")),
    "bits": ({"far_bits": 1}, {"near_bits": 8}, {"far_bits": 1, "near_bits": 8}, {"far_bits": 1 / 8}),
    "links": ({"links": "by dp"}, {"links": "near"}, {"links": "far"}),
    "gradient_part": ({"gradient_part": "of the model"}, {"gradient_part": "of a stage"}),
    "gradient_bytes": ({"gradient_bytes": 4}, {"gradient_bytes": 12}, {"gradient_bytes": 1}),
}


def likely(found: float, formula: Callable[[Rules], float], *known: Mapping[str, Changes], near: float = NEAR) -> str:
    """Return the key of the mistake that gives the number, 'other' if none does."""
    for mistakes in known:
        for key, changes in mistakes.items():
            for change in changes:
                if is_near(found, formula(replace(RIGHT, **change)), near):
                    return key
    return "other"


def is_near(found: float, wanted: float, near: float = NEAR) -> bool:
    """Return True if two numbers are equal up to rounding."""
    return abs(found - wanted) <= near * abs(wanted)
