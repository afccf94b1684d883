# ruff: noqa: N803, N806 - shape suffixes are upper case; the legend is in the text below
"""Causal self-attention with grouped queries, and a sliding window if the model has one.

    x --+-- query --(turn)--+
        +-- key ----(turn)--+-- softmax(q k^T / sqrt(K) + mask) v -- output -->
        +-- value ----------+
                             mask, window 3:   x . . . .      a token sees itself and those before it,
                                               x x . . .      at most `window` in all
                                               x x x . .
                                               . x x x .

Shapes: B batch, T sequence, D hidden, H query heads, G key and value heads (H a multiple of G), K channels a head,
R channels of a head that turn (rotary.py), S tokens that are looked at: T, or more with a cache. Heads are those of
this rank, where tp splits them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcllm.config import ModelConfig
from hpcllm.model.cache import KeyValueCache
from hpcllm.model.linear import PLAIN, Linear, Pass, columns, rows
from hpcllm.model.recompute import Recipe
from hpcllm.model.rotary import turn
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, as_gathered, in_order


class Attention(nn.Module):
    """Query, key, value and output as four linear layers under the names of `shapes`.

    One product over joined query, key and value weights is 3 % faster than three (hidden 192, one core): too little
    for a weight layout that grouped queries complicate and a tensor-parallel split would have to take apart.
    """

    def __init__(self, model: ModelConfig, number: int, tp: TensorParallel = ALONE) -> None:
        """number: of the block, by which a cache knows it."""
        super().__init__()
        self.number, self.window, self.head_dim = number, model.window, model.head_dim
        self.grouped = model.key_value_heads != model.heads
        queries = model.heads // tp.size * model.head_dim
        key_values = model.key_value_heads // tp.size * model.head_dim
        biases = model.biases != "none"
        self.query = Linear(model.hidden, queries, bias=biases)
        self.key = Linear(model.hidden, key_values, bias=biases)
        self.value = Linear(model.hidden, key_values, bias=biases)
        self.output = Linear(queries, model.hidden, bias=model.biases == "all")

    def forward(
        self,
        x_BTD: Tensor | Recipe,
        table_2T1R: Tensor | None,
        how: Pass = PLAIN,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """table_2T1R: the rows of `rotary_table` for these positions; None: positions were added to x before.

        cache: keys and values of the tokens before x, to which those of x are added; None: there are none. Collective
        over tp; where that splits the sequence, x and the result are this rank's part, (B, T/tp, D).
        """
        q_k_v = columns(x_BTD, (self.query.weights, self.key.weights, self.value.weights), how)
        core = Recipe(lambda q, k, v: self._core(q, k, v, table_2T1R, how.tp, cache), q_k_v)
        return rows(core, self.output.weights, how)

    def _core(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table_2T1R: Tensor | None,
        tp: TensorParallel,
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Everything between the linear layers, from their outputs to what `output` reads."""
        in_line = (in_order(x, tp) for x in (query, key, value))
        q_BTHK, k_BTGK, v_BTGK = (x.view(*x.shape[:2], -1, self.head_dim) for x in in_line)
        if table_2T1R is not None:
            q_BTHK, k_BTGK = turn(q_BTHK, table_2T1R), turn(k_BTGK, table_2T1R)
        if cache is not None:
            k_BTGK, v_BTGK = cache.add(self.number, k_BTGK, v_BTGK)
        mask_TS = _mask(q_BTHK.shape[1], k_BTGK.shape[1], self.window, q_BTHK.device)
        out_BHTK = functional.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2),
            k_BTGK.transpose(1, 2),
            v_BTGK.transpose(1, 2),
            attn_mask=mask_TS,
            is_causal=mask_TS is None and q_BTHK.shape[1] > 1,
            enable_gqa=self.grouped,
        )
        return as_gathered(out_BHTK.transpose(1, 2), tp).flatten(-2)


def _mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor | None:
    """(T, S) bool: true where the last T of S tokens look; None where plain causal attention says it all.

    Flash kernels take no mask, so it is made only where there is no other way.
    """
    whole = queries in (1, keys)  # one new token looks at everything; as many as keys: the usual triangle
    if whole and not 0 < window < keys:
        return None
    seen = torch.arange(keys, device=device)
    distance = seen[keys - queries :].unsqueeze(1) - seen
    return (distance >= 0) & (distance < (window or keys))
