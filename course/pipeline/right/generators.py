"""Generators that are alternated; the second schedule is made from the first by dividing and delaying."""

import itertools


def _alternate(ranks, microbatches, rank):
    forwards = (("F", m) for m in range(microbatches))
    backwards = (("B", m) for m in range(microbatches))
    yield from itertools.islice(forwards, ranks - 1 - rank)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


def one_f_one_b(ranks, microbatches, rank):
    return [f"{op}{m}" for op, m in _alternate(ranks, microbatches, rank)]


def less_idle(ranks, microbatches, rank):
    words, late = [], []
    started = 0
    for op, m in _alternate(ranks, microbatches, rank):
        if op == "F":
            words.append(f"F{m}")
            started += 1
            continue
        words.append(f"I{m}")
        late.append(f"W{m}")
        if len(late) > rank or started == microbatches:
            words.append(late.pop(0))
    return words + late


PREDICTIONS = {"idle": 3 / (8 + 3), "held": 8, "microbatches": 27}
