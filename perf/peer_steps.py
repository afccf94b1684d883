"""Steps of ours beside those of PyTorch's own parallelism and of picotron, on two ranks: one node, or slow links.

    python perf/peer_steps.py [STORE] [--place node | 1gbit] [--models tiny,30m] [--repeats 3] [--steps 12]
                              [--picotron FOLDER]

    ours                  peers                                           each rank has
    dp=2                  DDP, picotron's data parallelism                everything
    states+gradients      FSDP2, weights gathered once a step             weights, its share of the rest
    all                   FSDP2                                           its share of everything
    tp=2                  PyTorch's tensor parallelism, picotron's        its part of every layer

Over links (cluster.sh, which needs root): `all` beside FSDP2, ours with and without codecs. Layouts and sizes are those
of COMPARISONS and SIZES; embedding and head are two tables, for picotron knows no other.

Everybody trains the same: weights, samples, AdamW, clipping, one sequence a rank and step, one thread a rank. A variant
whose losses are not ours is no peer, and ends the campaign. Variants take turns, `repeats` times over, to and fro, each
time in fresh processes; of each turn the median of the steps behind the warm-up counts. Peers run twice: as found, and
with glibc told to keep memory between calls, as ours are. Ratios are the peer's time over ours in the same turn: their
median, with the least and the most of them. `alone` is one rank with its own sequence: what computing takes.
FOLDER: a copy of picotron's repository; without it, and over links, there is no such peer.

Turns are added to peer_steps.json beside this file until there are `repeats` of each, so a campaign that was cut off
goes on; remove it where code or sizes have changed. peer_steps.md is written from all that it has.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from peer_runs import CLUSTER, OF_30M, Ranks, common_keys, our_run, peer_run, prepared, ratio_text

from hpcllm.system.hardware.node import allowed_cores, busy_s
from hpcllm.system.text import counted

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "peer_steps.json"
RANKS, WARM_UP_STEPS = 2, 3
ALONE, KEPT = "alone", ", memory kept"
SIZES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {  # tokens a rank and step by place, keys of the model
    "tiny": ({"node": 128, "1gbit": 8}, {"model.tied": False}),
    "30m": ({"node": 128, "1gbit": 64}, {**OF_30M, "model.tied": False}),
}
LOSS_LIMIT, CODED_LOSS_LIMIT = 5e-4, 0.1  # nats that a step's loss may differ from that of the reference
Turn = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """A layout of ours and the peers that lay out the same training in the same way."""

    ours: str
    keys: Mapping[str, Any]
    peers: Mapping[str, str]  # hooks of plain_torch.py
    coded: bool = field(default=False, kw_only=True)  # values are rounded on their way


COMPARISONS = {
    "node": (
        Comparison("dp=2", {}, {"DDP": "fp32", "picotron, dp": "picotron-dp"}),
        Comparison("states+gradients", {"optimizer.shard": "states+gradients"}, {"FSDP2, gathered once": "fsdp-once"}),
        Comparison("all", {"optimizer.shard": "all"}, {"FSDP2": "fsdp"}),
        Comparison("tp=2", {"mesh.tp": 2}, {"PyTorch TP": "tp", "picotron, tp": "picotron-tp"}),
    ),
    "1gbit": (
        Comparison("all", {"optimizer.shard": "all"}, {"FSDP2": "fsdp"}),
        Comparison(
            "all, policy hpcllm",
            {"optimizer.shard": "all", "communication.policy": "hpcllm"},
            {"FSDP2": "fsdp"},
            coded=True,
        ),
    ),
}


def variants(place: str, picotron: bool) -> list[str]:
    """Name all that take turns, ours beside its peers; the first is the reference of losses."""
    names: list[str] = []
    for comparison in COMPARISONS[place]:
        wanted = [name for name, hook in comparison.peers.items() if picotron or not hook.startswith("picotron")]
        names += [comparison.ours, *(name + kept for name in wanted for kept in ("", KEPT))]
    return [*dict.fromkeys(names), ALONE]


def steps_of(place: str, model: str, variant: str, steps: int, store: str, picotron: str) -> list[dict[str, Any]]:
    """Run a variant once: a record a step, with step_s and loss."""
    name = variant.removesuffix(KEPT)
    ranks = Ranks(1 if name == ALONE else RANKS, place != "node", [picotron] if picotron else [])
    tokens, shape = SIZES[model]
    keys = common_keys(shape, store, tokens[place], ranks.count)
    for comparison in COMPARISONS[place]:
        if name == comparison.ours:
            return our_run(ranks, {**keys, **comparison.keys}, steps)
        if name in comparison.peers:
            return peer_run(ranks, comparison.peers[name], keys, steps, keeps_memory=name != variant)
    return peer_run(ranks, "", keys, steps, keeps_memory=True)


def a_turn(place: str, model: str, variant: str, arguments: argparse.Namespace) -> Turn:
    """Run a variant once: seconds of the steps that count, losses of all, the load of the machine."""
    cores = allowed_cores()
    start_s, busy, own = time.perf_counter(), busy_s(cores), _own_s()
    picotron = str(arguments.picotron.resolve()) if arguments.picotron else ""
    steps = steps_of(place, model, variant, arguments.steps + WARM_UP_STEPS, arguments.store, picotron)
    others = (busy_s(cores) - busy - _own_s() + own) / (len(cores) * (time.perf_counter() - start_s))
    return {
        "place": place,
        "model": model,
        "variant": variant,
        "cores": len(cores),
        "mpi": "openmpi" if place != "node" else os.environ.get("HPCLLM_MPI", "mpich"),
        "others_share": round(max(others, 0.0), 4),
        "losses": [step["loss"] for step in steps],
        "seconds": [step["step_s"] for step in steps[WARM_UP_STEPS:]],
    }


def _own_s() -> float:
    """Seconds of the cores that the runs so far have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def check_same_training(turn: Turn, turns: Sequence[Turn]) -> None:
    """End this program if a variant's losses are not those of our first turn of this place and model.

    turns: that took place before. One rank alone has another batch, and is not compared.
    """
    place, variant = turn["place"], turn["variant"]
    reference = next((t for t in turns if (t["place"], t["model"]) == (place, turn["model"])), turn)
    if variant == ALONE:
        return
    coded = any(comparison.coded and comparison.ours == variant for comparison in COMPARISONS[place])
    furthest = loss_difference(turn, reference)
    if furthest > (CODED_LOSS_LIMIT if coded else LOSS_LIMIT):
        sys.exit(
            f"{variant}, {turn['model']}: losses differ by {furthest:.2g} from those of {reference['variant']}: "
            f"{turn['losses']} and {reference['losses']}; this is other training, and its times say nothing"
        )


