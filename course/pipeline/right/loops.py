"""1F1B by counting down; W put off by as many microbatches as the rank's number."""


def one_f_one_b(ranks, microbatches, rank):
    warmup = min(ranks - 1 - rank, microbatches)
    words = [f"F{m}" for m in range(warmup)]
    for m in range(warmup, microbatches):
        words += [f"F{m}", f"B{m - warmup}"]
    return words + [f"B{m}" for m in range(microbatches - warmup, microbatches)]


def less_idle(ranks, microbatches, rank):
    warmup = min(ranks - 1 - rank, microbatches)
    words = [f"F{m}" for m in range(warmup)]
    done = 0
    for m in range(warmup, microbatches):
        words += [f"F{m}", f"I{m - warmup}"]
        if m - warmup >= rank:
            words.append(f"W{done}")
            done += 1
    for m in range(microbatches - warmup, microbatches):
        words += [f"I{m}", f"W{done}"]
        done += 1
    return words + [f"W{m}" for m in range(done, microbatches)]


PREDICTIONS = {"idle": 3 / 11, "held": 8, "microbatches": 27}
