"""Both schedules from one rule: which pass comes next, given what is done."""

from collections import deque


def one_f_one_b(ranks, microbatches, rank):
    forward, backward, words = deque(range(microbatches)), deque(), []
    most = ranks - rank
    while forward or backward:
        if forward and len(backward) < most:
            backward.append(forward.popleft())
            words.append(f"F{backward[-1]}")
        else:
            words.append(f"B{backward.popleft()}")
    return words


def less_idle(ranks, microbatches, rank):
    forward, inputs, weights, words = deque(range(microbatches)), deque(), deque(), []
    most = ranks - rank
    while forward or inputs or weights:
        if forward and len(inputs) < most:
            inputs.append(forward.popleft())
            words.append(f"F{inputs[-1]}")
        elif inputs:
            weights.append(inputs.popleft())
            words.append(f"I{weights[-1]}")
            if len(weights) > rank or not forward:
                words.append(f"W{weights.popleft()}")
        else:
            words.append(f"W{weights.popleft()}")
    return words


PREDICTIONS = {"idle": 0.27, "held": 8.0, "microbatches": 27}
