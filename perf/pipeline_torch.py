"""1F1B on two ranks: our engine beside torch.distributed.pipelining's Schedule1F1B over gloo, and beside the ideal.

    mpiexec -n 2 python perf/pipeline_torch.py [--microbatches 4,8,16] [--repeats 9]

    stages alone     each rank runs its own stage on made-up input, both at once, no messages:  F, B, I, W
    ideal            what the schedule takes with these times if messages took none (pipeline/timing.py)
    ours, peer       one step from the first rank's start to the last one's end: forward and backward passes of all
                     microbatches, gradients added up; the same decoders, weights, tokens; no optimizer

All of it takes turns in the same two processes, `repeats` times over, one thread a rank; figures are medians, ratios
medians of each turn's ratio. Before that the gradients of all variants are compared. Writes pipeline_torch_<mpi>.md
and .json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from hpcllm.config.schema import MeshConfig, ModelConfig
from hpcllm.model.initialisation import build
from hpcllm.model.loss import cross_entropy_sum
from hpcllm.model.shapes import split_layers
from hpcllm.model.transformer import Decoder
from hpcllm.mpi.mesh import Mesh, open_mesh
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.chunk import Chunk
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.link import Link
from hpcllm.pipeline.schedules import Schedule, make_schedule
from hpcllm.pipeline.timing import Times, simulate

HERE = Path(__file__).resolve().parent
MODEL = ModelConfig(layers=8, hidden=256, heads=4, ffn=704, vocabulary=2048, max_sequence=128, tied=False)
SIZE, LENGTH = 4, 128  # sequences and tokens of a microbatch
SCALE = 1 / (SIZE * LENGTH)
OURS, PEER = ("1f1b", "zb-h1"), "Schedule1F1B, gloo"
LIMIT_S = 600.0
Step = Callable[[], object]


def samples(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(MODEL.vocabulary, (microbatches, SIZE, LENGTH + 1), generator=generator)
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def our_step(mesh: Mesh, decoder: Decoder, schedule: Schedule) -> Step:
    shape = (SIZE, LENGTH, MODEL.hidden)
    engine = Engine([Chunk(decoder)], Link(mesh, schedule.placement, shape, Waits(LIMIT_S)))
    inputs, targets = samples(schedule.microbatches)
    return lambda: engine.run(schedule, inputs, targets, SCALE)


def peer_step(mesh: Mesh, decoder: Decoder, microbatches: int) -> Step:
    stage = PipelineStage(decoder, mesh.pp.rank, mesh.pp.size, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, microbatches, loss_fn=lambda y, targets: SCALE * cross_entropy_sum(y, targets), scale_grads=False
    )
    inputs, targets = (part.flatten(0, 1) for part in samples(microbatches))
    if mesh.pp.rank == 0:
        return lambda: schedule.step(inputs, return_outputs=False)
    return lambda: schedule.step(target=targets, return_outputs=False)


def step_s(step: Step, decoder: Decoder, comm: MPI.Intracomm) -> float:
    """Seconds from the first rank's start to the last one's end, on one machine's clock. Collective over comm."""
    zero(decoder)
    meet(comm)
    start = time.perf_counter()
    step()
    extremes = np.array([-start, time.perf_counter()])
    Waits(LIMIT_S).allreduce(comm, extremes, lambda: "all ranks to end", MPI.MAX)
    return float(extremes.sum())


def stage_s(decoder: Decoder, comm: MPI.Intracomm, split: bool) -> list[float]:
    """Seconds of F and B, or of F, I and W, of this rank's stage; the other rank works on its own meanwhile."""
    chunk = Chunk(decoder)
    inputs, targets = (part[0] for part in samples(1))
    x = inputs if decoder.span.has_embedding else torch.randn(SIZE, LENGTH, MODEL.hidden)
    gradient = None if decoder.span.has_head else torch.randn(SIZE, LENGTH, MODEL.hidden)
    meet(comm)
    times = [time.perf_counter()]
    chunk.forward(0, x, targets, SCALE, split)
    times.append(time.perf_counter())
    chunk.backward(0, gradient)
    times.append(time.perf_counter())
    if split:
        chunk.weights(0, lambda _: None)
        times.append(time.perf_counter())
    return np.diff(times).tolist()


def ideal_s(schedule: Schedule, whole: np.ndarray, split: np.ndarray) -> float:
    """whole (ranks, 2): seconds of F, B; split (ranks, 3): of F, I, W."""
    if schedule.name.startswith("zb"):
        times = Times(tuple(split[:, 0]), tuple(split[:, 1] + split[:, 2]), tuple(split[:, 2]))
    else:
        times = Times(tuple(whole[:, 0]), tuple(whole[:, 1]), (0.0,) * len(whole))
    return simulate(schedule, times).makespan


