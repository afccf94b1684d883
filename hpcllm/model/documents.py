# ruff: noqa: N803, N815 - shape suffixes are upper case; the legend is in the text below
"""Attention that stays inside documents, where a row of a microbatch holds several, or inside a sliding window.

    row 0   aaaaaaabbb      group of length 7   aaaaaaa     groups: documents of like length side by side, the shorter
    row 1   cccccccddd                          ccccccc     ones filled up behind their end, where plain causal
            slots = tokens                 3    bbb         attention does not look. Its cost is the sum of squares of
                                                ddd         the documents, not the square of the row.

The borders are known on the host, so which kernels run is decided once a pass, for all layers:

    CPU                                  groups, with SDPA's causal kernel: two copies of q, k, v and output a layer
    device, 16 bit                       one flash kernel for all lengths, torch.nn.attention.varlen
    device otherwise, compiled blocks    SDPA with a mask (B, 1, T, T): shapes do not depend on the documents

A window without documents is the same for all passes, so its mask is made once: (T, T), where there is no flash kernel
for it either. On a device a mask is what is added to the scores, in their type, as the kernels take it: of a bool one
PyTorch would make that in each layer.

Shapes: B batch, T sequence, D hidden, H query heads, G key and value heads, K channels a head, P slots: B x T and what
fills the shorter documents of a group.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

LIKE_LENGTH = 0.75  # documents of a group are at least so long as a share of its longest
SHORT = 32  # or shorter than this: a kernel's start costs more than their squares

Causal = Callable[..., Tensor]  # attention.causal_attention


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of one microbatch: known to the host by their lengths, to the device by positions."""

    lengths: NDArray[np.int64]  # (documents,), row after row: those of a row add up to T
    positions_BT: Tensor  # int64 on the device: place of each token in its document


class AttentionPlan(Protocol):
    """A way to attend inside documents, made once a pass for all layers."""

    def attend(self, causal: Causal, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, window: int) -> Tensor:
        """Return (B, T, H, K). causal: attention.causal_attention."""


def plan_attention(documents: Documents, window: int, eager: bool, like: Tensor) -> AttentionPlan:
    """Choose and prepare the attention of a pass. eager: blocks are not compiled. like: of its type and device."""
    if eager and like.device.type == "cpu":
        return Grouped.of(documents.lengths)
    if eager and takes_varlen(like.device, like.dtype):
        return Varlen.of(documents.lengths, like.device)
    return Masked.of(documents.positions_BT, window, like.dtype)


def plan_window(samples: int, tokens: int, window: int, eager: bool, like: Tensor) -> AttentionPlan:
    """Choose and prepare the attention of all passes over (samples, tokens) where a token looks at `window` at most.

    eager, like: as of plan_attention.
    """
    if eager and takes_varlen(like.device, like.dtype):
        return Varlen.of(np.full(samples, tokens), like.device)
    return Masked.of_window(tokens, window, like)


def takes_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """True if there is a flash kernel for documents of any lengths, with windows and grouped queries."""
    return device.type == "cuda" and dtype != torch.float32 and _has_varlen()


@dataclass(frozen=True, eq=False)
class Grouped:
    """Documents of like length side by side."""

    tokens_of_slots: Tensor  # (P,) int64
    slots_of_tokens: Tensor  # (B * T,) int64
    groups: Sequence[tuple[int, int]]  # documents and slots of each, in the order of the slots

    @classmethod
    def of(cls, lengths: NDArray[np.int64]) -> Grouped:
        """Group documents of these lengths, which lie one behind the other."""
        order = np.argsort(-lengths, kind="stable")
        starts, ordered = (np.cumsum(lengths) - lengths)[order], lengths[order]
        slots_of_tokens, tokens_of_slots = np.empty(int(lengths.sum()), np.int64), []
        groups: list[tuple[int, int]] = []
        first = filled = 0
        while first < len(ordered):
            longest = int(ordered[first])
            least = 1 if longest <= SHORT else LIKE_LENGTH * longest
            end = len(ordered) - int(np.searchsorted(ordered[::-1], least))
            place, sizes = np.arange(longest), ordered[first:end, None]
            tokens = starts[first:end, None] + np.minimum(place, sizes - 1)
            slots_of_tokens[tokens[place < sizes]] = filled + np.flatnonzero(place < sizes)
            tokens_of_slots.append(tokens.ravel())
            groups.append((end - first, longest))
            first, filled = end, filled + tokens.size
        return cls(torch.from_numpy(np.concatenate(tokens_of_slots)), torch.from_numpy(slots_of_tokens), groups)

    def attend(self, causal: Causal, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, window: int) -> Tensor:
        """Attend group by group, as AttentionPlan.attend."""
        spread = (_Spread.apply(x.flatten(0, 1), self) for x in (q_BTHK, k_BTGK, v_BTGK))  # type: ignore[no-untyped-call]
        sizes = [documents * length for documents, length in self.groups]
        parts = zip(*(x.split(sizes) for x in spread), self.groups, strict=True)
        found = [causal(*(x.unflatten(0, group) for x in q_k_v), window).flatten(0, 1) for *q_k_v, group in parts]
        collected: Tensor = _Collect.apply(torch.cat(found), self)  # type: ignore[no-untyped-call]
        return collected.view_as(q_BTHK)


