r"""Map parameters of ours to tensors of each architecture of Hugging Face's transformers. Pure; both directions use it.

    blocks.3.attention.key.weight  =  "blocks.3." + "attention.key" + ".weight"
                                          |              |
    model.layers.3.self_attn.k_proj.weight   <- blocks   <- layers

    as it is        ours (outputs, inputs)  =  theirs                      Llama
    transposed      ours (outputs, inputs)  =  theirs (inputs, outputs)^T  GPT-2
    a part of one   their outputs are groups x parts x rows, ours is one part of each group:

        GPT-2     1 group            [ q q q q | k k k k | v v v v ]
        GPT-NeoX  a group a head     [ q q | k k | v v ] [ q q | k k | v v ]

A box of ours is a few boxes of theirs, one a group that it touches. So a tensor-parallel rank reads just its rows out
of a fused tensor, and a large tensor is copied in pieces, whichever of the two is read and whichever written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpcllm.checkpoint.slabs import Slab
from hpcllm.config.schema import ModelConfig
from hpcllm.model.shapes import parameter_shapes

Shape = tuple[int, ...]
_FUSED = ("attention.query", "attention.key", "attention.value")
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


@dataclass(frozen=True)
class MappedTensor:
    """The tensor of theirs that holds a parameter of ours, and how."""

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    groups: int = 1

    def shape(self, ours: Shape) -> Shape:
        """Shape of the whole tensor of theirs, given the shape of our parameter."""
        outputs_first = (ours[0] * self.parts, *ours[1:])
        return outputs_first[::-1] if self.transposed else outputs_first

    def boxes(self, slab: Slab, shape: Shape) -> Iterator[tuple[Slab, slice]]:
        """Yield the boxes of theirs that make up a slab, and the slab's rows that each is. shape: of our parameter."""
        group_rows = shape[0] // self.groups
        row, done = slab.start[0], 0
        while done < slab.shape[0]:
            group, inside = divmod(row + done, group_rows)
            count = min(group_rows - inside, slab.shape[0] - done)
            start = ((group * self.parts + self.part) * group_rows + inside, *slab.start[1:])
            size = (count, *slab.shape[1:])
            theirs = Slab(self.name, start[::-1], size[::-1]) if self.transposed else Slab(self.name, start, size)
            yield theirs, slice(done, done + count)
            done += count


@dataclass(frozen=True)
class Names:
    """The tensors of one architecture."""

    prefix: str  # of all but the head; a file of the model without its head lacks it
    head: str  # the output layer, where it is not the embedding
    blocks: str  # what the list of blocks is called
    ends: Mapping[str, str]  # layers outside the blocks, ours -> theirs
    layers: Mapping[str, str]  # inside a block, ours -> theirs
    ignored: str  # what older versions wrote beside the parameters: masks and tables that follow from the config
    fused: str = ""  # layer of queries, keys and values in one, where they are not three
    by_head: bool = False  # the three alternate head by head
    transposed: bool = False  # the weights inside the blocks

    def tensor_map(self, model: ModelConfig, prefix: str) -> dict[str, MappedTensor]:
        """Our name -> their tensor, for every parameter. prefix: self.prefix, or "" where the file has none."""
        start = f"{prefix}." if prefix else ""
        return {name: self._map(name, start, model.heads) for name in parameter_shapes(model)}

    def is_ignored(self, name: str) -> bool:
        return re.fullmatch(rf"({re.escape(self.prefix)}\.)?{self.ignored}", name) is not None

    def _map(self, name: str, start: str, heads: int) -> MappedTensor:
        match = _BLOCK.fullmatch(name)
        path, _, kind = (match[2] if match else name).rpartition(".")
        if path == "head":
            return MappedTensor(f"{self.head}.{kind}")
        if not match:
            return MappedTensor(f"{start}{self.ends[path]}.{kind}")
        block = f"{start}{self.blocks}.{match[1]}"
        if self.fused and path in _FUSED:
            groups = heads if self.by_head else 1
            return MappedTensor(f"{block}.{self.fused}.{kind}", self.transposed, _FUSED.index(path), 3, groups)
        return MappedTensor(f"{block}.{self.layers[path]}.{kind}", self.transposed)


GPT2 = Names(
    prefix="transformer",
    head="lm_head",
    blocks="h",
    ends={"embedding": "wte", "positions": "wpe", "final_norm": "ln_f"},
    layers={
        "attention_norm": "ln_1",
        "attention.output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    },
    ignored=r"h\.\d+\.attn\.(bias|masked_bias)",
    fused="attn.c_attn",
    transposed=True,
)


LLAMA = Names(
    prefix="model",
    head="lm_head",
    blocks="layers",
    ends={"embedding": "embed_tokens", "final_norm": "norm"},
    layers={
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    },
    ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)


NEOX = Names(
    prefix="gpt_neox",
    head="embed_out",
    blocks="layers",
    ends={"embedding": "embed_in", "final_norm": "final_layer_norm"},
    layers={
        "attention_norm": "input_layernorm",
        "attention.output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn.up": "mlp.dense_h_to_4h",
        "ffn.down": "mlp.dense_4h_to_h",
    },
    ignored=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    fused="attention.query_key_value",
    by_head=True,
)
