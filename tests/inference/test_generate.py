"""Text from a checkpoint: whole characters, the same for the same seed, and mistakes said before the first word."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import ENCODER, TOKENIZER, checkpoint_of

from hpcllm.checkpoint.archive import compress
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.cli.main import main
from hpcllm.config.schema import MeshConfig, ModelConfig
from hpcllm.errors import CheckpointError, ConfigError, DataError, MeshError
from hpcllm.inference.complete import BatchSettings
from hpcllm.inference.generate import Place, TextSettings, continue_prompt, load_decoder
from hpcllm.model.initialisation import build
from hpcllm.model.sampling import Sampling
from hpcllm.model.shapes import split_layers
from hpcllm.mpi.mesh import open_mesh
from hpcllm.system.device import torch_dtype
from hpcllm.system.job import SIZE_VARIABLES, launched_ranks

CYCLE = "é🚀中a"  # no two of its bytes are equal, so each byte has one successor


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> Path:
    model = ModelConfig(layers=1, hidden=8, heads=2, ffn=8, vocabulary=300, max_sequence=16)
    return checkpoint_of(tmp_path_factory.mktemp("a model"), model)


@pytest.fixture(scope="module")
def cycling_model(tmp_path_factory) -> Path:
    """A decoder whose likeliest next token is the next byte of CYCLE: layers that add nothing, a head that looks up."""
    size = ENCODER.vocabulary
    model = ModelConfig(
        layers=1, hidden=2 * size, heads=1, ffn=4, vocabulary=size, max_sequence=8, tied=False, biases="none",
        norm="rmsnorm", positions="rotary", activation="gelu",
    )  # fmt: skip
    ids = ENCODER.encode([CYCLE])[0].tolist()[:-1]

    def look_up(parameters) -> None:
        for p in parameters.values():
            if p.dim() > 1:
                p.zero_()
        parameters["embedding.weight"][:, :size] = torch.eye(size)
        for token, following in zip(ids, [*ids[1:], ids[0]], strict=True):
            parameters["head.weight"][following, token] = 1.0

    return checkpoint_of(tmp_path_factory.mktemp("cycle"), model, look_up)


def settings(tokens: int = 20, temperature=1.0, top_k=0, seed=0, **more) -> TextSettings:
    kinds = {field.name for field in fields(Sampling)}
    sampling = Sampling(temperature, top_k, **{key: more.pop(key) for key in kinds & set(more)})
    return TextSettings(sampling, BatchSettings(tokens, **more.pop("batch", {})), seed, **more)


def text(path: Path, prompt: str = "a", precision="fp32", mesh=None, **more) -> str:
    return "".join(continue_prompt(path, prompt, settings(**more), Place(precision, mesh=mesh)))


def sharpen(parameters) -> None:
    """Far apart logits: another context, another answer, and no rounding decides."""
    for name, p in parameters.items():
        if p.dim() > 1:
            p *= 8 if name == "embedding.weight" else 20


@pytest.fixture
def shared_model(comm, shared_path) -> Path:
    """Of four layers that two tp ranks share, and three stages; 61 tokens of the vocabulary stand for no text."""
    model = ModelConfig(
        layers=4, hidden=24, heads=4, kv_heads=2, ffn=16, vocabulary=ENCODER.vocabulary + 61, max_sequence=12,
        positions="rotary", norm="rmsnorm", activation="swiglu", biases="qkv",
    )  # fmt: skip
    path = shared_path / "a model.h5"
    if comm.rank == 0:
        checkpoint_of(shared_path, model, sharpen).rename(path)
    comm.Barrier()
    return path


@pytest.mark.parallel([1, 2, 3, 4])
def test_every_layout_says_what_one_process_says(comm, shared_model):
    alone = text(shared_model, tokens=24, temperature=0.0)
    drawn = text(shared_model, tokens=24, temperature=1.5, top_k=5, seed=7)
    assert alone != drawn
    for tp in (1, 2):
        if comm.size % tp:
            continue
        with open_mesh(comm, MeshConfig(dp=1, pp=comm.size // tp, tp=tp)) as mesh:
            for order in range(2):  # a mesh serves one text after another
                assert text(shared_model, tokens=24, temperature=0.0, mesh=mesh) == alone, (tp, order)
            assert text(shared_model, tokens=24, temperature=1.5, top_k=5, seed=7, mesh=mesh) == drawn, tp


@pytest.mark.parallel([2, 3])
def test_a_rank_reads_its_part_of_the_weights_alone(comm, shared_model):
    for tp in (1, comm.size):
        with (
            Checkpoint.open(shared_model, comm) as checkpoint,
            open_mesh(comm, MeshConfig(dp=1, pp=comm.size // tp, tp=tp)) as mesh,
        ):
            if tp == 3:
                with pytest.raises(MeshError, match=r"mesh\.tp = 3 does not divide model\.heads = 4; valid tp .* 1, 2"):
                    load_decoder(checkpoint, mesh=mesh)
                continue
            decoder = load_decoder(checkpoint, mesh=mesh)
            held = comm.allreduce(sum(p.numel() for p in decoder.parameters() if p.dim() > 1))
            whole = sum(p.numel() for p in load_decoder(checkpoint).parameters() if p.dim() > 1)
            ends = decoder.model.vocabulary * decoder.model.hidden  # of tied ends each stage has a copy
            assert held == whole + (ends if tp == 1 else 0)


@pytest.mark.parallel([2])
def test_more_stages_than_layers_are_rejected(comm, shared_path):
    path = shared_path / "short.h5"
    if comm.rank == 0:
        model = ModelConfig(layers=1, hidden=8, heads=2, ffn=8, vocabulary=300, max_sequence=16)
        checkpoint_of(shared_path, model).rename(path)
    comm.Barrier()
    with open_mesh(comm, MeshConfig(dp=1, pp=2)) as mesh, pytest.raises(MeshError, match=r"model\.layers = 1"):
        text(path, mesh=mesh)


@pytest.mark.parallel([1, 2, 3])
def test_the_command_speaks_on_rank_0_and_refuses_other_numbers_of_ranks(comm, shared_model, capfd):
    def said(*flags: str) -> tuple[int, str, str]:
        code = main(["generate", str(shared_model), "--prompt", "a", "--tokens", "9", "--temperature", "0", *flags])
        out, err = capfd.readouterr()
        return code, out, err

    want = text(shared_model, tokens=9, temperature=0.0)
    code, out, err = said("--pp", str(comm.size))
    assert (code, out, err) == (0, f"a{want}\n" if comm.rank == 0 else "", "")
    code, out, _ = said("--pp", str(comm.size), "--json")
    if comm.rank == 0:
        report = json.loads(out)
        assert (report["prompt"], report["text"]) == ("a", want)
        assert report["tokens"] <= 9
    code, out, err = said("--tp", "2", "--pp", "2")
    assert (code, out) == (2, "")
    if comm.rank == 0:
        assert f"is 4, but the job has {comm.size} rank" in err
        assert "mpirun -n 4" in err
    assert said("--tp", "0")[0] == 2


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_speed_is_told_where_there_is_one(cycling_model, capsys, tokens):
    assert main(["generate", str(cycling_model), "--prompt", "a", "--tokens", str(tokens), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == tokens
    assert (report["first_token_s"] is None) == (tokens == 0)
    assert (report["tokens_per_s"] is None) == (tokens < 2)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generated_text_does_not_steer_a_terminal_and_comes_as_it_is_anywhere_else(
    monkeypatch, random_model, is_terminal
):
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", written)
    assert main(["generate", str(random_model), "--prompt", "a\x1b[2J", "--tokens", "300"]) == 0
    steers = {c for c in written.getvalue() if c < " " and c not in "\n\t"}
    assert steers == set() if is_terminal else len(steers) > 3


def test_what_launchers_say_is_heard_without_mpi(monkeypatch):
    for name in SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert launched_ranks() == 1
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "no number")
    assert launched_ranks() == 1
    monkeypatch.setenv("PMI_SIZE", "6")
    assert launched_ranks() == 6


def greedy_text_of_transformers(folder: Path, prompt: str, tokens: int) -> str:
    """Of a random model that it leaves in the folder."""
    import transformers

    torch.manual_seed(3)
    shape = transformers.LlamaConfig(
        vocab_size=ENCODER.vocabulary, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(shape).eval()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER, encoding="utf-8")
    ids = torch.from_numpy(ENCODER.encode([prompt])[0][:-1].astype("i8")).unsqueeze(0)
    made = model.generate(ids, do_sample=False, max_new_tokens=tokens, eos_token_id=ENCODER.end_of_text)
    return ENCODER.decode(made[0, ids.shape[1] :].numpy()).decode(errors="replace")


@pytest.mark.parallel([2])
def test_a_folder_of_weights_says_what_transformers_says(comm, shared_path):
    want = comm.bcast(greedy_text_of_transformers(shared_path, "abc", 40) if comm.rank == 0 else None)
    assert text(shared_path, "abc", tokens=40, temperature=0.0) == want
    for axis in ("tp", "pp"):
        with open_mesh(comm, MeshConfig(dp=1, **{axis: comm.size})) as mesh:
            assert text(shared_path, "abc", tokens=40, temperature=0.0, mesh=mesh) == want


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "precision",
    ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.full(reason="compiles for half a minute the first time"))],
)
def test_weights_of_any_type_are_computed_with_in_the_type_that_is_requested(tmp_path, stored, precision):
    model = ModelConfig(layers=2, hidden=16, heads=2, ffn=16, vocabulary=ENCODER.vocabulary, max_sequence=16)
    path = checkpoint_of(tmp_path, model, dtype=stored)
    with Checkpoint.open(path) as checkpoint:
        decoder = load_decoder(checkpoint, torch_dtype(precision))
    assert {p.dtype for p in decoder.parameters()} == {torch_dtype(precision)}
    exact = build(model, split_layers(model, 1)[0], seed=4, dtype=stored)
    for name, p in exact.named_parameters():
        assert torch.equal(dict(decoder.named_parameters())[name], p.to(torch_dtype(precision))), name
    assert text(path, tokens=20, precision=precision)


def test_characters_of_many_tokens_come_out_whole(cycling_model):
    endless = (CYCLE * 3).encode()
    for tokens in range(25):
        pieces = list(continue_prompt(cycling_model, "a", settings(tokens, 0.0), Place()))
        assert "".join(pieces) == endless[:tokens].decode(errors="replace")
        assert "\ufffd" not in "".join(pieces[:-1])  # only the end can cut a character


def test_same_seed_same_text_and_another_seed_another(random_model):
    texts = [text(random_model, tokens=40, seed=seed) for seed in (0, 1, 2)]
    assert [text(random_model, tokens=40, seed=seed) for seed in (0, 1, 2)] == texts
    assert len(set(texts)) == 3


def test_an_archive_says_the_same_and_a_run_folder_its_newest(random_model, tmp_path):
    newest = tmp_path / "a run" / "checkpoints" / "step_00000020.h5"
    compress(random_model, newest, None)
    assert text(newest.parents[1]) == text(newest) == text(random_model)


def test_temperature_0_knows_no_seed(random_model):
    assert len({text(random_model, temperature=0.0, seed=seed) for seed in range(4)}) == 1


def test_no_draw_falls_outside_the_tokenizer(random_model):
    """The model has 300 rows, the tokenizer fewer: 40 seeds of 40 tokens would meet the rest for certain."""
    assert ENCODER.vocabulary < 300
    for seed in range(40):
        assert isinstance(text(random_model, tokens=40, temperature=100.0, seed=seed), str)


def test_an_empty_prompt_begins_a_new_text(cycling_model):
    assert isinstance(text(cycling_model, prompt="", tokens=3), str)


def test_a_prompt_longer_than_the_window_is_continued(cycling_model):
    assert text(cycling_model, prompt=CYCLE * 10, tokens=10, temperature=0.0) == CYCLE


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": np.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"tokens": -1}, "tokens"),
        ({"samples": 0}, "samples"),
        ({"stops": ("",)}, "stop string is empty"),
    ],
)
def test_settings_out_of_range_are_rejected(random_model, wrong, said):
    with pytest.raises(ConfigError, match=said):
        text(random_model, **wrong)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_out_of_range_is_rejected(random_model, seed):
    with pytest.raises(ConfigError, match="seed"):
        continue_prompt(random_model, "a", settings(1, seed=seed), Place())


def test_a_prompt_that_is_not_utf8_is_rejected(random_model):
    with pytest.raises(DataError, match="UTF-8"):
        continue_prompt(random_model, b"ab\xff".decode("utf-8", "surrogateescape"), settings(1), Place())


def test_mistakes_are_said_before_the_first_piece_is_asked_for(tmp_path, random_model):
    missing = tmp_path / "no such.h5"
    with pytest.raises(DataError, match="no such"):
        continue_prompt(missing, "a", settings(1), Place())
    damaged = tmp_path / "damaged.h5"
    content = bytearray(random_model.read_bytes())
    content[100] ^= 1  # in the block that guards all tables
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        continue_prompt(damaged, "a", settings(1), Place())


def test_a_checkpoint_without_a_tokenizer_cannot_read_a_prompt(tmp_path):
    model = ModelConfig(layers=1, hidden=8, heads=2, ffn=8, vocabulary=50, max_sequence=16)
    path = checkpoint_of(tmp_path, model, tokenizer="")
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        continue_prompt(path, "a", settings(1), Place())
