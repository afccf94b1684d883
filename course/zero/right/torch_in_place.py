"""Torch tensors by hand: lerp_, addcmul_, addcdiv_."""

import torch
from mpi4py import MPI


def _parts(n, comm):
    return [len(p) for p in torch.arange(n).tensor_split(comm.size)]


def own_range(n, comm):
    parts = _parts(n, comm)
    return sum(parts[: comm.rank]), sum(parts[: comm.rank + 1])


def new_state(n, comm):
    length = _parts(n, comm)[comm.rank]
    return {name: torch.zeros(length).numpy() for name in ("exp_avg", "exp_avg_sq")}


def update(parameters, gradients, state, step, config, comm):
    parts = _parts(parameters.size, comm)
    start, end = own_range(parameters.size, comm)
    g = torch.empty(end - start)
    comm.Ireduce_scatter(gradients, g.numpy(), parts).Wait()
    g.div_(comm.size)
    squares = g.square().sum(dtype=torch.float64).reshape(1)
    comm.Iallreduce(MPI.IN_PLACE, squares.numpy()).Wait()
    norm = squares.sqrt().item()
    g.mul_(min(1.0, config.clip_norm / (norm + 1e-12)))
    m, v = torch.from_numpy(state["exp_avg"]), torch.from_numpy(state["exp_avg_sq"])
    m.lerp_(g, 1 - config.beta1)
    v.mul_(config.beta2).addcmul_(g, g, value=1 - config.beta2)
    own = torch.from_numpy(parameters)[start:end]
    own.mul_(1 - config.learning_rate * config.weight_decay)
    denominator = (v.sqrt() / (1 - config.beta2**step) ** 0.5).add_(config.epsilon)
    own.addcdiv_(m, denominator, value=-config.learning_rate / (1 - config.beta1**step))
    comm.Iallgatherv(MPI.IN_PLACE, [parameters, parts]).Wait()


PREDICTIONS = {"state_bytes": 2_000_000, "all_bytes": 1.0e7, "sent_bytes": 6_000_000}