def loss_difference(turn: Turn, reference: Turn) -> float:
    """Return the largest difference of a step's loss, over the steps that both have made."""
    return max(abs(a - b) for a, b in zip(turn["losses"], reference["losses"], strict=False))


def missing(place: str, models: Sequence[str], names: Sequence[str], turns: Sequence[Turn], repeats: int) -> list[Any]:
    """List (model, variant) in the order in which they are to run, until there are `repeats` turns of each.

    Every other turn goes backward, so that a drift of the machine favours nobody.
    """
    done = [(turn["model"], turn["variant"]) for turn in turns if turn["place"] == place]
    every = [(model, name) for model in models for name in names]
    orders = [every[:: -1 if repeat % 2 else 1] for repeat in range(repeats)]
    return [each for repeat, order in enumerate(orders) for each in order if done.count(each) <= repeat]


def table(turns: Sequence[Turn]) -> str:
    """Make one table of the turns of one place and model: a row for each pair of ours and a peer."""
    kept: dict[str, list[Turn]] = {}
    for turn in turns:
        kept.setdefault(turn["variant"], []).append(turn)
    medians = {name: [median(turn["seconds"]) for turn in mine] for name, mine in kept.items()}
    titles = ["ours", "peer", "ours, median step, s", "least", "most", "over alone", "peer, s", "peer, memory kept, s"]
    titles += ["peer / ours", "memory kept / ours", "losses differ by"]
    rows = [f"| {' | '.join(titles)} |", f"|---|---|{'---:|' * (len(titles) - 2)}"]
    for comparison in COMPARISONS[turns[0]["place"]]:
        ours = medians.get(comparison.ours, [])
        for name in comparison.peers:
            both = [medians.get(name, []), medians.get(name + KEPT, [])]
            count = min(len(ours), *map(len, both))  # a campaign that was cut off has more of one than of another
            if not count:
                continue
            seconds = [s for turn in kept[comparison.ours] for s in turn["seconds"]]
            alone = f"{median(ours) / median(medians[ALONE]):.2f}" if ALONE in medians else ""
            cells = [comparison.ours, name, *(f"{s:.4f}" for s in (median(seconds), min(seconds), max(seconds))), alone]
            cells += [f"{median(times):.4f}" for times in both]
            cells += [ratio_text(ours[:count], times[:count]) for times in both]
            cells.append(f"{max(loss_difference(turn, turns[0]) for turn in kept[name]):.0e}")
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def page(turns: Sequence[Turn]) -> str:
    """Return all tables as Markdown."""
    parts = [
        f"Made by peer_steps.py: {RANKS} ranks of one thread. Ratios are the peer's time over ours, medians of the "
        "turns' ratios, with the least and the most. Bold: slower than the peer. `over alone`: ours over one rank "
        "that computes its own sequence and sends nothing."
    ]
    for place, model in dict.fromkeys((turn["place"], turn["model"]) for turn in turns):
        mine = [turn for turn in turns if (turn["place"], turn["model"]) == (place, model)]
        count = max(sum(turn["variant"] == name for turn in mine) for name in {turn["variant"] for turn in mine})
        where = "one node" if place == "node" else f"two hosts, links of {place}"
        head = f"### {model}, {where}: {SIZES[model][0][place]} tokens a rank and step"
        others = max(turn["others_share"] for turn in mine)
        conditions = f"{counted(count, 'turn')} of {counted(len(mine[0]['seconds']), 'step')}, {mine[0]['mpi']}, "
        conditions += f"{counted(mine[0]['cores'], 'core')}, "
        conditions += f"of which other programs took {others:.1%} at most."
        parts += [head, conditions, table(mine)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?")
    parser.add_argument("--place", choices=COMPARISONS, default="node")
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--picotron", type=Path)
    arguments = parser.parse_args()
    place, models = arguments.place, arguments.models.split(",")
    if not set(models) <= set(SIZES) or min(arguments.repeats, arguments.steps) < 1:
        parser.error(f"--models takes {', '.join(SIZES)}; --repeats and --steps 1 or more")
    turns = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    if place != "node":
        subprocess.run([*CLUSTER, "up", str(RANKS), place], check=True)
    try:
        arguments.store = prepared(arguments.store, Ranks(1, place != "node"))
        for model, variant in missing(
            place, models, variants(place, bool(arguments.picotron)), turns, arguments.repeats
        ):
            print(f"{place}, {model}: {variant}", file=sys.stderr, flush=True)
            turn = a_turn(place, model, variant, arguments)
            check_same_training(turn, turns)
            turns.append(turn)
            RESULTS.write_text(json.dumps(turns) + "\n", encoding="utf-8")
    finally:
        if place != "node":
            subprocess.run([*CLUSTER, "down"], check=True)
    text = page(turns)
    (HERE / "peer_steps.md").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
