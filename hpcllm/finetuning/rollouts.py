"""Texts that a run's own model writes, on its own ranks and layout, with the weights where they are.

    prompts of a step    p0 p0 p0 p0 | p1 p1 p1 p1          groups of samples, whole groups to a replica
                         replica 0     replica 1            each token: all tp x pp ranks of the replica
                            `--> tokens, on all of its ranks; log-probability of each, where it was drawn

Drawn from the model's own distribution: no temperature, nothing left out, so that the tokens are those that the
gradient of grpo.py is an expectation over. A draw depends on the seed of its text alone: run.seed, number of the prompt
among all of the run, number of the sample. So a layout changes texts by rounding only, and a run that goes on writes
them again.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcllm.config.schema import Config, RewardConfig
from hpcllm.data.store import TokenStore
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import ConfigError, DataError
from hpcllm.evaluation.example_tokens import requests_of
from hpcllm.evaluation.examples import Example
from hpcllm.evaluation.problems import Part, problems
from hpcllm.evaluation.settings import Options
from hpcllm.evaluation.tasks import examples_of, parse_task
from hpcllm.inference.batch import NextTokens, Request, Text
from hpcllm.inference.cached_model import plain_arithmetic
from hpcllm.inference.complete import BatchSettings, make_batch
from hpcllm.inference.endings import StopStrings
from hpcllm.model.sampling import Sampling

if TYPE_CHECKING:
    from hpcllm.training.setup import RunContext

MOST_TEXTS = 256  # of a replica, that are made at once
AS_IT_IS = Sampling(temperature=1.0, top_k=0)
LIKELIEST = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Prompt:
    """A beginning of texts, and the answer that a reward may compare them with."""

    text: str
    answer: str  # without white space around it
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Rollout:
    """A text that the model has written."""

    prompt: Prompt
    text: str  # up to the stop string
    tokens: tuple[int, ...]  # all that were drawn, with those that ended it
    is_cut: bool  # it has as many tokens as it may have, and no end
    nats: tuple[float, ...]  # minus the log-probability of each token, as it was drawn; () on ranks that do not draw


def training_prompts(config: Config, store: TokenStore) -> list[Prompt]:
    """Read or make the prompts to train on. Not collective. Raises UserError."""
    return _prompts(config, store, config.finetuning.reward.prompts, "prompts", "train")


def held_out_prompts(config: Config, store: TokenStore) -> list[Prompt]:
    """Read or make the prompts to validate with, data.validation_sequences at most; [] if there are none.

    Made problems are made with seed 0 whatever run.seed is. Not collective. Raises UserError.
    """
    reward, most = config.finetuning.reward, config.data.validation_sequences
    if reward.held_out:
        return _prompts(config, store, reward.held_out, "held_out", "held-out")[:most]
    if parse_task(reward.prompts).path is not None:
        return []
    settings = dataclasses.replace(reward, problems=min(most, config.evaluation.examples))
    made = dataclasses.replace(config, run=dataclasses.replace(config.run, seed=0))
    finetuning = dataclasses.replace(config.finetuning, reward=settings)
    return _prompts(dataclasses.replace(made, finetuning=finetuning), store, reward.prompts, "prompts", "held-out")


def _prompts(config: Config, store: TokenStore, name: str, key: str, part: Part) -> list[Prompt]:
    reward = config.finetuning.reward
    try:
        examples = _examples(name, part, reward, config.run.seed)
        requests = requests_of(examples, Encoder(store.tokenizer_json), config.model.vocabulary)
    except (ConfigError, DataError) as error:
        made = "" if Path(name).suffix else f" with finetuning.reward.problems = {reward.problems}"
        raise type(error)(f"finetuning.reward.{key} = {name!r}{made}: {error}") from error
    room = config.data.sequence_length + 1 - reward.tokens  # the last token of a text is a target alone
    found = [
        Prompt(example.contexts[0].rstrip(), example.choices[example.answer].strip(), tuple(request.context))
        for example, request in zip(examples, requests, strict=True)
        if len(request.context) <= room
    ]
    if len(found) < len(examples):
        shortest = min(len(request.context) for request in requests)
        raise DataError(
            f"finetuning.reward.{key} = {name!r}: {len(examples) - len(found):,} of {len(examples):,} prompts, the "
            f"shortest of {shortest} tokens, do not fit with finetuning.reward.tokens = {reward.tokens} into "
            f"data.sequence_length = {config.data.sequence_length}; valid: prompts of up to {max(room, 0)} tokens"
        )
    return found


def _examples(name: str, part: Part, reward: RewardConfig, seed: int) -> list[Example]:
    task = parse_task(name)
    if task.is_store:
        raise ConfigError("a token store holds no prompts with answers; valid: a file of rows, or made problems")
    if task.path is None:
        return problems(task.kind, task.size, reward.problems, seed, part)
    examples = examples_of(task, Options())
    if any(len(example.contexts) > 1 for example in examples):
        raise DataError("a row has several contexts; valid: one context and an answer")
    return examples


@dataclass
class _Recorder:
    """Model whose draws are kept, that which ends a text too; as batch.NextTokens."""

    model: NextTokens
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by the index of a text

    def next_tokens(self, texts: Sequence[Text], uniforms: Sequence[float]) -> list[int]:
        drawn = self.model.next_tokens(texts, uniforms)
        for text, token in zip(texts, drawn, strict=True):
            self.tokens[text.index].append(token)
        return drawn


def generate(
    run: RunContext,
    encoder: Encoder,
    dealt: Sequence[Sequence[Prompt]],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling = AS_IT_IS,
) -> list[Rollout]:
    """Write a text for each prompt of this replica; in their order, the same on all its ranks.

    dealt, seeds: prompts of each replica, and a seed for each, the same on all ranks; no replica has fewer than the
    next one, or more than one more. Collective over the mesh. Raises NonFiniteError, StallError.
    """
    mesh, reward = run.mesh, run.config.finetuning.reward
    replicas, count = mesh.dp.size, len(dealt[0])
    order = [(r, k) for k in range(count) for r in range(replicas) if k < len(dealt[r])]  # as make_batch deals them
    requests = [Request(dealt[r][k].tokens, seeds[r][k]) for r, k in order]
    stops = StopStrings([reward.stop] if reward.stop else [], encoder)
    nats: dict[int, list[float]] = defaultdict(list)

    def observe(logits: Tensor, texts: Sequence[Text], tokens: Sequence[int]) -> None:
        chosen = torch.tensor(tokens, device=logits.device).unsqueeze(1)
        found = logits.float().logsumexp(-1) - logits.float().gather(1, chosen)[:, 0]
        for text, value in zip(texts, found.tolist(), strict=True):
            nats[text.index].append(value)

    decoders = [chunk.decoder for chunk in run.engine.chunks]
    settings = BatchSettings(reward.tokens, MOST_TEXTS, stops=frozenset({encoder.end_of_text}))
    vocabulary = min(encoder.vocabulary, run.config.model.vocabulary)
    run.optimizer.settle()
    with plain_arithmetic(decoders):
        batch = make_batch(
            decoders[0], requests, sampling, settings, vocabulary, mesh, stops.is_over, run.control, observe
        )
        batch.model = recorder = _Recorder(batch.model)
        ended = {}
        while not batch.is_done:
            ended.update({text.index: text for text in batch.step() if text.reason})
    return [
        Rollout(
            prompt=dealt[replica][k],
            text=stops.text_of(ended[index].tokens),
            tokens=tuple(recorder.tokens[index]),
            is_cut=ended[index].reason == "length",
            nats=tuple(nats[index]),
        )
        for index, (replica, k) in enumerate(order)
        if replica == mesh.dp.rank
    ]
