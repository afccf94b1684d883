"""What is made again instead of kept gives the gradients of what is kept, in the memory and work promised."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hpcllm.config.schema import ModelConfig
from hpcllm.model.initialisation import build
from hpcllm.model.linear import DeferredGradients
from hpcllm.model.loss import IGNORED
from hpcllm.model.transformer import Decoder
from tests.model.variants import VARIANTS, random_tokens, stirred, whole

BATCH, LENGTH, SCALE = 2, 11, 0.5


def decoder_of(model: ModelConfig, recompute: str, loss_tokens: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = stirred(build(model, whole(model), seed=0, dtype=dtype))
    decoder.recompute, decoder.loss_tokens = recompute, loss_tokens
    return decoder


def backward(decoder: Decoder, later: DeferredGradients | None = None) -> torch.Tensor:
    """The loss, after all gradients were added."""
    tokens, targets = (random_tokens(decoder.model, BATCH, LENGTH, seed) for seed in (0, 1))
    targets[1, :2] = IGNORED
    loss = decoder.nats(decoder.hidden_states(tokens, later), targets, later).sum()
    (SCALE * loss).backward()
    if later:
        later.add(lambda _: None)
    return loss.detach()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_those_of_what_is_kept(name, split):
    plain = decoder_of(VARIANTS[name], "none")
    want = backward(plain, DeferredGradients() if split else None)
    for recompute in ("selective", "full"):
        decoder = decoder_of(VARIANTS[name], recompute)
        assert torch.equal(backward(decoder, DeferredGradients() if split else None), want)
        for (key, weight), kept in zip(decoder.named_parameters(), plain.parameters(), strict=True):
            if recompute == "full":
                assert torch.equal(weight.grad, kept.grad), key
            else:  # sums over layers that share an input run in another order
                error = torch.linalg.vector_norm(weight.grad - kept.grad)
                assert error <= 1e-6 * torch.linalg.vector_norm(kept.grad) + 1e-6, key


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_add_up_over_passes(recompute):
    decoder = decoder_of(VARIANTS["grouped, tied"], recompute, loss_tokens=5)
    backward(decoder)
    once = [weight.grad.clone() for weight in decoder.parameters()]
    backward(decoder, DeferredGradients())
    torch.testing.assert_close([weight.grad for weight in decoder.parameters()], [2 * grad for grad in once])


def kept_values(recompute: str, model: ModelConfig) -> int:
    """Values that the blocks keep of one pass, by the storages that autograd holds on to; parameters do not count."""
    decoder = decoder_of(model, recompute)
    x = torch.randn(BATCH, LENGTH, model.hidden, requires_grad=True)
    decoder.span = whole(model).__class__(0, model.layers, has_embedding=False, has_head=True)
    known = {weight.untyped_storage().data_ptr() for weight in decoder.parameters()} | {decoder.table.data_ptr()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = decoder.hidden_states(x)
    assert y.requires_grad
    return sum(kept.values())


def test_only_what_is_promised_is_kept():
    model = VARIANTS["llama"]
    tokens = BATCH * LENGTH
    residual, heads = model.hidden * tokens, (model.heads + 2 * model.key_value_heads) * model.head_dim * tokens
    assert kept_values("full", model) == model.layers * residual
    assert kept_values("selective", model) == model.layers * (2 * residual + heads + 2 * model.ffn * tokens)
    assert kept_values("none", model) > 1.5 * kept_values("selective", model)


class Products(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, in place ones too, which PyTorch's own counter leaves out."""

    flops = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        first = {"aten.mm": 0, "aten.addmm": 1, "aten.addmm_": 1}.get(str(function.overloadpacket))
        if first is not None:
            left, right = arguments[first : first + 2]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return function(*arguments, **(options or {}))


def flops_of_products(decoder: Decoder) -> int:
    with Products() as counted:
        backward(decoder)
    return counted.flops


@pytest.mark.parametrize("name", VARIANTS)
def test_selective_repeats_no_product_with_a_weight_and_full_those_of_the_blocks(name):
    model = VARIANTS[name]
    tokens, head = BATCH * LENGTH, 2 * model.hidden * model.vocabulary
    all_of_them = flops_of_products(decoder_of(model, "none"))
    forward = all_of_them // 3  # a backward pass has two products for each
    assert flops_of_products(decoder_of(model, "selective")) == all_of_them
    assert flops_of_products(decoder_of(model, "full")) == all_of_them + forward - tokens * head
    assert flops_of_products(decoder_of(model, "none", loss_tokens=4)) == all_of_them + tokens * head


class Largest(TorchDispatchMode):
    """Notes how many rows of `channels` channels any tensor has."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels, self.rows = channels, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == self.channels:
                self.rows = max(self.rows, tensor.numel() // self.channels)
        return made


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["llama", "grouped, tied", "gpt2"])
@pytest.mark.parametrize("loss_tokens", [1, 4, 7, 22, 1000])
def test_no_more_logits_exist_at_once_than_told_and_gradients_do_not_change(name, loss_tokens, split):
    model = VARIANTS[name]  # 61 tokens: no other tensor has so many channels but the transposed gradient of the head
    plain = decoder_of(model, "none")
    want = backward(plain)
    decoder = decoder_of(model, "none", loss_tokens)
    with Largest(model.vocabulary) as largest:
        loss = backward(decoder, DeferredGradients() if split else None)
    assert largest.rows <= max(min(loss_tokens, BATCH * LENGTH), model.hidden)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    for (key, weight), whole_one in zip(decoder.named_parameters(), plain.parameters(), strict=True):
        error = torch.linalg.vector_norm(weight.grad - whole_one.grad)
        assert error <= 2e-6 * torch.linalg.vector_norm(whole_one.grad) + 1e-6, key


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_units_are_entered_and_left_once_outside_of_what_is_made_again(recompute):
    class Noted:
        def __init__(self) -> None:
            self.notes: list[tuple[str, str]] = []

        def before_unit(self, unit, x):
            self.notes.append(("before", unit))
            return x

        def after_unit(self, unit, x):
            self.notes.append(("after", unit))
            return x

    decoder = decoder_of(VARIANTS["llama"], recompute)
    decoder.unshard_hooks = noted = Noted()
    backward(decoder)
    blocks = [(what, f"blocks.{i}") for i in range(decoder.model.layers) for what in ("before", "after")]
    assert noted.notes == [("before", "ends"), *blocks, ("before", "ends")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_in_16_bits_what_is_made_again_has_the_same_bits(name, dtype):
    plain = decoder_of(VARIANTS[name], "none", dtype=dtype)
    want = backward(plain)
    full, selective = (decoder_of(VARIANTS[name], recompute, dtype=dtype) for recompute in ("full", "selective"))
    for decoder in (full, selective):
        assert torch.equal(backward(decoder), want)
    for key, weight in full.named_parameters():
        kept, near = plain.get_parameter(key).grad, selective.get_parameter(key).grad
        assert torch.equal(weight.grad, kept), key
        error = torch.linalg.vector_norm((near - kept).float())
        assert error <= 2e-2 * torch.linalg.vector_norm(kept.float()) + 1e-3, key


def test_without_gradients_nothing_runs_twice():
    model = VARIANTS["llama"]
    flops = set()
    for recompute in ("none", "selective", "full"):
        decoder = decoder_of(model, recompute)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            decoder(random_tokens(model, BATCH, LENGTH))
        flops.add(counter.get_total_flops())
    assert len(flops) == 1
