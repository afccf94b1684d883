"""Count the bytes that the backward pass of a microbatch through a chunk takes, while what was kept goes, line by line.

    whole        gradients come, block by block from the last, those of weights in their sums; what the forward pass
                 kept goes                                                                      -> nothing left
    two halves   what the weight gradients need stays: outputs' gradients, what layers read     -> left for W

A weight's gradient is a tensor of its own for a moment where products of 16 bit have no result of 32 bits: on CPUs.
Functions follow those of forward_pass.py, from the other end.
"""

from __future__ import annotations

from dataclasses import replace

from hpcllm.model.shapes import StageSpan
from hpcllm.plan.memory.forward_pass import block, core, forward, norm, norm_keeps, strip, unkept
from hpcllm.plan.memory.sizes import Ledger, Sizes, Use


def backward(s: Sizes, span: StageSpan) -> Use:
    """Count a backward pass, from what `forward` kept; in two halves, the first, whose net is not all that was kept.

    Neither the gradient of the output nor that of the input counts, if others make or take it.
    """
    ledger = Ledger()
    if span.has_head:
        _head_backward(ledger, s)
    for number in reversed(range(span.first_block, span.last_block)):
        is_last = number == span.last_block - 1 and not span.has_head
        _block_backward(ledger, s, gradient_counts=not is_last)
        if number > span.first_block or span.has_embedding:
            ledger.drop(s.residual)
    if span.has_embedding:
        _embedding_backward(ledger, s)
    ledger.drop(s.residual)
    return ledger.use()


