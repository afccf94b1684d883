"""First lines of the page of a run: what ran, how far it came, its losses and speed, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcllm.report.facts import large, mesh_text, settled, short, time_text
from hpcllm.report.page import Block, Text, Tiles
from hpcllm.report.run_folder import Run, number
from hpcllm.system.text import counted, percent
from hpcllm.training.step_timer import BETWEEN

WORDS = {  # of the parts of a step, in a sentence
    "compute": "computing",
    "optimizer": "clipping and updating",
    "communication": "waiting for messages",
    "bubble": "idle by the schedule (the bubble)",
    "input": "reading samples",
    "other": "agreeing and the rest of a step",
    "between": "logs, traces and hashes",
    "checkpoint": "checkpoints",
    "validation": "validation",
}
LEAST_NAMED = 0.03  # share of the time of a part that the sentence names


def headline(run: Run, facts: Mapping[str, Any]) -> list[Block]:
    """Lead of the page: sentences, and the numbers that are asked for first. facts: of the run."""
    tiles = Tiles(_tiles(facts))
    words = where_the_time_went(run, facts)
    told: list[Block] = [Text(what_ran(run, facts)), Text(how_far(facts))]
    return [*told, *([tiles] if tiles.rows else []), *([Text(words)] if words else [])]


def what_ran(run: Run, facts: Mapping[str, Any]) -> str:
    """'1.32 M parameters (tiny) on stdlib.h5; 2 ranks (dp=1 pp=2 tp=1) on 1 node, AMD EPYC.'"""
    model = run.key("run", "start_from") or run.key("model", "preset")
    found = f"{large(facts['parameters'])} parameters" if "parameters" in facts else "A model"
    found += f" ({model})" if model else ""
    store = run.key("data", "store")
    found += f" on {Path(store).name}" if isinstance(store, str) and store else ""
    kind = run.key("finetuning", "kind")
    found += f", {kind} fine-tuning" if kind in ("supervised", "dpo", "grpo") else ""
    if "ranks" in facts:
        mesh = f" ({mesh_text(facts['mesh'])})" if "mesh" in facts else ""
        nodes = f" on {counted(facts['nodes'], 'node')}" if "nodes" in facts else ""
        found += f"; {counted(facts['ranks'], 'rank')}{mesh}{nodes}"
    where = [str(place) for place in (run.key("run", "machine"), facts.get("device_name")) if place]
    return f"{', '.join([found, *where])}."


def how_far(facts: Mapping[str, Any]) -> str:
    """'Finished: 60 of 60 steps. 246 k tokens in 2.3 minutes.'"""
    tokens = f" {large(facts['tokens'])} tokens" if facts.get("tokens") else ""
    hours = f" in {time_text(facts['hours'])}" if tokens and "hours" in facts else ""
    return f"{facts['state'][:1].upper()}{facts['state'][1:]}.{tokens}{hours}{'.' if tokens else ''}"


def _tiles(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(label, value, what stands below it) of what is known."""
    found = []
    if "loss" in facts:
        found.append(("training loss", f"{facts['loss']:.4f}", f"{facts['loss_unit']}, last logged"))
    if "validation_loss" in facts:
        below = f"{facts['bits_per_byte']:.3f} bits a byte" if "bits_per_byte" in facts else facts["loss_unit"]
        if "validation_reward" in facts:
            found.append(("held-out reward", f"{facts['validation_reward']:.4f}", "of the likeliest texts, last"))
        found.append(("held-out loss", f"{facts['validation_loss']:.4f}", below))
    if "validation_accuracy" in facts:
        found.append(("accuracy", percent(facts["validation_accuracy"], 0), "of held-out pairs: chosen preferred"))
    if "median_tokens_per_s" in facts:
        below = f"{short(facts['median_step_s'])} s a step, median" if "median_step_s" in facts else "median"
        found.append(("tokens/s", short(facts["median_tokens_per_s"]), below))
    if "median_mfu" in facts:
        found.append(
            ("MFU", percent(facts["median_mfu"]), f"{short(facts['median_tflops_per_device'])} TFLOP/s a rank")
        )
    if "time" in facts and (share := _shares(facts["time"]).get("compute")):
        found.append(("time spent computing", percent(share, 0), "the rest: below"))
    return found


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {part: time_s / total for part, time_s in parts.items()} if total > 0 else {}


def where_the_time_went(run: Run, facts: Mapping[str, Any]) -> str:
    """One or two sentences; "" if the log does not say."""
    shares = _shares(facts.get("time", {}))
    if not shares:
        return ""
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    named = [(part, share) for k, (part, share) in enumerate(ranked) if share >= LEAST_NAMED or not k]
    words = [f"{percent(share, 0)} {WORDS[part]}" for part, share in named]
    rest = 1 - sum(share for _, share in named)
    words += [f"{percent(rest, 0)} all else"] if rest >= 0.005 else []
    told = f"Where the time went: {', '.join(words)}."
    first = run.history.steps[:1]
    if first and len(settled(run.history)) < len(run.history.steps):
        step_s = sum(number(first[0].get(key, 0)) for key in ("step_s", *(f"time_{part}_s" for part in BETWEEN)))
        told += f" The first logged steps of a start are left out: there libraries load ({short(step_s)} s a step)."
    elif first:
        told += " That is the start-up, in which libraries load: no later step has been logged."
    return told
