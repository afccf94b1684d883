"""Our decoder with the weights of a randomly initialised GPT-2 or Llama of `transformers` gives its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hpcllm.config.schema import ModelConfig
from hpcllm.model.initialisation import allocate
from hpcllm.model.loss import cross_entropy_sum
from hpcllm.model.shapes import parameter_shapes
from tests.model import variants as wiring
from tests.model.variants import random_tokens, whole

SHAPE = {"layers": 3, "hidden": 48, "heads": 6, "ffn": 80, "vocabulary": 97, "max_sequence": 32}
GPT2 = [
    ModelConfig(**SHAPE, **(wiring.GPT2 | {"activation": activation}), tied=tied)
    for activation in ("gelu_tanh", "gelu")
    for tied in (True, False)
]
LLAMA = [
    ModelConfig(**SHAPE, **wiring.LLAMA, kv_heads=kv_heads, tied=tied, rope_theta=theta)
    for kv_heads, theta in ((0, 1e4), (2, 5e5), (1, 1e4))
    for tied in (True, False)
]


def gpt2(model: ModelConfig) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=model.layers,
            n_embd=model.hidden,
            n_head=model.heads,
            n_inner=model.ffn,
            vocab_size=model.vocabulary,
            n_positions=model.max_sequence,
            activation_function={"gelu_tanh": "gelu_new", "gelu": "gelu"}[model.activation],
            layer_norm_epsilon=model.norm_epsilon,
            tie_word_embeddings=model.tied,
            initializer_range=0.2,
        )
    )


def llama(model: ModelConfig) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=model.layers,
            hidden_size=model.hidden,
            num_attention_heads=model.heads,
            num_key_value_heads=model.key_value_heads,
            intermediate_size=model.ffn,
            vocab_size=model.vocabulary,
            max_position_embeddings=model.max_sequence,
            rms_norm_eps=model.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
            tie_word_embeddings=model.tied,
            initializer_range=0.2,
        )
    )


def ours_of_gpt2(theirs: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """GPT-2 joins query, key and value, and keeps a linear weight as (inputs, outputs)."""
    ours = {"embedding.weight": theirs["transformer.wte.weight"], "positions.weight": theirs["transformer.wpe.weight"]}
    ours["head.weight"] = theirs["lm_head.weight"]
    for kind in ("weight", "bias"):
        ours[f"final_norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for i in range(model.layers):
            old, new = f"transformer.h.{i}", f"blocks.{i}"
            joined = theirs[f"{old}.attn.c_attn.{kind}"].split(model.hidden, dim=-1)
            ours |= {
                f"{new}.attention.{part}.{kind}": w.t()
                for part, w in zip(("query", "key", "value"), joined, strict=True)
            }
            ours[f"{new}.attention.output.{kind}"] = theirs[f"{old}.attn.c_proj.{kind}"].t()
            ours[f"{new}.attention_norm.{kind}"] = theirs[f"{old}.ln_1.{kind}"]
            ours[f"{new}.ffn_norm.{kind}"] = theirs[f"{old}.ln_2.{kind}"]
            ours[f"{new}.ffn.up.{kind}"] = theirs[f"{old}.mlp.c_fc.{kind}"].t()
            ours[f"{new}.ffn.down.{kind}"] = theirs[f"{old}.mlp.c_proj.{kind}"].t()
    return ours


def ours_of_llama(theirs: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    ours = {"embedding.weight": theirs["model.embed_tokens.weight"], "final_norm.weight": theirs["model.norm.weight"]}
    ours["head.weight"] = theirs["lm_head.weight"]
    names = {f"attention.{part}": f"self_attn.{part[0]}_proj" for part in ("query", "key", "value", "output")}
    names |= {f"ffn.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    names |= {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    for i in range(model.layers):
        ours |= {f"blocks.{i}.{new}.weight": theirs[f"model.layers.{i}.{old}.weight"] for new, old in names.items()}
    return ours


@pytest.mark.parametrize(
    ("make", "translate", "model"),
    [(gpt2, ours_of_gpt2, model) for model in GPT2] + [(llama, ours_of_llama, model) for model in LLAMA],
)
def test_logits_and_gradients_are_those_of_transformers(make, translate, model):
    torch.manual_seed(0)
    theirs = make(model).eval()
    for name, weight in theirs.named_parameters():  # norms and biases off their trivial values
        if weight.dim() == 1:
            nn.init.normal_(weight, mean=float("bias" not in name), std=0.3)
    names = parameter_shapes(model, whole(model))
    ours = allocate(model, whole(model))
    weights = translate(dict(theirs.state_dict()), model)
    ours.load_state_dict({name: weights[name] for name in names})

    tokens, targets = random_tokens(model, 3, 29), random_tokens(model, 3, 29, seed=1)
    theirs_logits, ours_logits = theirs(tokens).logits, ours(tokens)
    assert theirs_logits.std() > 0.1
    torch.testing.assert_close(ours_logits, theirs_logits, rtol=0, atol=1e-5 * theirs_logits.abs().max().item())

    cross_entropy_sum(ours_logits, targets).backward()
    nn.functional.cross_entropy(theirs_logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    gradients = dict(theirs.named_parameters(remove_duplicate=False))
    want = translate({name: weight.grad for name, weight in gradients.items()}, model)
    for name, weight in ours.named_parameters():
        # a key's bias shifts all scores of a query alike, which softmax ignores: its gradient is 0 but for rounding
        scale = want[name.replace("key.bias", "query.bias")].norm()
        assert (weight.grad - want[name]).norm() < 1e-5 * scale, name
