"""Laws of folders whose weights are of few bits: rounded to nearest, whoever reads them, however they are cut."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from small_models import checkpoint_of

from hpcllm.checkpoint.huggingface.folder import Folder
from hpcllm.checkpoint.huggingface.quantise import quantise
from hpcllm.checkpoint.slabs import Slab
from hpcllm.cli.main import main
from hpcllm.config.schema import MeshConfig, ModelConfig
from hpcllm.errors import ConfigError, HuggingFaceError, MeshError
from hpcllm.inference.batch import Request, in_order
from hpcllm.inference.complete import BatchSettings, generate_batch
from hpcllm.inference.generate import load_model
from hpcllm.model.initialisation import CPU
from hpcllm.model.sampling import Sampling
from hpcllm.model.shapes import parameter_shapes
from hpcllm.mpi.mesh import open_mesh

pytestmark = pytest.mark.timeout(600)  # the first test of a kind waits for its kernels to be compiled
LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "biases": "none"}
MODEL = ModelConfig(layers=2, hidden=64, heads=2, ffn=128, vocabulary=300, max_sequence=32, tied=False, **LLAMA)
QWEN = ModelConfig(layers=1, hidden=32, heads=2, ffn=96, vocabulary=300, max_sequence=32, **(LLAMA | {"biases": "qkv"}))


def sharpen(parameters) -> None:
    for weight in parameters.values():
        if weight.dim() == 2:
            weight *= 20


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint_of(tmp_path_factory.mktemp("a model"), MODEL, sharpen)


@pytest.fixture(scope="module", params=[8, 4], ids=["8 bits", "4 bits"])
def folder(request, source, tmp_path_factory):
    path = tmp_path_factory.mktemp("few bits") / "out"
    quantise(source, path, request.param)
    return path


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """What round to nearest leaves of a weight: with a scale a row, or for 64 inputs."""
    rows = values.view(-1, values.shape[1] if bits == 8 else 64)
    steps = 127 if bits == 8 else 7
    scale = rows.abs().amax(1, keepdim=True) / steps
    return ((rows / scale).round() * scale).view_as(values)


def weights_of(path, is_folder, dtype=torch.float32):
    decoder = load_model(path, is_folder, dtype, CPU, None)
    whole = {name: weight.whole(dtype) for name, weight in decoder.quantised.items()}
    return {**dict(decoder.named_parameters()), **whole}


def test_linear_layers_are_rounded_and_nothing_else(source, folder):
    bits = Folder.open(folder).quantisation.bits
    before, after = weights_of(source, False), weights_of(folder, True)
    assert set(before) == set(after) == set(parameter_shapes(MODEL))
    for name, values in before.items():
        if name.startswith("blocks.") and values.dim() == 2:
            torch.testing.assert_close(after[name], rounded(values, bits), rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(after[name], values)


def test_the_format_s_own_library_reads_what_the_page_describes(source, folder):
    """Whole numbers times scales, as in docs/how-to/generate.md, made whole with nothing of ours."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    weights = said["config_groups"]["group_0"]["weights"]
    assert said["quant_method"] == "compressed-tensors"
    want = weights_of(source, False)["blocks.1.ffn.down.weight"]
    name = "model.layers.1.mlp.down_proj.weight"
    with safe_open(folder / "model.safetensors", "np") as file:
        scales = file.get_tensor(f"{name}_scale")
        if weights["num_bits"] == 8:
            codes = file.get_tensor(name).astype("f4")
        else:
            packed = file.get_tensor(f"{name}_packed").view("u4")
            codes = np.stack([(packed >> np.uint32(4 * k)) & np.uint32(15) for k in range(8)], -1).astype("f4") - 8
            assert file.get_tensor(f"{name}_shape").tolist() == [64, 128]
    made = (codes.reshape(*scales.shape, -1) * scales[..., None]).reshape(64, 128)
    torch.testing.assert_close(torch.from_numpy(made), rounded(want, weights["num_bits"]), rtol=1e-5, atol=1e-6)


def test_any_box_is_that_of_the_whole_tensor(folder):
    with Folder.open(folder) as opened:
        name, shape = "model/blocks.0.ffn.down.weight", (64, 128)
        whole = opened.read(Slab(name, (0, 0), shape))
        for start, size in (((0, 64), (64, 64)), ((3, 0), (5, 128)), ((1, 70), (2, 9)), ((63, 127), (1, 1))):
            box = tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
            assert np.array_equal(opened.read(Slab(name, start, size)), whole[box])


