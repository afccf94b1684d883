"""Count the bytes that the forward pass of a microbatch through a chunk takes and keeps, line by line.

    x --norm--> [q k v] --rotate, attention--> [output] --> + --norm--> [gate up] --silu x--> [down] --> +
    ^    ^       ^ ^ ^         ^  ^                       ^    ^        ^   ^        ^                      kept, "none"
    ^            ^ ^ ^                                    ^             ^   ^                               "selective"
    ^                                                                                                       "full"

Each function stands for a piece of model/, and takes and drops tensors in the order in which that does. Linear layers
that read one tensor are one operation (model/linear.py); with "selective" it recomputes that tensor.

Not counted: a few numbers a token of the loss, and what one operation of PyTorch takes inside.
"""

from __future__ import annotations

from hpcllm.model.shapes import StageSpan
from hpcllm.plan.memory.sizes import Ledger, Sizes, Use

STRIP_VALUES = 1 << 18  # as model/loss.py, which imports torch, has it for CPUs


def forward(s: Sizes, span: StageSpan) -> Use:
    """Count a forward pass; the net is what is kept for the backward pass.

    Neither the chunk's input nor its output counts, if others make or take it.
    """
    ledger = Ledger()
    if span.has_embedding:
        _embedding(ledger, s)
    for _ in range(span.first_block, span.last_block):
        block(ledger, s, graph=True)
    if span.has_head:
        _head(ledger, s)
    else:
        ledger.drop(s.residual)
    return ledger.use()


def _embedding(ledger: Ledger, s: Sizes) -> None:
    ledger.take(s.gathered, s.residual)
    ledger.drop(s.gathered)
    if s.model.positions == "learned":
        ledger.take(s.residual)
        ledger.drop(s.residual)


def block(ledger: Ledger, s: Sizes, graph: bool) -> None:
    """Count a block, from the input, which stays, to the output behind it."""
    graph = graph and s.level != "full"
    is_parallel = s.model.parallel_residual
    _attention(ledger, s, graph)
    ledger.take(s.residual)  # the sum with the input
    ledger.drop(s.residual)
    _feed_forward(ledger, s, graph)
    ledger.take(s.residual)
    ledger.drop(s.residual)
    if not graph or is_parallel:
        ledger.drop(s.residual)  # the sum in between


def _attention(ledger: Ledger, s: Sizes, graph: bool) -> None:
    q, k, keeps = s.queries, s.keys, graph and not s.recomputes
    _columns(ledger, s, keeps, q, k, k)
    left = core(ledger, s)
    ledger.drop(0 if keeps else left)
    _rows(ledger, s, q)
    ledger.drop(unkept(s) if keeps else q)
    if not graph:
        ledger.drop(q, k, k)


def _columns(ledger: Ledger, s: Sizes, keeps: bool, *outputs: int) -> None:
    """Count a norm, and the layers that read its result, which may be kept."""
    norm(ledger, s, keeps)
    ledger.take(s.gathered, *outputs)
    ledger.drop(s.gathered, 0 if keeps else s.residual)


def core(ledger: Ledger, s: Sizes) -> int:
    """Count attention from query, key and value to the result; return the bytes it leaves besides the result."""
    q, k = s.queries, s.keys
    ordered = q + 2 * k if s.parts > 1 and s.samples > 1 else 0
    ledger.take(ordered)
    left = ordered
    if s.model.positions == "rotary":
        for size in (q, k):
            _rotate(ledger, s, size)
        left += q + k
        if ordered:
            ledger.drop(q, k)
            left -= q + k
    mask = s.item_bytes * s.sequence * s.sequence if 0 < s.model.window < s.sequence else 0
    if mask:
        ledger.take(8 * s.sequence * s.sequence, mask)
        ledger.drop(8 * s.sequence * s.sequence)
    ledger.take(q, s.log_sums)
    return left + mask + s.log_sums


def unkept(s: Sizes) -> int:
    """Return the bytes of queries, keys and values that are not kept, as they were reordered or rotated."""
    if s.parts > 1 and s.samples > 1:
        return s.queries + 2 * s.keys
    return s.queries + s.keys if s.model.positions == "rotary" else 0


def _rotate(ledger: Ledger, s: Sizes, size: int) -> None:
    """Count rotary positions: the rotated tensor behind the one that was read; products in float32."""
    rotated = size * s.model.turned_channels // s.model.head_dim
    wide = s.as_float32(rotated) if s.item_bytes < 4 else 0  # of one half, and of the other
    ledger.take(size, wide)
    ledger.drop(wide)


def _rows(ledger: Ledger, s: Sizes, inputs: int) -> None:
    """Count a layer whose input is split over tp: its result, on the residual stream."""
    strided = inputs if s.parts > 1 and inputs == s.queries and s.samples > 1 else 0
    ledger.take(strided, s.gathered, s.residual)
    ledger.drop(strided, s.gathered)


def _feed_forward(ledger: Ledger, s: Sizes, graph: bool) -> None:
    gate, keeps = s.ffn * (s.model.activation == "swiglu"), graph and not s.recomputes
    _columns(ledger, s, keeps, s.ffn, gate)
    ledger.take(s.ffn, gate)
    ledger.drop(0 if keeps else gate)
    _rows(ledger, s, s.ffn)
    ledger.drop(0 if keeps else s.ffn)
    if not graph:
        ledger.drop(s.ffn, gate)


def norm(ledger: Ledger, s: Sizes, graph: bool) -> int:
    """Count a norm, which leaves its result; return the bytes that its gradient needs besides the input."""
    row, wide = 4 * s.tokens // s.parts, s.as_float32(s.residual)
    if s.model.norm == "layernorm":
        kept = 2 * row
        ledger.take(kept, s.residual)
    else:
        kept = row
        ledger.take(row, wide)
        if s.item_bytes < 4:
            ledger.take(s.residual)
            ledger.drop(wide)
    if not graph:
        ledger.drop(kept)
    return kept


def norm_keeps(s: Sizes) -> int:
    """Return the bytes that a norm keeps for its gradient besides the input."""
    return norm(Ledger(), s, True)


def _head(ledger: Ledger, s: Sizes) -> None:
    scores = s.tokens * s.vocabulary
    norm(ledger, s, graph=bool(s.loss_tokens) or not s.recomputes)
    ledger.take(s.gathered)
    if s.loss_tokens:
        piece = min(s.loss_tokens, s.tokens) * s.vocabulary
        ledger.take(piece * s.item_bytes, strip(s, piece))
        ledger.drop(piece * s.item_bytes, strip(s, piece), s.gathered)
    else:
        ledger.take(scores * s.item_bytes)
        ledger.drop(s.gathered, s.residual if s.recomputes else 0)
        ledger.take(strip(s, scores))
        ledger.drop(strip(s, scores))


def strip(s: Sizes, scores: int) -> int:
    """Return the bytes of the scores that the loss has as float32 at once."""
    return 4 * max(s.vocabulary, min(scores, STRIP_VALUES // s.vocabulary * s.vocabulary)) if s.item_bytes < 4 else 0
