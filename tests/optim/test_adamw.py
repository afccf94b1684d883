"""AdamW on stretches of flat arrays is the algorithm written out, however the stretches are cut."""

from __future__ import annotations

import pytest
import torch

from hpcllm.collectives import chunk_range
from hpcllm.config.schema import OptimizerConfig
from hpcllm.model.initialisation import build
from hpcllm.optim.adamw import Share, make_share
from hpcllm.optim.flat_buffers import EXP_AVG, EXP_AVG_SQ, MASTER, MODEL, FlatBuffer, Traits
from hpcllm.optim.shard_spec import ShardSpec
from tests.model.variants import VARIANTS, random_tokens, whole

CONFIG = OptimizerConfig(learning_rate=1e-2, weight_decay=0.2, beta1=0.8, beta2=0.9, epsilon=1e-6)


class Cut:
    """A decoder's weights and gradients as flat arrays, of which `parts` owners update a stretch each."""

    def __init__(self, decoder, parts: int = 1, keeps_master: bool = False) -> None:
        self.parameters = dict(decoder.named_parameters())
        sizes = tuple(p.numel() for p in self.parameters.values())
        flat = FlatBuffer(tuple(self.parameters), sizes, Traits(exact=False))
        self.weights = torch.cat([p.detach().flatten() for p in self.parameters.values()])
        self.gradients = torch.zeros(flat.size)
        for (name, p), view in zip(self.parameters.items(), self.weights.split(list(sizes)), strict=True):
            p.data = view.view(p.shape)
            assert name in flat.names
        matrices = {name for name, p in self.parameters.items() if p.dim() > 1}
        self.shares: list[Share] = []
        for owner in range(parts):
            start, end = chunk_range(flat.size, parts, owner)
            spec = ShardSpec(flat, parts > 1, start, end, None, True, 1)
            own, sums = self.weights[start:end], self.gradients[start:end]
            self.shares.append(make_share(spec, own, sums, keeps_master, matrices.__contains__, CONFIG))

    def step(self, decoder, number: int, divisor: float = 1.0) -> dict[str, torch.Tensor]:
        """The gradients of the step, which come multiplied by `divisor`."""
        for p in decoder.parameters():
            p.grad = None
        decoder(random_tokens(decoder.model, 2, 9, seed=number)).square().mean().backward()
        torch.cat([p.grad.flatten() for p in self.parameters.values()], out=self.gradients)
        self.gradients *= divisor
        for share in self.shares:
            share.update(CONFIG.learning_rate / (1 + number), divisor)
            if share.master is not None:
                self.weights[share.spec.start : share.spec.end] = share.master
        return {name: p.grad.double() for name, p in self.parameters.items()}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("parts", "keeps_master", "divisor"), [(1, False, 1.0), (3, False, 7.5), (5, True, 1024.0)])
