"""Who waits for whom, once a job stands still: from what each rank says of its waits to the one that holds all up.

    rank 0 waits for rank 1  --> rank 1 waits for rank 2  --> rank 2 says nothing     rank 2 holds up ranks 0, 1
    rank 3 waits for ranks 0-3, as ranks 4-7 do                                       and ranks 3-7

A rank that is stopped, dead or lost in a computation says nothing, so the search starts from the silent ones. Ranks in
the same wait, a collective that all have entered, do not wait for each other. Pure: made-up jobs of any size test it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpcllm.ranks import name_ranks, named_ranks, without_ranks

MOST_LINES = 12  # of each table: a report is one screen, however many ranks there are
MOST_RUNS = 4  # of ranks, in one place


@dataclass(frozen=True)
class Waiting:
    """One wait of one rank; a rank may wait in two threads."""

    rank: int
    waited_s: float
    what: str  # names whom it waits for, see ranks.py


@dataclass(frozen=True)
class Knot:
    """The ranks that wait for the same, in the same words."""

    members: frozenset[int]
    awaited: frozenset[int]  # none of the members


@dataclass(frozen=True)
class Silent:
    """Ranks that say nothing and hold up the same others."""

    ranks: tuple[int, ...]
    held_up: Mapping[int, int]  # who waits for them -> over how many waits

    def name(self, describe: Callable[[int], str]) -> str:
        where = describe(self.ranks[0]) if len(self.ranks) == 1 else ""
        return name_ranks(self.ranks, MOST_RUNS) + (f" ({where})" if where else "")


def report(waits: Sequence[Waiting], ranks: int, describe: Callable[[int], str] = lambda _: "") -> str:
    """What rank 0 says of a job of that many ranks in which nothing moves: a verdict, then two short tables.

    describe: rank -> where it stands, as 'dp 1, stage 2, on node7'.
    """
    knots = _knots(waits)
    silent = _silent(knots, set(range(ranks)) - {wait.rank for wait in waits})
    culprits = [group for group in silent if group.held_up]
    longest_s = max((wait.waited_s for wait in waits), default=0.0)
    verdict = _verdict(culprits[0], describe) if culprits else _without_culprit(knots)
    lines = [f"nothing has moved for {longest_s:.0f} s: {verdict}"]
    if culprits:
        lines += ["  not heard from:", *_cut([_silent_line(group, describe) for group in culprits])]
    lines += [f"  not heard from, and nobody waits for them: {g.name(describe)}" for g in silent if not g.held_up]
    lines += ["  who waits, for how long, for what:", *_cut(_waiting_lines(waits))]
    if culprits:
        lines.append(
            "  Who is not heard from is stopped, dead, or computes all the time. If it is slow, raise limits.stall_s"
        )
    return "\n".join(lines)


def _silent(knots: Sequence[Knot], ranks: Iterable[int]) -> list[Silent]:
    """Those that hold up most ranks first."""
    awaiting: dict[int, list[Knot]] = {}  # rank -> who waits for it
    for knot in knots:
        for rank in knot.awaited:
            awaiting.setdefault(rank, []).append(knot)
    groups: dict[tuple[int, ...], list[int]] = {}  # by what holds for all of a group: which knots wait for them
    for rank in sorted(ranks):
        groups.setdefault(tuple(id(knot) for knot in awaiting.get(rank, [])), []).append(rank)
    found = [Silent(tuple(members), _held_up(members[0], awaiting)) for members in groups.values()]
    return sorted(found, key=lambda group: (-len(group.held_up), group.ranks))


def _knots(waits: Iterable[Waiting]) -> list[Knot]:
    members: dict[str, set[int]] = {}
    for wait in waits:
        members.setdefault(wait.what, set()).add(wait.rank)
    return [Knot(frozenset(ranks), named_ranks(what) - ranks) for what, ranks in members.items()]


def _held_up(rank: int, awaiting: Mapping[int, Sequence[Knot]]) -> dict[int, int]:
    """Who waits for a rank -> 1 if for the rank itself, 2 if for one that does, and so on."""
    distance: dict[int, int] = {}
    done: set[int] = set()
    reached, step = {rank}, 0
    while reached:
        nearest = {id(knot): knot for one in reached for knot in awaiting.get(one, []) if id(knot) not in done}
        done |= nearest.keys()
        step += 1
        reached = {member for knot in nearest.values() for member in knot.members} - distance.keys()
        distance |= dict.fromkeys(reached, step)
    return distance


def _verdict(worst: Silent, describe: Callable[[int], str]) -> str:
    several, others = len(worst.ranks) > 1, len(worst.held_up)
    answered = "have not answered" if several else "has not answered"
    wait = f"{others} ranks wait" if others > 1 else "1 rank waits"
    through = ", directly or through others" if max(worst.held_up.values()) > 1 else ""
    return f"{worst.name(describe)} {answered}; {wait} for {'them' if several else 'it'}{through}"


def _without_culprit(knots: Sequence[Knot]) -> str:
    """Every rank that is waited for has answered."""
    circle = _circle(knots)
    if circle:
        steps = " waits for ".join(f"rank {rank}" for rank in [*circle, circle[0]])
        return f"ranks wait in a circle: {steps}. That is a defect of the program"
    return "every rank that others wait for waits itself, but not for them: a message was lost, or went elsewhere"


def _circle(knots: Sequence[Knot]) -> list[int]:
    """Ranks of which each waits for the next and the last for the first; empty: there is no circle."""
    awaited: dict[int, frozenset[int]] = {}
    for knot in knots:
        awaited |= {rank: awaited.get(rank, frozenset()) | knot.awaited for rank in knot.members}
    ends: set[int] = set()  # whose waits lead nowhere
    path: list[int] = []
    for start in awaited:
        path = [start] if start not in ends else []
        while path:
            following = sorted(awaited.get(path[-1], frozenset()) - ends)
            if not following:
                ends.add(path.pop())
            elif following[0] in path:
                return path[path.index(following[0]) :]
            else:
                path.append(following[0])
    return path


def _silent_line(group: Silent, describe: Callable[[int], str]) -> str:
    direct = [rank for rank, distance in group.held_up.items() if distance == 1]
    through = [rank for rank, distance in group.held_up.items() if distance > 1]
    rest = f", through them by {name_ranks(through, MOST_RUNS)}" if through else ""
    return f"    {group.name(describe)}: awaited by {name_ranks(direct, MOST_RUNS)}{rest}"


def _waiting_lines(waits: Iterable[Waiting]) -> list[str]:
    """Waits of one kind in a line, the longest wait first."""
    kinds: dict[str, list[Waiting]] = {}
    for wait in waits:
        kinds.setdefault(_kind(wait.what), []).append(wait)
    ordered = sorted(kinds.values(), key=lambda kind: -max(wait.waited_s for wait in kind))
    return [_kind_line(kind) for kind in ordered]


def _kind_line(kind: Sequence[Waiting]) -> str:
    who = name_ranks((wait.rank for wait in kind), MOST_RUNS)
    texts = {wait.what for wait in kind}
    what = texts.pop() if len(texts) == 1 else _kind(kind[0].what)
    return f"    {max(wait.waited_s for wait in kind):6.1f} s  {who}: {what}"


def _kind(what: str) -> str:
    """The same for the same wait of several ranks."""
    return re.sub(r"[\d.]+ s ago", "* s ago", without_ranks(what))


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"    ... and {more} more lines like these"]
