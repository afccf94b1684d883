# ruff: noqa: N803, N806 - B texts, V the vocabulary
"""The next token of each text of a batch, from its logits and a number that its seed and the token's place give.

    logits  --> repetition penalty --> / temperature --> top k --> top p --> min p --> softmax of what is left
                                                                                          |
    seed of the text, place of the token --hash--> 0 < u < 1 --------------> first token id whose sum of
                                                                             probabilities is above u
No generator has a state: a text is the same whatever others are made beside it, on whatever layout, but where rounding
moves a sum across u. Probabilities are added in the order of token ids, not of size, so that two which are nearly equal
may change places without consequence.

Sources: top p, arXiv:1904.09751; min p, arXiv:2407.01082; repetition penalty, arXiv:1909.05858 section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from hpcllm.errors import ConfigError, DataError, NonFiniteError


@dataclass(frozen=True)
class Sampling:
    """Settings of the draws. The defaults of the last three leave out nothing and change nothing."""

    temperature: float = 0.8  # 0: the likeliest token
    top_k: int = 50  # draw from so many likeliest; 0: from all
    top_p: float = 1.0  # from the fewest likeliest whose probabilities reach this sum
    min_p: float = 0.0  # from those that have this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # logits of tokens that the text has: divided by this if positive, else multiplied

    def check(self) -> None:
        """Raise ConfigError for a setting that is out of range."""
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature = {self.temperature} is out of range; valid: 0 (the likeliest token) or more"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k = {self.top_k} is out of range; valid: 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p} is out of range; valid: 0 < top_p <= 1 (all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p = {self.min_p} is out of range; valid: 0 (all tokens) to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ConfigError(
                f"repetition_penalty = {self.repetition_penalty} is out of range; valid: above 0; 1: none"
            )


def seed_of(*parts: int) -> int:
    """Return a seed for texts that these numbers tell apart: a run's seed, a step, a prompt, a sample."""
    return int.from_bytes(blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest(), "little") >> 1


def uniform(seed: int, place: int) -> float:
    """Return 0 < u < 1 for the token at a place of the text that has this seed."""
    word = int.from_bytes(blake2b(f"{seed}:{place}".encode(), digest_size=8).digest(), "little")
    return ((word >> 11) + 0.5) * 2.0**-53


def draw(
    logits_BV: Tensor, settings: Sampling, uniforms: Sequence[float], histories: Sequence[Sequence[int]]
) -> list[int]:
    """Draw a token for each row of logits, of any type and device, from ids that all stand for text.

    uniforms: of each row (`uniform`); histories: tokens that each text has so far, read where there is a repetition
    penalty. Raises NonFiniteError for logits that are no numbers.
    """
    if not bool(logits_BV.sum(-1, dtype=torch.float32).isfinite().all()):
        raise NonFiniteError(
            "the logits of the next token are not finite: the weights hold NaN or infinite values, or overflow in "
            "this --precision; `checkpoint inspect` shows which tensors"
        )
    if settings.repetition_penalty != 1:
        logits_BV = _penalised(logits_BV, settings.repetition_penalty, histories)
    if settings.temperature == 0:
        return [int(token) for token in logits_BV.argmax(-1).tolist()]
    weights, ids = _kept(logits_BV, settings)
    sums = weights.cumsum(-1)
    marks = torch.tensor(uniforms, dtype=torch.float64, device=sums.device).unsqueeze(1) * sums[:, -1:]
    places = torch.searchsorted(sums, marks, right=True).clamp_(max=sums.shape[1] - 1)
    tokens = places if ids is None else ids.gather(1, places)
    return [int(token) for token in tokens[:, 0].tolist()]


def _penalised(logits_BV: Tensor, penalty: float, histories: Sequence[Sequence[int]]) -> Tensor:
    found = logits_BV.clone()
    for row, history in zip(found, histories, strict=True):
        seen = torch.tensor(sorted(set(history)), device=row.device)
        logits = row[seen]
        row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
    return found


def _kept(logits_BV: Tensor, settings: Sampling) -> tuple[Tensor, Tensor | None]:
    """Return weights (B, kept) float64 and their ids in rising order; None: all ids.

    Weights are exp of logits relative to the largest, in float64: no temperature above 0 is so small that it gives
    inf - inf or 0 / 0.
    """
    size = logits_BV.shape[1]
    top_k = min(settings.top_k or size, size)
    if top_k == size and settings.top_p == 1:
        return _weights(logits_BV, settings), None
    best, ids = torch.topk(logits_BV, top_k, sorted=True)
    weights = _weights(best, settings)
    if settings.top_p < 1:
        before = weights.cumsum(-1) - weights  # of the likelier ones
        weights = weights.masked_fill(before >= settings.top_p * weights.sum(-1, keepdim=True), 0.0)
    ids, order = ids.sort(dim=1)
    return weights.gather(1, order), ids


def _weights(logits: Tensor, settings: Sampling) -> Tensor:
    logits = logits.double()
    weights = ((logits - logits.amax(-1, keepdim=True)) / settings.temperature).exp_()
    return weights.masked_fill_(weights < settings.min_p, 0.0) if settings.min_p else weights


def check_prompt(tokens: Sequence[int], vocabulary: int) -> None:
    """Check a prompt. Raises DataError for an empty prompt or a token outside the vocabulary."""
    if not tokens:
        raise DataError("the prompt has no tokens; give at least one, for example the end-of-text token")
    if outside := [token for token in tokens if not 0 <= token < vocabulary]:
        raise DataError(f"prompt token {outside[0]} is outside the vocabulary; valid: 0 to {vocabulary - 1}")
