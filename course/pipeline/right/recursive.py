"""Recursion over what is left; the second schedule from the words of the first."""


def _go(f, b, m, most):
    if b == m:
        return []
    if f < m and f - b < most:
        return [f"F{f}", *_go(f + 1, b, m, most)]
    return [f"B{b}", *_go(f, b + 1, m, most)]


def one_f_one_b(ranks, microbatches, rank):
    return _go(0, 0, microbatches, ranks - rank)


def less_idle(ranks, microbatches, rank):
    found, waiting = [], []
    plan = one_f_one_b(ranks, microbatches, rank)
    last = max(place for place, word in enumerate(plan) if word[0] == "F")
    for place, word in enumerate(plan):
        number = int(word[1:])
        if word[0] == "F":
            found.append(word)
        else:
            found.append(f"I{number}")
            waiting.append(f"W{number}")
            if place > last or len(waiting) == rank + 1:
                found.append(waiting[0])
                del waiting[0]
    found.extend(waiting)
    return found


PREDICTIONS = {"idle": 3 / (3 + 8), "held": 8, "microbatches": 27.0}