class _Spread(torch.autograd.Function):
    """(B T, ...) -> (P, ...). Nothing reads what fills up a group, so its gradient is zero and not added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Grouped) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.tokens_of_slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.plan.slots_of_tokens), None


class _Collect(torch.autograd.Function):
    """(P, ...) -> (B T, ...)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, plan: Grouped) -> Tensor:
        ctx.plan, ctx.slots = plan, len(y)
        return y.index_select(0, plan.slots_of_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.new_zeros(ctx.slots, *gradient.shape[1:])
        return whole.index_copy_(0, ctx.plan.slots_of_tokens, gradient), None


@dataclass(frozen=True, eq=False)
class Masked:
    """A mask for all layers: its cost is that of whole rows."""

    mask_B1TT: Tensor  # bool, true where a token looks; on a device the addend of scores, 0 or minus infinity

    @classmethod
    def of(cls, positions_BT: Tensor, window: int, dtype: torch.dtype) -> Masked:
        """Make the mask on the device, without asking the host. dtype: of scores."""
        distance = _distances(positions_BT.shape[1], positions_BT.device)
        looks = (distance >= 0) & (distance <= positions_BT.unsqueeze(-1))  # a document began so many tokens before
        if window:
            looks &= distance < window
        return cls(_as_addend(looks.unsqueeze(1), dtype))

    @classmethod
    def of_window(cls, tokens: int, window: int, like: Tensor) -> Masked:
        """Make the mask (T, T) of a window for rows that are one document. like: of the type and device of scores."""
        distance = _distances(tokens, like.device)
        return cls(_as_addend((distance >= 0) & (distance < window), like.dtype))

    def attend(self, causal: Causal, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, window: int) -> Tensor:
        """Attend by the mask, as AttentionPlan.attend."""
        return causal(q_BTHK, k_BTGK, v_BTGK, window, self.mask_B1TT)


def _distances(tokens: int, device: torch.device) -> Tensor:
    """Return (T, T) int64: how many tokens the one of a column is before that of a row."""
    place = torch.arange(tokens, device=device)
    return place.unsqueeze(1) - place


def _as_addend(looks: Tensor, dtype: torch.dtype) -> Tensor:
    if looks.is_cpu:
        return looks
    return torch.zeros_like(looks, dtype=dtype).masked_fill_(looks.logical_not(), float("-inf"))


@dataclass(frozen=True, eq=False)
class Varlen:
    """One kernel for documents of any lengths. Untested on a GPU."""

    ends: Tensor  # (documents + 1,) int32 on the device: where each begins, and the end of the last
    longest: int

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device) -> Varlen:
        """Copy the borders to the device; the host does not wait."""
        ends = torch.zeros(len(lengths) + 1, dtype=torch.int32, pin_memory=True)
        ends[1:] = torch.from_numpy(np.cumsum(lengths))
        return cls(ends.to(device, non_blocking=True), int(lengths.max()))

    def attend(self, causal: Causal, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, window: int) -> Tensor:  # noqa: ARG002
        """Attend by the kernel for unequal lengths, as AttentionPlan.attend."""
        from torch.nn.attention.varlen import varlen_attn

        found = varlen_attn(
            q_BTHK.flatten(0, 1),
            k_BTGK.flatten(0, 1),
            v_BTGK.flatten(0, 1),
            self.ends,
            self.ends,
            self.longest,
            self.longest,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
        )
        assert isinstance(found, Tensor), "nothing besides the output was asked for"
        return found.view_as(q_BTHK)


def _has_varlen() -> bool:
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None