def test_five_steps_are_the_algorithm_written_out(name, parts, keeps_master, divisor):
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2, in float64."""
    model = VARIANTS[name]
    decoder = build(model, whole(model), seed=1)
    want = {key: p.detach().double() for key, p in decoder.named_parameters()}
    cut = Cut(decoder, parts, keeps_master)
    first, second = ({key: torch.zeros_like(p) for key, p in want.items()} for _ in range(2))
    for number in range(5):
        rate, t = CONFIG.learning_rate / (1 + number), number + 1
        for key, g in cut.step(decoder, number, divisor).items():
            first[key] = CONFIG.beta1 * first[key] + (1 - CONFIG.beta1) * g
            second[key] = CONFIG.beta2 * second[key] + (1 - CONFIG.beta2) * g * g
            mean, square = first[key] / (1 - CONFIG.beta1**t), second[key] / (1 - CONFIG.beta2**t)
            decay = CONFIG.weight_decay if want[key].dim() > 1 else 0.0
            want[key] = want[key] - rate * (mean / (square.sqrt() + CONFIG.epsilon) + decay * want[key])
    for key, p in decoder.named_parameters():
        torch.testing.assert_close(p.detach().double(), want[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", [2, 3, 7, 4000])
@pytest.mark.parametrize("keeps_master", [False, True])
def test_the_cut_decides_only_where_a_vector_loop_ends(parts, keeps_master):
    """The last few values of each range go through a loop that rounds otherwise; the rest is the same to the bit."""
    model = VARIANTS["llama"]
    one, other = (build(model, whole(model), seed=1) for _ in range(2))
    whole_cut, fine_cut = Cut(one), Cut(other, parts, keeps_master)
    for number in range(2):
        whole_cut.step(one, number)
        fine_cut.step(other, number)
    torch.testing.assert_close(whole_cut.weights, fine_cut.weights, rtol=1e-6, atol=1e-7)
    for key in ("exp_avg", "exp_avg_sq"):
        cut = torch.cat([getattr(share.operands, key) for share in fine_cut.shares])
        torch.testing.assert_close(cut, getattr(whole_cut.shares[0].operands, key), rtol=1e-6, atol=1e-9)


def test_without_gradient_matrices_shrink_and_vectors_stay():
    model = VARIANTS["gated with biases"]
    decoder = build(model, whole(model), seed=1)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    for share in Cut(decoder, parts=3).shares:
        share.update(CONFIG.learning_rate, 1.0)
    shrink = 1 - CONFIG.learning_rate * CONFIG.weight_decay
    for name, p in decoder.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (shrink if p.dim() > 1 else 1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("keeps_master", [False, True])
def test_pieces_taken_out_and_put_back_go_on_to_the_bit(parts, keeps_master):
    model = VARIANTS["llama"]
    straight, other = (build(model, whole(model), seed=1) for _ in range(2))
    first, second = Cut(straight, parts, keeps_master), Cut(other, parts, keeps_master)
    for number in range(3):
        first.step(straight, number)
    for mine, theirs in zip(second.shares, first.shares, strict=True):
        spec = mine.spec
        pieces = zip(mine.pieces(spec.start, spec.end), theirs.pieces(spec.start, spec.end), strict=True)
        for empty, full in pieces:
            assert (empty.kind, empty.name, empty.start, empty.end) == (full.kind, full.name, full.start, full.end)
            empty.values.copy_(full.values)
        mine.updates = 3
    first.step(straight, 3)
    second.step(other, 3)
    assert torch.equal(first.weights, second.weights)


@pytest.mark.parametrize("parts", [1, 2, 3, 11])
def test_pieces_of_all_owners_have_every_element_once(parts):
    model = VARIANTS["gpt2"]
    cut = Cut(build(model, whole(model), seed=1), parts, keeps_master=True)
    seen = {(kind, name): torch.zeros(p.numel(), dtype=torch.int64) for kind in (MODEL, MASTER, EXP_AVG, EXP_AVG_SQ)
            for name, p in cut.parameters.items()}  # fmt: skip
    for share in cut.shares:
        for piece in share.pieces(share.spec.start, share.spec.end):
            assert piece.values.numel() == piece.end - piece.start > 0
            seen[piece.kind, piece.name][piece.start : piece.end] += 1
            if piece.kind == MODEL:
                flat = cut.parameters[piece.name].detach().view(-1)
                assert piece.values.data_ptr() == flat[piece.start : piece.end].data_ptr()
    assert all(torch.all(count == 1) for count in seen.values())


@pytest.mark.parametrize(("start", "end"), [(0, 12), (3, 3), (2, 5), (4, 11), (11, 12), (0, 1)])
def test_ranges_are_the_stretch_in_order(start, end):
    names, sizes = ("a", "b", "c"), (4, 1, 7)
    elements = [(name, i) for name, size in zip(names, sizes, strict=True) for i in range(size)]
    found = list(FlatBuffer(names, sizes, Traits(exact=False)).ranges(start, end))
    assert [(r.name, i) for r in found for i in range(r.start, r.end)] == elements[start:end]
    assert all(elements[r.place] == (r.name, r.start) for r in found)
