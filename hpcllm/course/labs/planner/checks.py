"""Checks of lab 8: formulas beside our models and planner, then beside runs of this machine and of others.

laws        laws.py: sizes, FLOPs, memory, nothing gets worse by more, seconds; search.py: the best layout
races       measured.py: steps of a small run on 2 ranks; published.py: steps of published runs, and their order
numbers     one step of GPT with 175 billion parameters on 384 devices, by hand
"""

from __future__ import annotations

from hpcllm.course.lab import Lab, Law, Prediction, Race, Trial
from hpcllm.course.labs.planner import laws, measured, ours, published, search
from hpcllm.course.labs.planner.given import Layout, Machine, Model
from hpcllm.course.labs.planner.hints import HINTS

REFERENCE = ours
GIVEN_MODEL = Model(layers=96, hidden=12288, heads=96, ffn=49152, vocabulary=51200, sequence=2048)
GIVEN_LAYOUT = Layout(dp=4, tp=8, pp=12, micro_batch=1, recompute=True, shard=True)
GIVEN_BATCH = 1536
GIVEN_MACHINE = Machine(
    peak_flops_per_s=312e12, efficiency=0.6, memory_bytes=80e9, node=8, latency_s=0.0, near_bytes_per_s=240e9,
    far_bits_per_s=200e9,
)  # fmt: skip


def parameters_billion(_: Trial) -> float:
    """Count the parameters of the given model."""
    return ours.parameters(GIVEN_MODEL) / 1e9


def memory_gb(_: Trial) -> float:
    """Count the bytes of a device of its first stage."""
    return sum(ours.memory_bytes(GIVEN_MODEL, GIVEN_LAYOUT, GIVEN_BATCH).values()) / 1e9


def step_s(_: Trial) -> float:
    """Count the seconds of its step."""
    return ours.step_seconds(GIVEN_MODEL, GIVEN_LAYOUT, GIVEN_MACHINE, GIVEN_BATCH)


ALONE = (1,)
WIDE = ((1.15, 1.0), (1.3, 0.5))  # of a median error
LAB = Lab(
    number=8,
    name="planner",
    title="time and memory by hand",
    functions=("parameters", "flops", "memory_bytes", "step_seconds", "sustained_efficiency", "best_layout"),
    laws=(
        Law("parameters", "all parameters of a model, as many as ours", 5, laws.model_cases, laws.check_sizes, ALONE),
        Law("FLOPs", "FLOPs of a step, as our trainer counts them", 5, laws.model_cases, laws.check_flops, ALONE),
        Law("memory", "bytes of a device, kind by kind", 15, laws.memory_cases, laws.check_memory, ALONE),
        Law("no worse", "faster is no slower, more sharding takes no more memory", 5, laws.layout_cases,
            laws.check_never_worse, ALONE),
        Law("time", "seconds of a step: work, sums, bubble", 20, laws.layout_cases, laws.check_time, ALONE),
        Law("efficiency", "a measured step gives the efficiency back", 5, laws.layout_cases,
            laws.check_efficiency, ALONE),
        Law("best layout", "no layout that fits is faster by your own formulas", 10, search.cases, search.check_best,
            ALONE, limit_s=15.0),
    ),
    races=(
        Race("this machine", "steps of a small run on 2 ranks; one layout calibrates", 8, measured.race,
             ((1.6, 1.0), (2.5, 0.5)), hint="far_off", x_label="layout", against="measured", both_ways=True,
             native_label="", limit_s=120.0),
        Race("published runs", "steps of BLOOM, LLaMA, GPT; one of each calibrates", 8, published.times_race, WIDE,
             hint="far_off", x_label="measured seconds", against="measured", both_ways=True,
             native_label="hpcllm plan"),
        Race("their order", "2 - rank correlation of LLaMA's layouts", 4, published.order_race,
             ((1.3, 1.0), (1.6, 0.5)), hint="far_off", x_label="rows", unit="2 - correlation",
             against="measured", both_ways=True, native_label="hpcllm plan"),
    ),
    predictions=(
        Prediction("billions", "billions of parameters of the sheet's GPT", 5, parameters_billion, within=1.005),
        Prediction("gigabytes", "GB of a device of its first stage", 5, memory_gb, within=1.03),
        Prediction("seconds", "seconds of its step", 5, step_s, within=1.03),
    ),
    hints=HINTS,
)  # fmt: skip
