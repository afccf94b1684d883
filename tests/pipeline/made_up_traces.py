"""Steps that nobody measured, as a trace's JSON: any durations, entries, delays of messages, work between actions."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from hpcllm.pipeline.clock import compute_needs, walk
from hpcllm.pipeline.measured import FIRST_ID
from hpcllm.pipeline.schedules import Schedule, make_schedule


@dataclass
class Disturbance:
    """Seconds; each random number is from 0 to its bound."""

    jitter: float = 0.0
    entry: float = 0.0
    delay: float = 0.0
    gap: float = 0.0
    stages: dict[int, float] = field(default_factory=dict)  # virtual stage -> seconds more for each action


def happened(schedule: Schedule, disturbance: Disturbance, seed: int) -> tuple[list[list], list[list]]:
    """(actions with start and end, waits) of each rank: whole microseconds, as seconds."""
    dice, place = random.Random(seed), schedule.placement

    def some(bound: float) -> float:
        return round(dice.uniform(0, bound), 6)

    free = [some(disturbance.entry) for _ in range(place.ranks)]
    rows, waits = [[] for _ in free], [[] for _ in free]
    ends = {}
    work = schedule.work()
    for rank, action, need in walk(work, compute_needs(place, work)):
        ready = ends[need] + (some(disturbance.delay) if need[0] != rank else 0) if need else 0.0
        begin = free[rank] + some(disturbance.gap)
        if ready > begin:
            waits[rank].append((f"the input of {action}", begin, ready))
        start = max(begin, ready)
        length = 0.01 + some(disturbance.jitter) + disturbance.stages.get(place.stage(rank, action.chunk), 0)
        free[rank] = ends[rank, action] = start + length
        rows[rank].append((action, start, free[rank]))
    return rows, waits


def trace(schedule: Schedule, rows, waits, replica: int = 0, later_s: float = 1000.0) -> dict:
    """As a run writes it."""

    def event(category, rank, name, start, end):
        times = {"ts": 1e6 * (start + later_s), "dur": 1e6 * (end - start)}
        return {
            "name": str(name),
            "cat": category,
            "ph": "X",
            **times,
            "pid": FIRST_ID + replica,
            "tid": FIRST_ID + rank,
        }

    events = [
        {"name": "thread_name", "ph": "M", "pid": FIRST_ID + replica, "tid": FIRST_ID, "args": {"name": "stage 0"}}
    ]
    for category, all_rows in (("compute", rows), ("wait", waits)):
        events += [event(category, rank, *told) for rank, row in enumerate(all_rows) for told in row]
    place = schedule.placement
    about = {"schedule": schedule.name, "ranks": place.ranks, "chunks": place.chunks, "placement": place.kind}
    about |= {"microbatches": schedule.microbatches, "step": 10, "clock_error_us": 3.5}
    about |= {"actions": [[str(action) for action in row] for row in schedule.actions]}
    return {"traceEvents": events, "otherData": about}


def made_up(name="1f1b", ranks=3, microbatches=5, seed=0, **disturbance) -> dict:
    schedule = make_schedule(name, ranks, microbatches)
    return trace(schedule, *happened(schedule, Disturbance(**disturbance), seed))


def as_text(trace: dict) -> str:
    return json.dumps(trace)
