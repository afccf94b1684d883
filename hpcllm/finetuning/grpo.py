"""Learning from rewards: group relative policy optimization (GRPO), on the ranks and layout of the run.

    step    prompts -- rollouts.py --> samples of each -- the function --> rewards -- policy_loss.py --> losses
            forward and backward pass, as of any batch: a text a row, its prompt no target

A step is one update by texts that its own weights have written. The reference are the weights that the run began with;
where the loss wants them, a second copy of what is trained (with adapters, that is little) takes the place of the
weights for a forward pass. The state of a run is its position alone: texts follow from it and from the weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from hpcllm.collectives import broadcast
from hpcllm.config.schema import Config, RewardConfig
from hpcllm.data.loader import Batch, samples_hash
from hpcllm.data.sampler import Sampler
from hpcllm.data.store import TokenStore
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import RewardError
from hpcllm.evaluation.held_out import Validation
from hpcllm.finetuning.policy_loss import FIGURES, Keep, PolicyLoss, advantages
from hpcllm.finetuning.reward_process import Scored
from hpcllm.finetuning.rollouts import LIKELIEST, Prompt, Rollout, generate, held_out_prompts, training_prompts
from hpcllm.model.loss import IGNORED, Criterion
from hpcllm.model.sampling import seed_of
from hpcllm.mpi.collective_errors import on_root, raise_if_any_failed
from hpcllm.mpi.wait import together
from hpcllm.pipeline.schedules import forward_only
from hpcllm.training.resume import read_start

if TYPE_CHECKING:
    from hpcllm.mpi.mesh import Mesh
    from hpcllm.training.log import Record
    from hpcllm.training.setup import RunContext

SHOWN_TEXTS = 3  # of a logged step
ScoreTexts = Callable[[RewardConfig, Sequence[Scored]], list[float]]


@dataclass
class Grpo:
    """GRPO as an Objective, and as the loader of a run whose samples it makes (loader.Samples)."""

    settings: RewardConfig
    score: ScoreTexts
    kinds: tuple[str, ...] = ("grpo",)
    figures: tuple[str, ...] = FIGURES
    is_per_sample: bool = False
    input_s: float = 0.0
    counted: tuple[int, int] = (-1, 0)
    ahead: None = None
    _run: RunContext | None = None
    _encoder: Encoder | None = None
    _prompts: list[Prompt] = field(default_factory=list)
    _held_out: list[Prompt] = field(default_factory=list)
    _reference: dict[str, Tensor] = field(default_factory=dict)  # trained weights as they were at the beginning
    _criteria: list[PolicyLoss] = field(default_factory=list)  # of the batch that was taken last
    _texts: list[dict[str, str | float]] = field(default_factory=list)  # of it, to be shown
    _spent_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))  # generating, rewarding: since facts()
    _largest: list[Tensor] = field(default_factory=list)  # differences, since facts()

    def open_samples(self, config: Config, mesh: Mesh, store: TokenStore, device: torch.device) -> Grpo:  # noqa: ARG002
        """Read and check the prompts. Collective over the mesh. Raises UserError."""
        self._prompts = _shared(mesh.world, lambda: training_prompts(config, store))
        self._held_out = _shared(mesh.world, lambda: held_out_prompts(config, store))
        self._encoder = Encoder(store.tokenizer_json)
        return self

    def begin(self, run: RunContext) -> None:
        """Check the function of rewards; keep the reference, if it is wanted. Collective over the mesh."""
        self._run = run
        self._scores(run, [])
        if self.settings.kl:
            read_start(run)
            self._reference = {name: p.detach().clone() for name, p in run.parameters.items()}

    def take(self, position: int) -> Batch:
        """Write the texts of a step and reward them. Collective over the mesh. Raises RewardError, StallError."""
        run, began_s = self._here, time.perf_counter()
        assert self._encoder
        dealt, seeds = self._dealt(position)
        rollouts = generate(run, self._encoder, dealt, seeds)
        generated_s = time.perf_counter()
        rewards = self._scores(run, rollouts)
        self._spent_s += generated_s - began_s, time.perf_counter() - generated_s
        self._texts = [
            {"prompt": each.prompt.text, "text": each.text, "reward": reward}
            for each, reward in zip(rollouts[:SHOWN_TEXTS], rewards.tolist(), strict=False)
        ]
        batch = self._lay_out(position, rollouts)
        total = np.array([float(batch.counted)])
        run.control.allreduce(run.mesh.world, total, lambda: "all ranks to count the tokens of a step's texts")
        self.counted = position, int(total[0]) // (run.mesh.pp.size * run.mesh.tp.size)
        self._criteria = self._losses(batch, rollouts, rewards)
        self.input_s += time.perf_counter() - began_s
        return batch

    def read_ahead(self, position: int) -> None:
        """Do nothing: the next texts are written with the next weights."""

    def criteria(self, run: RunContext, numbers: Sequence[int | None]) -> Sequence[Criterion]:  # noqa: ARG002
        """Return the loss of each microbatch of the batch that was taken last."""
        return self._criteria

    def facts(self, run: RunContext) -> Record:
        """Return seconds, the largest difference between sampler and training, and some texts."""
        # elsewhere nothing was drawn to compare with
        worst = max((value.item() for value in self._largest if run.mesh.tp.rank == 0), default=0.0)
        most = np.array([*self._spent_s, worst])
        run.control.allreduce(run.mesh.world, most, lambda: "what generating texts has taken", MPI.MAX)
        self._spent_s, self._largest = np.zeros(2), []
        generation_s, rewards_s, difference = most.tolist()
        return {
            "generation_s": generation_s,
            "rewards_s": rewards_s,
            "sampler_difference_most": difference,
            "texts": self._texts,
        }

    def validate(self, run: RunContext) -> Validation | None:
        """Reward the likeliest text of each held-out prompt. Collective over the mesh."""
        if not self._held_out:
            return None
        assert self._encoder
        replicas = run.mesh.dp.size
        dealt = [self._held_out[replica::replicas] for replica in range(replicas)]
        rollouts = generate(run, self._encoder, dealt, [[0] * len(part) for part in dealt], LIKELIEST)
        rewards = self._scores(run, rollouts)
        sums = np.array([rewards.sum(), sum(len(each.tokens) for each in rollouts)], np.float64)
        run.control.allreduce(run.mesh.world, sums, lambda: "the rewards of held-out prompts of all ranks")
        reward, length = (sums / run.mesh.world.size * replicas / len(self._held_out)).tolist()
        return Validation(-reward, len(self._held_out), figures={"reward": reward, "length": length})

    @property
    def _here(self) -> RunContext:
        assert self._run, "begin comes first"
        return self._run

    def _dealt(self, position: int) -> tuple[list[list[Prompt]], list[list[int]]]:
        """Return the prompts of each replica in a batch, each as often as it has samples, and their seeds."""
        config, samples = self._here.config, self.settings.samples
        first, share = position // samples, config.data.global_batch // config.mesh.dp // samples
        sampler = Sampler(len(self._prompts), config.run.seed)
        dealt: list[list[Prompt]] = []
        seeds: list[list[int]] = []
        for replica in range(config.mesh.dp):
            numbers = range(first + replica * share, first + (replica + 1) * share)
            dealt.append([self._prompts[sampler.index(n)] for n in numbers for _ in range(samples)])
            seeds.append([seed_of(config.run.seed, n, sample) for n in numbers for sample in range(samples)])
        return dealt, seeds

    def _scores(self, run: RunContext, rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
        """(texts,) float64: rewards, by the first rank of each replica, for all of its ranks. Collective."""
        mesh, found, error = run.mesh, np.zeros(len(rollouts)), None
        if mesh.pp.rank == mesh.tp.rank == 0:
            rows = [Scored(each.prompt.text, each.text, each.prompt.answer) for each in rollouts]
            try:
                found[:] = self.score(self.settings, rows)
            except RewardError as failure:
                error = failure
        raise_if_any_failed(mesh.world, error)
        for comm in (mesh.tp, mesh.pp) if rollouts else ():
            broadcast(found, comm, 0)
        return found

    def _lay_out(self, position: int, rollouts: Sequence[Rollout]) -> Batch:
        """Lay out the texts, one a row: all that comes before a token is its input, tokens of the prompt no targets."""
        run = self._here
        data, microbatches = run.config.data, run.config.pipeline.microbatches
        planes = np.zeros((2, len(rollouts), data.sequence_length), np.int64)
        planes[1] = IGNORED
        for row, each in enumerate(rollouts):
            prompt, whole = len(each.prompt.tokens), [*each.prompt.tokens, *each.tokens]
            planes[0, row, : len(whole) - 1] = whole[:-1]
            planes[1, row, prompt - 1 : len(whole) - 1] = each.tokens
        first = position + run.mesh.dp.rank * len(rollouts)
        seen = samples_hash(np.ascontiguousarray(planes.swapaxes(0, 1)), first)
        inputs, targets = torch.from_numpy(planes).to(run.device).view(2, microbatches, -1, data.sequence_length)
        counted = sum(len(each.tokens) for each in rollouts)
        return Batch(position, inputs, targets, [None] * microbatches, range(len(rollouts)), counted, seen)

    def _losses(self, batch: Batch, rollouts: Sequence[Rollout], rewards: NDArray[np.float64]) -> list[PolicyLoss]:
        """Make the loss of each microbatch. Collective over the mesh where there is a reference."""
        run, samples = self._here, self.settings.samples
        sampled = np.zeros((len(rollouts), run.config.data.sequence_length))
        for row, each in enumerate(rollouts):
            start = len(each.prompt.tokens) - 1
            sampled[row, start : start + len(each.nats)] = each.nats
        alike = np.repeat(np.ptp(rewards.reshape(-1, samples), axis=1) == 0, samples)
        lengths = [len(each.tokens) for each in rollouts]
        of_texts = np.array([rewards, alike, lengths, [each.is_cut for each in rollouts]], np.float64).T
        # sums are divided by the number of tokens; these are means over the texts
        of_texts *= self.counted[1] / run.config.data.global_batch
        better = advantages(rewards, samples, self.settings.scaled)
        reference = self._reference_nats(batch) if self._reference else [None] * len(batch.targets)
        size = batch.targets.shape[1]

        def on_device(values: NDArray[np.float64], m: int) -> Tensor:
            return torch.from_numpy(values[m * size : (m + 1) * size].astype(np.float32)).to(run.device)

        return [
            PolicyLoss(
                is_target=(targets != IGNORED).float(),
                advantages=on_device(better, m),
                figures=on_device(of_texts, m),
                sampled=on_device(sampled, m),
                reference=reference[m],
                kl=self.settings.kl,
                largest=self._largest,
            )
            for m, targets in enumerate(batch.targets)
        ]

    def _reference_nats(self, batch: Batch) -> list[Tensor | None]:
        """Nats of each microbatch's targets by the reference; None on ranks without the head. Collective."""
        run = self._here
        kept = [Keep() for _ in batch.targets]
        schedule = forward_only(run.engine.link.placement, len(kept))
        with torch.no_grad(), self._reference_in_place(run):
            run.engine.run(schedule, batch.inputs, batch.targets, 1.0, batch.documents, kept)
        return [each.nats for each in kept]

    @contextmanager
    def _reference_in_place(self, run: RunContext) -> Iterator[None]:
        """Let the trained weights be those of the reference."""
        now = {name: parameter.data for name, parameter in run.parameters.items()}
        for name, parameter in run.parameters.items():
            parameter.data = self._reference[name]
        try:
            yield
        finally:
            for name, parameter in run.parameters.items():
                parameter.data = now[name]


def _shared(world: MPI.Intracomm, read: Callable[[], list[Prompt]]) -> list[Prompt]:
    """Read prompts on rank 0, for all ranks. Collective over world. Raises what `read` raises."""
    found: list[bytes] = []

    def on_first() -> int:
        found.append(json.dumps([(each.text, each.answer, each.tokens) for each in read()]).encode())
        return len(found[0])

    data = np.zeros(on_root(world, on_first), np.uint8)
    if found:
        data[:] = np.frombuffer(found[0], np.uint8)
    together(world, "to get the prompts", partial(world.Bcast, data))
    return [Prompt(text, answer, tuple(tokens)) for text, answer, tokens in json.loads(data.tobytes())]
