"""Adapters leave as merged weights or as a folder of PEFT's, and come back from there, with the same arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from mpi4py import MPI

from hpcllm.checkpoint.huggingface.base import fingerprint
from hpcllm.checkpoint.huggingface.convert import convert, never_trained
from hpcllm.checkpoint.huggingface.merge import open_merged
from hpcllm.checkpoint.huggingface.peft import PeftFolder
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab, whole
from hpcllm.checkpoint.state import RunFacts
from hpcllm.checkpoint.writer import prepare, write
from hpcllm.config.schema import AdapterConfig, ModelConfig
from hpcllm.errors import ConfigError, HpcllmError, HuggingFaceError
from hpcllm.inference.generate import load_model
from hpcllm.model.initialisation import allocate
from hpcllm.model.shapes import adapter_shapes, parameter_shapes
from tests.checkpoint.huggingface import families
from tests.model.variants import GPT2, LLAMA
from tests.model.variants import whole as whole_span

pytestmark = [  # of PEFT and transformers about each other
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning", "UserWarning")
]
SIZES = {"layers": 2, "hidden": 24, "heads": 4, "ffn": 80, "vocabulary": 97, "max_sequence": 32}
MODELS = {
    "gpt2": ModelConfig(**SIZES, **GPT2),
    "llama": ModelConfig(**SIZES, **LLAMA, kv_heads=2, tied=False),
    "qwen2": ModelConfig(**SIZES, **(LLAMA | {"biases": "qkv"}), kv_heads=2),
}
TARGETS = {"gpt2": ("output", "up", "down"), "llama": ("query", "value", "gate", "down"), "qwen2": ("key", "up")}


def values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return 0.3 * torch.randn(shape, generator=generator) + ("norm.weight" in name)


def write_tensors(path: Path, shapes, facts: RunFacts) -> Path:
    specs = {f"model/{name}": DatasetSpec(shape, "float32") for name, shape in shapes.items()}
    plan = prepare(MPI.COMM_SELF, specs, [whole(name, spec.shape) for name, spec in specs.items()])

    def tensor(slab: Slab) -> np.ndarray:
        return values(slab.dataset.removeprefix("model/"), slab.shape).numpy()

    return write(path, MPI.COMM_SELF, plan, tensor, facts.attributes()).path


def adapters_on(folder: Path, name: str, held: str = "compute", targets=()) -> tuple[Path, Path, AdapterConfig]:
    """A base, a checkpoint of adapters on it, and what they are."""
    model = MODELS[name]
    adapter = AdapterConfig(rank=3, alpha=4.5, targets=targets or TARGETS[name], base=held)
    base = write_tensors(folder / "base.h5", parameter_shapes(model), never_trained(model))
    with Checkpoint.open(base) as checkpoint:
        facts = PeftFolder(folder, base, model, adapter, {}, {}).facts(fingerprint(checkpoint, None))
    return base, write_tensors(folder / "adapters.h5", adapter_shapes(model, adapter), facts), adapter


def ours(model: ModelConfig, adapter: AdapterConfig) -> torch.Tensor:
    """Logits of the decoder as a run has it."""
    decoder = allocate(model, whole_span(model), adapter=adapter)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.copy_(values(name, tuple(weight.shape)))
        for name, weight in decoder.quantised.items():
            weight.set(values(name, weight.shape))
        return decoder(families.tokens())


def theirs(folder: Path) -> torch.Tensor:
    return families.logits(transformers.AutoModelForCausalLM.from_pretrained(folder), families.tokens())


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("held", ["compute", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_merged_weights_compute_in_transformers_what_the_run_computed(name, held, tmp_path):
    _, path, adapter = adapters_on(tmp_path, name, held)
    want = ours(MODELS[name], adapter)
    convert(path, tmp_path / "merged", None)
    close(theirs(tmp_path / "merged"), want)
    with torch.no_grad():
        decoder = load_model(path, path.is_dir(), torch.float32, torch.device("cpu"), None)  # as `generate` does
        close(decoder(families.tokens()), want)
    convert(tmp_path / "base.h5", tmp_path / "plain", None)
    assert (theirs(tmp_path / "plain") - want).abs().max() > 0.05 * want.abs().max()  # adapters matter


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("held", ["compute", "int4"])
def test_ranks_merge_together_and_any_box_is_the_same(comm, shared_path, held):
    if comm.rank == 0:
        adapters_on(shared_path, "llama", held)
    comm.Barrier()
    convert(shared_path / "adapters.h5", shared_path / "merged", comm)
    with Checkpoint.open(shared_path / "adapters.h5", comm) as checkpoint, open_merged(checkpoint) as merged:
        for name in ("model/blocks.1.ffn.down.weight", "model/blocks.0.attention.key.weight"):
            everything = merged.read(whole(name, merged.specs[name].shape))
            box = merged.read(Slab(name, (1, 5), (7, 11)))
            np.testing.assert_allclose(box, everything[1:8, 5:16], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_pefts_computes_the_same_there_and_comes_back_bit_for_bit(name, tmp_path):
    peft = pytest.importorskip("peft", reason="needs PEFT: pip install peft")
    base, path, adapter = adapters_on(tmp_path, name)
    convert(base, tmp_path / "folder", None)
    convert(path, tmp_path / "peft", None, adapter=True, base=tmp_path / "folder")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    model = peft.PeftModel.from_pretrained(plain, tmp_path / "peft")
    close(families.logits(model, families.tokens()), ours(MODELS[name], adapter))
    convert(tmp_path / "peft", tmp_path / "back.h5", None)
    with Checkpoint.open(path) as before, Checkpoint.open(tmp_path / "back.h5") as after:
        assert {key for key in before.datasets if key.startswith("model/")} == set(after.datasets)
        for key in after.datasets:
            assert before.read_whole(key).tobytes() == after.read_whole(key).tobytes(), key
    convert(tmp_path / "back.h5", tmp_path / "merged", None)
    close(theirs(tmp_path / "merged"), ours(MODELS[name], adapter))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_folder_that_peft_wrote_is_read(name, tmp_path):
    peft = pytest.importorskip("peft", reason="needs PEFT: pip install peft")
    base, _, _ = adapters_on(tmp_path, name)
    convert(base, tmp_path / "folder", None)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["k_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(plain, settings)
    model.save_pretrained(tmp_path / "peft")
    convert(tmp_path / "peft", tmp_path / "theirs.h5", None)
    convert(tmp_path / "theirs.h5", tmp_path / "merged", None)
    close(theirs(tmp_path / "merged"), families.logits(model.eval(), families.tokens()))


WRONG = {
    "DoRA": ({"use_dora": True}, "use_dora"),
    "ranks by layer": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    "another kind": ({"peft_type": "IA3"}, "peft_type"),
    "another rank": ({"r": 5}, "has shape"),
    "no base": ({"base_model_name_or_path": "no/such"}, "is not there"),
    "a rank that is no number": ({"r": "8"}, "r = '8'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_plain_adapter_is_refused(case, tmp_path):
    changed, said = WRONG[case]
    _, path, _ = adapters_on(tmp_path, "llama")
    convert(path, tmp_path / "peft", None, adapter=True)
    file = tmp_path / "peft" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(HpcllmError, match=said):
        convert(tmp_path / "peft", tmp_path / "back.h5", None)
    assert not (tmp_path / "back.h5").exists()


def test_fused_layers_and_whole_weights_do_not_become_a_folder_of_pefts(tmp_path):
    base, path, _ = adapters_on(tmp_path, "gpt2", targets=("query", "up"))
    with pytest.raises(HuggingFaceError, match=r"attention\.query as a part of a larger layer"):
        convert(path, tmp_path / "peft", None, adapter=True)
    with pytest.raises(HuggingFaceError, match="holds whole weights"):
        convert(base, tmp_path / "peft", None, adapter=True)
    assert not (tmp_path / "peft").exists()


def test_another_base_is_refused(tmp_path):
    _, path, _ = adapters_on(tmp_path, "llama")
    other = write_tensors(tmp_path / "other.h5", parameter_shapes(MODELS["qwen2"]), never_trained(MODELS["qwen2"]))
    with pytest.raises(ConfigError, match="holds adapters of weights with the fingerprint"):
        convert(path, tmp_path / "merged", None, base=other)
