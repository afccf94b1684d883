"""Each word gets the time at which it should start; sorting by it gives the order."""


def one_f_one_b(ranks, microbatches, rank):
    back = ranks - rank
    keys = []
    for m in range(microbatches):
        keys.append((max(m - back, -1) + (0.25 if m >= back else 0), 0 if m < back else 1, m, f"F{m}"))
        keys.append((m, 0, m, f"B{m}"))
    return [key[-1] for key in sorted(keys)]


def less_idle(ranks, microbatches, rank):
    out = []
    weights = iter(range(microbatches))
    done = 0
    order = one_f_one_b(ranks, microbatches, rank)
    for word in order:
        if word.startswith("F"):
            out += [word]
        else:
            k = int(word[1:])
            out += ["I" + str(k)]
            drained = f"F{microbatches - 1}" in out
            if k - done >= rank or drained:
                out += ["W" + str(next(weights))]
                done += 1
    return out + [f"W{k}" for k in weights]


PREDICTIONS = {"idle": 0.273, "held": 8, "microbatches": 27}