def second_half(s: Sizes, span: StageSpan) -> Use:
    """Count the second half W: the weights' gradients, and what the first half has left."""
    left = forward(s, span).net + backward(s, span).net
    largest = s.weights(max(s.model.ffn // s.tp, s.vocabulary if span.has_head else 0))
    return Use(largest if s.item_bytes < 4 else 0, -left)


def _head_backward(ledger: Ledger, s: Sizes) -> None:
    """Count the head, which leaves the gradient of the last block's output."""
    scores, table = s.tokens * s.vocabulary, s.weights(s.vocabulary)
    if s.loss_tokens:
        _pieces_backward(ledger, s)
        _norm_backward(ledger, s, norm_keeps(s))
    else:
        ledger.take(strip(s, scores))
        ledger.drop(strip(s, scores))
        _columns_backward(ledger, s, [scores * s.item_bytes], [table])
    ledger.drop(s.residual)  # what the norm read


def _pieces_backward(ledger: Ledger, s: Sizes) -> None:
    """Count a loss in pieces, which leaves the gradient of the norm's result."""
    table, narrow = s.weights(s.vocabulary), s.item_bytes < 4
    piece = min(s.loss_tokens, s.tokens) * s.vocabulary
    of_x = s.gathered or s.residual
    ledger.take(s.gathered, of_x)
    ledger.take(piece * s.item_bytes, max(strip(s, piece), table if narrow else 0))
    ledger.drop(piece * s.item_bytes, max(strip(s, piece), table if narrow else 0))
    if s.gathered:
        ledger.take(s.residual)
        ledger.drop(of_x)
    ledger.drop(s.gathered, s.residual)  # the norm's result


def _block_backward(ledger: Ledger, s: Sizes, gradient_counts: bool) -> None:
    """Count a block: the gradient of its output becomes that of its input."""
    if s.level == "full":
        kept = replace(s, level="none")
        block(ledger, kept, graph=True)
        _kept_block_backward(ledger, kept, gradient_counts)
        ledger.drop(s.residual)  # the recomputed output
    else:
        _kept_block_backward(ledger, s, gradient_counts)


def _kept_block_backward(ledger: Ledger, s: Sizes, gradient_counts: bool) -> None:
    noted = s.split and not s.gathered  # the second half reads the gradients of both sums themselves
    _feed_forward_backward(ledger, s)
    if s.model.parallel_residual:
        _attention_backward(ledger, s)
        _add(ledger, s, keeps_one=noted or not gradient_counts)
        _add(ledger, s)
        return
    ledger.drop(s.residual)  # the sum in between
    _add(ledger, s, keeps_one=noted or not gradient_counts)
    _attention_backward(ledger, s)
    _add(ledger, s, keeps_one=noted)


def _add(ledger: Ledger, s: Sizes, keeps_one: bool = False) -> None:
    """Count the sum of two gradients; one of them may stay, or be in memory that others count."""
    ledger.take(s.residual)
    ledger.drop(s.residual, 0 if keeps_one else s.residual)


def _attention_backward(ledger: Ledger, s: Sizes) -> None:
    """Count attention: the gradient of the result stays, that of the input comes."""
    q, k = s.queries, s.keys
    heads = (s.model.heads, s.model.key_value_heads, s.model.key_value_heads)
    tables = [s.weights(n * s.model.head_dim // s.tp) for n in heads]
    recompute = s.recomputes
    made = core(ledger, s) if recompute else core(Ledger(), s)
    _rows_backward(ledger, s, q, tables[0])
    if not recompute:
        _rows_done(ledger, s)
    result = q if s.split else 2 * q  # its gradient, and itself
    ledger.take(q, k, k)
    ledger.drop(made)
    if not recompute:
        ledger.drop(result, q + 2 * k - unkept(s))
    if s.model.positions == "rotary":
        rotated = q * s.model.turned_channels // s.model.head_dim
        more = q + (s.as_float32(rotated) if s.item_bytes < 4 else 0)
        ledger.take(more)
        ledger.drop(more)
    if recompute:
        ledger.drop(result, q + 2 * k)
        _rows_done(ledger, s)
    _columns_backward(ledger, s, [q, k, k], tables)


def _feed_forward_backward(ledger: Ledger, s: Sizes) -> None:
    """Count the feed-forward network: the gradient of the result stays, that of the input comes."""
    gated = s.model.activation == "swiglu"
    table = s.weights(s.model.ffn // s.tp)
    recompute = s.recomputes
    if recompute:
        ledger.take(s.ffn, s.ffn * gated)
    _rows_backward(ledger, s, s.ffn, table)
    if not recompute:
        _rows_done(ledger, s)
        ledger.drop(0 if s.split else s.ffn)
    ledger.take(s.ffn, s.ffn * gated)
    if gated and not recompute:
        ledger.drop(s.ffn)
        ledger.take(s.ffn)
        ledger.drop(s.ffn)
    else:
        ledger.drop(s.ffn)
    ledger.drop(s.ffn, 2 * s.ffn * gated)  # what the activation function read, and the factor that it made
    if recompute:
        _rows_done(ledger, s)
        ledger.drop(0 if s.split else s.ffn)
    _columns_backward(ledger, s, [s.ffn] * (1 + gated), [table] * (1 + gated))


def _rows_backward(ledger: Ledger, s: Sizes, inputs: int, table: int) -> None:
    """Count a layer whose input is split over tp: the input's gradient comes, that of the result is there."""
    ledger.take(s.gathered, inputs)
    _weight_gradient(ledger, s, table)


def _rows_done(ledger: Ledger, s: Sizes) -> None:
    if not s.split:
        ledger.drop(s.gathered)


def _weight_gradient(ledger: Ledger, s: Sizes, table: int) -> None:
    """Count a weight's gradient, if it is a tensor before it is added to its sum, and not left for the second half."""
    made = table if s.item_bytes < 4 and not s.split else 0
    ledger.take(made)
    ledger.drop(made)


def _columns_backward(ledger: Ledger, s: Sizes, gradients: list[int], tables: list[int]) -> None:
    """Count layers that read one tensor: gradients of outputs become that of the norm's input."""
    kept = norm_keeps(s)
    if s.recomputes:
        norm(ledger, s, graph=True)
    ledger.take(s.gathered, s.gathered or s.residual)
    if s.gathered:
        ledger.take(s.residual)
    _weight_gradient(ledger, s, max(tables))
    if s.recomputes:
        _norm_backward(ledger, s, kept, stays=True)
    ledger.drop(s.gathered)  # the sum over tp, of which this rank has its part
    if s.split:
        ledger.drop(s.residual if s.gathered else 0)
    else:
        ledger.drop(s.gathered, s.residual, *gradients)
    if not s.recomputes:
        _norm_backward(ledger, s, kept)


def _norm_backward(ledger: Ledger, s: Sizes, kept: int, stays: bool = False) -> None:
    """Count a norm: the gradient of the result becomes that of the input.

    stays: the gradient of the result is held from elsewhere until the end.
    """
    wide = s.as_float32(s.residual)
    if s.model.norm == "layernorm":
        ledger.take(s.residual)
        ledger.drop(s.residual)
    else:
        narrow = s.item_bytes < 4
        more = wide + s.residual * stays + 2 * wide * narrow  # products; as float32 the gradient, and x
        ledger.take(more)
        ledger.drop(more)
    ledger.drop(kept)


def _embedding_backward(ledger: Ledger, s: Sizes) -> None:
    """Count the embedding, whose rows are added to the table's sum as float32."""
    wide = s.as_float32(s.gathered or s.residual) if s.item_bytes < 4 else 0
    if s.model.positions == "learned":
        rows = (s.sequence // s.parts, s.model.max_sequence)  # their gradient, then laid into all of the table
        ledger.take(*(s.weights(n) for n in rows))
        ledger.drop(*(s.weights(n) for n in rows))
    if s.tp > 1:
        ledger.take(s.gathered, s.gathered or s.residual)
    ledger.take(wide)
    ledger.drop(wide)
    if s.tp > 1:
        ledger.drop(s.gathered, s.gathered or s.residual)