def meet(comm: MPI.Intracomm) -> None:
    Waits(LIMIT_S).all([comm.Ibarrier()], lambda: "all ranks to begin")


def zero(decoder: Decoder) -> None:
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()


def check_same(steps: dict[str, Step], decoder: Decoder, comm: MPI.Intracomm) -> None:
    """All variants add up the same gradients; also their warm-up."""
    found = {}
    for name, step in steps.items():
        step_s(step, decoder, comm)
        found[name] = torch.cat([p.grad.flatten() for p in decoder.parameters()])
    first, *others = found.values()
    for name, gradient in zip(list(found)[1:], others, strict=True):
        error = float(torch.linalg.vector_norm(gradient - first) / torch.linalg.vector_norm(first))
        if error > 1e-5:
            raise SystemExit(f"rank {comm.rank}: the gradients of {name!r} differ by {error:.1e}")


def measure(mesh: Mesh, microbatches: int, repeats: int) -> list[dict[str, Any]]:
    """One record a variant. Collective over the mesh."""
    comm = mesh.pp
    decoder = build(MODEL, split_layers(MODEL, comm.size)[comm.rank], seed=1)
    schedules = {f"ours, {name}": make_schedule(name, comm.size, microbatches) for name in OURS}
    steps = {name: our_step(mesh, decoder, schedule) for name, schedule in schedules.items()}
    steps[PEER] = peer_step(mesh, decoder, microbatches)
    check_same(steps, decoder, comm)
    turns = [turn(steps, decoder, comm) for _ in range(repeats)]
    whole, split = (np.array(comm.allgather([t[key] for t in turns])).swapaxes(0, 1) for key in ("whole", "split"))
    ideals = {name: list(map(partial(ideal_s, schedule), whole, split)) for name, schedule in schedules.items()}
    ideals[PEER] = ideals["ours, 1f1b"]
    peers = [t[PEER] for t in turns]
    return [record(microbatches, name, [t[name] for t in turns], ideals[name], peers) for name in steps]


def turn(steps: dict[str, Step], decoder: Decoder, comm: MPI.Intracomm) -> dict[str, Any]:
    """Stage times and step times that were taken together, so that a drift of the machine hits them alike."""
    found: dict[str, Any] = {
        key: np.median([stage_s(decoder, comm, key == "split") for _ in range(4)], axis=0) for key in ("whole", "split")
    }
    return found | {name: step_s(step, decoder, comm) for name, step in steps.items()}


def record(
    microbatches: int, name: str, seconds: list[float], ideals: list[float], peers: list[float]
) -> dict[str, Any]:
    """Lists go by turn; a ratio is the median of the turns' ratios."""
    return {
        "microbatches": microbatches,
        "variant": name,
        "median_s": median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "all_s": seconds,
        "ideal_s": median(ideals),
        "to_ideal": median(map(truediv, seconds, ideals)),
        "to_peer": median(map(truediv, seconds, peers)),
    }


def table(records: list[dict[str, Any]]) -> str:
    titles = ["microbatches", "variant", "median step, s", "fastest", "slowest", "ideal", "to ideal", "to the peer"]
    rows = [f"| {' | '.join(titles)} |", f"|---:|---|{'---:|' * 6}"]
    for r in records:
        times = " | ".join(f"{r[key]:.4f}" for key in ("median_s", "min_s", "max_s", "ideal_s"))
        rows.append(f"| {r['microbatches']} | {r['variant']} | {times} | {r['to_ideal']:.3f} | {r['to_peer']:.3f} |")
    return "\n".join(rows)


def open_gloo(world: MPI.Intracomm) -> None:
    """The peer's own way for its ranks to meet, through a file."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=world.rank, world_size=world.size)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    world = MPI.COMM_WORLD
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=numbers, default=[4, 8, 16])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    if world.size != 2:
        parser.error(f"the job has {world.size} ranks; valid: 2")
    torch.set_num_threads(1)
    open_gloo(world)
    with open_mesh(world, MeshConfig(pp=world.size)) as mesh:
        records = [r for m in arguments.microbatches for r in measure(mesh, m, arguments.repeats)]
    if world.rank == 0:
        library = " ".join(MPI.Get_library_version().replace(",", "").split()[:3])
        head = f"Made by pipeline_torch.py: 2 ranks of one thread, {os.cpu_count()} cores, {library}, PyTorch "
        head += f"{torch.__version__}, median of {arguments.repeats}."
        text = f"{head}\n\n{table(records)}\n"
        name = f"pipeline_torch_{'openmpi' if 'Open MPI' in library else 'mpich'}"
        (HERE / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        (HERE / f"{name}.md").write_text(text, encoding="utf-8")
        print(text, end="", flush=True)
    world.Barrier()
    MPI.Finalize()
    os._exit(0)  # gloo's own end hangs now and then, where one rank is gone before the other


if __name__ == "__main__":
    main()
