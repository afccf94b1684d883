"""Count the bytes that the backward pass of a microbatch through a chunk takes, while what was kept goes, line by line.

    whole        gradients come, block by block from the last, those of weights until they are added to their sums;
                 what the forward pass kept goes                                                -> nothing left
    two halves   what the weight gradients need stays: outputs' gradients, what layers read     -> left for W

Functions follow those of forward_pass.py, from the other end.
"""

from __future__ import annotations

from dataclasses import replace

from hpcllm.model.shapes import StageSpan
from hpcllm.plan.memory.forward_pass import block, core, forward, head_keeps_input, norm, norm_keeps, unkept
from hpcllm.plan.memory.sizes import Ledger, Sizes, Use


def backward(s: Sizes, span: StageSpan) -> Use:
    """Count a backward pass, from what `forward` kept; in two halves, the first, whose net is not all that was kept.

    Neither the gradient of the output nor that of the input counts, if others make or take it.
    """
    ledger = Ledger()
    held = _head_backward(ledger, s, span) if span.has_head else 0
    for number in reversed(range(span.first_block, span.last_block)):
        is_last = number == span.last_block - 1 and not span.has_head
        _block_backward(ledger, s, gradient_counts=not is_last)
        if s.keeps_input and (number > span.first_block or span.has_embedding):
            ledger.drop(s.residual)
    if span.has_embedding:
        _embedding_backward(ledger, s, held)
    ledger.drop(s.residual)
    return ledger.use()


def second_half(s: Sizes, span: StageSpan) -> Use:
    """Count the second half W: the weights' gradients, and what the first half has left."""
    left = forward(s, span).net + backward(s, span).net
    largest = s.weights(max(s.model.ffn // s.tp, s.vocabulary if span.has_head else 0))
    return Use(largest if s.item_bytes < 4 else 0, -left)


def _head_backward(ledger: Ledger, s: Sizes, span: StageSpan) -> int:
    """Count the head, which leaves the gradient of the last block's output.

    Returns the bytes that are held until the embedding's gradient is there.
    """
    scores, table = s.tokens * s.vocabulary, s.weights(s.vocabulary)
    is_both = s.model.tied and span.has_embedding
    if s.loss_tokens:
        _pieces_backward(ledger, s)
        held = table if is_both else 0
        ledger.drop(table - held)
        _norm_backward(ledger, s, norm_keeps(s))
    else:
        if s.item_bytes < 4:
            ledger.take(scores * s.item_bytes)
            ledger.drop(4 * scores)
        held = table if is_both and not s.split else 0
        _columns_backward(ledger, s, [scores * s.item_bytes], [table], held)
    if head_keeps_input(s):
        ledger.drop(s.residual)
    return held


def _pieces_backward(ledger: Ledger, s: Sizes) -> None:
    """Count a loss in pieces, which leaves the gradients of the norm's result and of the table."""
    table, narrow = s.weights(s.vocabulary), s.item_bytes < 4
    piece = min(s.loss_tokens, s.tokens) * s.vocabulary
    of_x = s.gathered or s.residual
    ledger.take(s.gathered, of_x, s.as_float32(table))
    ledger.take(4 * piece, piece * s.item_bytes if narrow else 0, table if narrow else 0)
    ledger.drop(4 * piece, piece * s.item_bytes if narrow else 0, table if narrow else 0)
    if s.gathered:
        ledger.take(s.residual)
        ledger.drop(of_x)
    if narrow:
        ledger.take(table)
        ledger.drop(s.as_float32(table))
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
    if s.keeps_input:
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
        _rows_done(ledger, s, tables[0])
    result = q if s.split else 2 * q  # its gradient, and itself
    ledger.take(q, k, k)
    ledger.drop(made)
    if not recompute:
        ledger.drop(result, q + 2 * k - unkept(s))
    if s.model.positions == "rotary":
        rotated = q * s.model.turned_channels // s.model.head_dim
        more = (2 if s.item_bytes == 4 else 5) * rotated
        ledger.take(more)
        ledger.drop(more)
    if recompute:
        ledger.drop(result, q + 2 * k)
        _rows_done(ledger, s, tables[0])
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
        _rows_done(ledger, s, table)
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
        _rows_done(ledger, s, table)
        ledger.drop(0 if s.split else s.ffn)
    _columns_backward(ledger, s, [s.ffn] * (1 + gated), [table] * (1 + gated))


def _rows_backward(ledger: Ledger, s: Sizes, inputs: int, table: int) -> None:
    """Count a layer whose input is split over tp: the input's gradient comes, the result's and weight's are there."""
    ledger.take(s.gathered, inputs, 0 if s.split else table)


def _rows_done(ledger: Ledger, s: Sizes, table: int) -> None:
    if not s.split:
        ledger.drop(s.gathered, table)


def _columns_backward(ledger: Ledger, s: Sizes, gradients: list[int], tables: list[int], held: int = 0) -> None:
    """Count layers that read one tensor: gradients of outputs become that of the norm's input.

    held: bytes of the tables' gradients that stay.
    """
    kept, made = norm_keeps(s), 0 if s.split else sum(tables)
    if not s.joint:
        for number, (gradient, table) in enumerate(zip(gradients, tables, strict=True)):
            ledger.take(s.residual, table if made else 0)
            ledger.drop(table + gradient if made else 0)
            if number:
                _add(ledger, s)
        ledger.drop(s.residual if made else 0)  # what the layers read
        ledger.now += held
        _norm_backward(ledger, s, kept)
        return
    if s.recomputes:
        norm(ledger, s, graph=True)
    ledger.take(s.gathered, s.gathered or s.residual)
    if s.gathered:
        ledger.take(s.residual)
    ledger.take(made)
    if s.recomputes:
        _norm_backward(ledger, s, kept, stays=True)
    ledger.drop(s.gathered)  # the sum over tp, of which this rank has its part
    if s.split:
        ledger.drop(s.residual if s.gathered else 0)
    else:
        ledger.drop(s.gathered, s.residual, made - held, *gradients)
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
        more = 3 * wide + s.residual * ((s.item_bytes < 4) + stays)  # the float32 copies were given back by then
        ledger.take(more)
        ledger.drop(more)
    ledger.drop(kept)


def _embedding_backward(ledger: Ledger, s: Sizes, held: int) -> None:
    """Count the embedding. held: the head's gradient of a table that is both ends of the chunk, which waits."""
    table = s.weights(s.vocabulary)
    if s.model.positions == "learned":
        rows = (s.sequence // s.parts, s.model.max_sequence)  # their gradient, then laid into all of the table
        ledger.take(*(s.weights(n) for n in rows))
        ledger.drop(*(s.weights(n) for n in rows))
    if s.tp > 1:
        ledger.take(s.gathered, s.gathered or s.residual)
    ledger.take(table)
    if held:
        ledger.take(table)
        ledger.drop(table, held)
    if s.tp > 1:
        ledger.drop(s.gathered, s.gathered or s.residual)
    ledger.drop(table)