def made(decoder, mesh=None):
    requests = [Request([5 + k, 9, 3 * k + 1], k) for k in range(5)]
    texts = generate_batch(decoder, requests, Sampling(0.0), BatchSettings(12), 300, mesh)
    return [text.tokens for text in in_order(texts)]


def test_one_token_is_multiplied_as_a_whole_pass_is(folder):
    """By the codes as they are, and by the weights made whole."""
    decoder = load_model(folder, True, torch.float32, CPU, None)
    for tokens, k in zip(made(decoder), range(5), strict=True):
        context = [5 + k, 9, 3 * k + 1, *tokens]
        with torch.no_grad():
            logits = decoder(torch.tensor([context]))[0, :, :300]
        assert logits[2:-1].argmax(-1).tolist() == tokens


@pytest.mark.parallel([2, 3])
def test_every_layout_makes_the_same_texts(comm, tmp_path_factory):
    path = comm.bcast(tmp_path_factory.mktemp("shared") if comm.rank == 0 else None)
    for bits in (8, 4):
        if comm.rank == 0:
            quantise(checkpoint_of(path / f"c{bits}", MODEL, sharpen), path / f"q{bits}", bits)
        comm.barrier()
        want = made(load_model(path / f"q{bits}", True, torch.float32, CPU, None))
        for sizes in ({"pp": 2}, {"tp": 2}) if comm.size == 2 else ({"dp": 3},):
            with open_mesh(comm, MeshConfig(**{"dp": 1, "pp": 1, "tp": 1, **sizes})) as mesh:
                if bits == 4 and mesh.tp.size == 2:  # 64 inputs of `output` are one group
                    with pytest.raises(MeshError, match="would cut"):
                        load_model(path / f"q{bits}", True, torch.float32, CPU, mesh)
                    continue
                assert made(load_model(path / f"q{bits}", True, torch.float32, CPU, mesh), mesh) == want


def test_layers_of_32_inputs_have_smaller_groups(tmp_path):
    report = quantise(checkpoint_of(tmp_path / "c", QWEN, sharpen), tmp_path / "a folder", 4)
    assert (report.group, report.architecture) == (32, "qwen2")
    assert report.bytes < report.stored_bytes


def test_mistakes_are_said_before_a_byte_is_written(source, folder, tmp_path):
    with pytest.raises(ConfigError, match="there already"):
        quantise(source, folder, 8)
    with pytest.raises(ConfigError, match="bits already"):
        quantise(folder, tmp_path / "out", 8)
    gpt2 = {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "biases": "all"}
    shape = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 32, "vocabulary": 300, "max_sequence": 8}
    with pytest.raises(HuggingFaceError, match="one tensor"):
        quantise(checkpoint_of(tmp_path / "g", ModelConfig(**shape, **gpt2)), tmp_path / "out", 8)
    odd = ModelConfig(**(shape | {"hidden": 24}), **LLAMA)
    with pytest.raises(HuggingFaceError, match="24, 32 inputs cannot be held in groups"):
        quantise(checkpoint_of(tmp_path / "o", odd), tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()


def test_values_that_are_no_numbers_leave_no_folder(tmp_path):
    def spoil(parameters) -> None:
        parameters["blocks.0.ffn.up.weight"][3, 4] = float("inf")

    with pytest.raises(HuggingFaceError, match=r"blocks\.0\.ffn\.up\.weight holds NaN"):
        quantise(checkpoint_of(tmp_path / "c", MODEL, spoil), tmp_path / "out", 8)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (["quant_method"], "gptq", "quant_method"),
        (["format"], "float-quantized", "format"),
        (["config_groups"], {}, "config_groups"),
        (["config_groups", "group_0", "weights", "num_bits"], 3, "num_bits"),
        (["config_groups", "group_0", "weights", "symmetric"], False, "symmetric"),
        (["config_groups", "group_0", "weights", "strategy"], "tensor", "strategy"),
        (["config_groups", "group_0"], 7, "group_0"),
    ],
)
def test_other_ways_are_rejected_by_their_key(folder, tmp_path, keys, value, said):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    inner = config["quantization_config"]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HuggingFaceError, match=said):
        Folder.open(tmp_path)


def test_the_command_reports_bytes_and_rejects_what_is_there(source, tmp_path, capsys):
    command = ["quantise", str(source), str(tmp_path / "a folder"), "--bits", "4"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    held = {"bits": 4, "group": 64, "architecture": "llama"}
    assert held.items() <= report.items()
    assert report["bytes"] < report["stored_bytes"] / 2
    assert main(command) == 2
    assert main(["quantise", str(source), str(tmp_path / "new"), "--limit", "3"]) == 2
    assert "--limit is of --store" in capsys.readouterr().err
