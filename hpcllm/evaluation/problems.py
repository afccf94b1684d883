"""Problems made with a seed, one a line: for training on some of them, and for measuring on others.

    copy:4        copy: k r a d = k r a d
    reverse:4     reverse: k r a d = d a r k
    sort:4        sort: k r a d = a d k r
    addition:2    addition: 47 + 85 = 132
    induction:8   induction: k r a d m o s z r = a            the letter that came after this one before
    needle:6      needle: mira has 37. tobo has 81. ... tobo has = 81      one fact among as many as the size says

The number is the size: letters, digits of an addend, distinct letters of a sequence, facts of a context.

Held out by construction: the hash of a problem decides once and for all whether it is one to train on or one to measure
on, so no seed and no number of problems makes one of them both.

    problem --BLAKE2b of its line--> 1 of HELD_OUT_OF: held out        the rest: train
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from hpcllm.errors import ConfigError
from hpcllm.evaluation.examples import Example

HELD_OUT_OF = 5
MOST_DRAWS = 100  # for each problem that is wanted, until it is said that there are too few
Part = Literal["train", "held-out"]
PARTS: tuple[Part, ...] = ("train", "held-out")
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


@dataclass(frozen=True)
class Family:
    """A kind of problems. make: draws (question, answer) of a size; sizes: least, usual and largest one."""

    make: Callable[[random.Random, int], tuple[str, str]]
    sizes: tuple[int, int, int]


def _letters(draw: random.Random, size: int) -> list[str]:
    return [draw.choice(string.ascii_lowercase) for _ in range(size)]


def _copy(draw: random.Random, size: int) -> tuple[str, str]:
    letters = " ".join(_letters(draw, size))
    return letters, letters


def _reverse(draw: random.Random, size: int) -> tuple[str, str]:
    letters = _letters(draw, size)
    return " ".join(letters), " ".join(reversed(letters))


def _sort(draw: random.Random, size: int) -> tuple[str, str]:
    letters = _letters(draw, size)
    return " ".join(letters), " ".join(sorted(letters))


def _addition(draw: random.Random, size: int) -> tuple[str, str]:
    a, b = (draw.randrange(10 ** (size - 1) if size > 1 else 0, 10**size) for _ in range(2))
    return f"{a} + {b}", str(a + b)


def _induction(draw: random.Random, size: int) -> tuple[str, str]:
    letters = draw.sample(string.ascii_lowercase, size)
    place = draw.randrange(size - 1)
    return " ".join([*letters, letters[place]]), letters[place + 1]


def _needle(draw: random.Random, size: int) -> tuple[str, str]:
    names: list[str] = []
    while len(names) < size:
        name = draw.choice(SYLLABLES) + draw.choice(SYLLABLES)
        names += [name] if name not in names else []
    numbers = [draw.randrange(10, 100) for _ in names]
    place = draw.randrange(size)
    facts = " ".join(f"{name} has {number}." for name, number in zip(names, numbers, strict=True))
    return f"{facts} {names[place]} has", str(numbers[place])


FAMILIES = {
    "copy": Family(_copy, (1, 5, 200)),
    "reverse": Family(_reverse, (1, 5, 200)),
    "sort": Family(_sort, (1, 5, 200)),
    "addition": Family(_addition, (1, 2, 50)),
    "induction": Family(_induction, (2, 12, 26)),
    "needle": Family(_needle, (1, 8, 2000)),
}


def check_size(family: str, size: int) -> None:
    """Raise ConfigError for a size that a family does not have."""
    least, _, most = FAMILIES[family].sizes
    if not least <= size <= most:
        raise ConfigError(f"{family}:{size}: problems of this family have sizes from {least} to {most}")


def problems(family: str, size: int, count: int, seed: int, part: Part = "held-out") -> list[Example]:
    """Make `count` problems, no two alike, of the part that is held out or of the other. Same arguments, same problems.

    Raises ConfigError for a size that the family does not have, and where there seem to be fewer such problems.
    """
    check_size(family, size)
    draw, found = random.Random(f"{family}:{size}:{seed}"), dict[str, Example]()
    for _ in range(MOST_DRAWS * count):
        question, answer = FAMILIES[family].make(draw, size)
        line = f"{family}: {question} ="
        if part_of(line) == part:
            found.setdefault(line, Example((line,), (f"{answer}\n",)))
        if len(found) == count:
            return list(found.values())
    valid = f"fewer, or a larger size than {size}"
    raise ConfigError(f"{family}:{size} has no {count:,} problems that are {part}, {len(found):,} at most; {valid}")


def part_of(line: str) -> Part:
    """Return the part of a problem, for any seed. line: up to its '='."""
    digest = hashlib.blake2b(line.encode(), digest_size=8).digest()
    return "held-out" if int.from_bytes(digest, "little") % HELD_OUT_OF == 0 else "train"


def lines_of(examples: list[Example]) -> Iterator[str]:
    """Yield each problem with its answer as a line of text, to train on."""
    for example in examples:
        yield "".join(example.pairs()[0])
