"""Weights of few bits in a Hugging Face folder: their names, layout and key of config.json. Pure.

    layer of a block     8 bits                                     4 bits
    NAME.weight          int8    (outputs, inputs)                  -
    NAME.weight_packed   -                                          int32 (outputs, inputs / 8): 8 inputs, the first
                                                                    one in the lowest bits, 8 added to each
    NAME.weight_scale    float32 (outputs, 1)                       float32 (outputs, inputs / group)
    NAME.weight_shape    -                                          int64 (2,): outputs, inputs

    value = whole number x scale of its row, or of its group of inputs; all other tensors are as in any folder

These are the formats "int-quantized" and "pack-quantized" of the library compressed-tensors, whose key
`quantization_config` of config.json says bits and group. Only what `hpcllm quantise` writes is read: symmetric, of the
linear layers of blocks, all alike. Source: github.com/vllm-project/compressed-tensors, README.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcllm.checkpoint.huggingface.settings import Settings
from hpcllm.checkpoint.huggingface.tensor_map import Names
from hpcllm.config.schema import GROUP, ModelConfig
from hpcllm.errors import HuggingFaceError, MeshError
from hpcllm.model.quantised import Quantisation
from hpcllm.model.shapes import parameter_shapes, split_dim

KEY = "quantization_config"
FORMATS = {8: "int-quantized", 4: "pack-quantized"}
LEAST_GROUP = 32  # inputs
SCALE, PACKED, SHAPE = "_scale", "_packed", "_shape"
Described = tuple[tuple[int, ...], str]  # shape and type of a tensor, as a header has it


def is_held(name: str, shape: tuple[int, ...]) -> bool:
    """True for a parameter of ours that is held in few bits: the weight of a linear layer of a block."""
    return name.startswith("blocks.") and len(shape) == 2


def choose_group(model: ModelConfig, bits: int) -> int:
    """Return the inputs with one scale: 0, all of a row, of 8 bits; of 4 bits 64 or 32. Raises HuggingFaceError."""
    inputs = {shape[1] for name, shape in parameter_shapes(model).items() if is_held(name, shape)}
    if bits == 8:
        return 0
    for group in (GROUP, LEAST_GROUP):
        if not any(each % group for each in inputs):
            return group
    raise HuggingFaceError(
        f"layers of {', '.join(map(str, sorted(inputs)))} inputs cannot be held in groups of 4 bits; valid: multiples "
        f"of {LEAST_GROUP}, or --bits 8"
    )


def check(names: Names, model: ModelConfig, how: Quantisation) -> None:
    """Raise HuggingFaceError where tensors of few bits cannot be those of a model."""
    if names.fused:
        raise HuggingFaceError(
            f"{names.prefix} has queries, keys and values in one tensor, which few bits are not written for; valid: "
            "models that llama, mistral or qwen2 can say"
        )
    if how.group:
        inputs = {shape[1] for name, shape in parameter_shapes(model).items() if is_held(name, shape)}
        if wrong := sorted(each for each in inputs if each % how.group):
            raise HuggingFaceError(f"layers of {wrong[0]} inputs do not divide into groups of {how.group}")


def check_cuts(model: ModelConfig, how: Quantisation, tp: int) -> None:
    """Raise MeshError if tp ranks would share a layer's inputs between cuts that lie inside of a group."""
    shapes = parameter_shapes(model)
    for name, shape in shapes.items():
        if is_held(name, shape) and split_dim(name) == 1 and shape[1] % (how.group * tp):
            raise MeshError(
                f"{name} has {shape[1]} inputs in groups of {how.group}, which {tp} ranks of tp would cut; valid: a tp "
                f"that leaves each a multiple of {how.group}"
            )


def tensors_of(name: str, shape: tuple[int, ...], how: Quantisation) -> dict[str, Described]:
    """Return the tensors that hold a weight (outputs, inputs), codes and scales first. name: of the weight, theirs."""
    outputs, inputs = shape
    if how.bits == 8:
        return {name: (shape, "I8"), name + SCALE: ((outputs, 1), "F32")}
    scales = (outputs, inputs // how.group)
    return {
        name + PACKED: ((outputs, inputs // 8), "I32"), name + SCALE: (scales, "F32"), name + SHAPE: ((2,), "I64"),
    }  # fmt: skip


def written(how: Quantisation, head: str) -> dict[str, Any]:
    """Return the value of the key of config.json. head: name of the output layer, which is left as it is."""
    strategy = {"strategy": "group", "group_size": how.group} if how.group else {"strategy": "channel"}
    weights = {"num_bits": how.bits, "type": "int", "symmetric": True, "dynamic": False, **strategy}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": FORMATS[how.bits], "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": [head],
    }  # fmt: skip


def read(table: Mapping[str, Any], where: str) -> Quantisation | None:
    """Read the key of a config.json; None where there is none. Raises HuggingFaceError for other ways than ours."""
    found = Settings(table, where).table(KEY)
    if found is None:
        return None
    found.only("quant_method", None, ("compressed-tensors",))
    form = found.only("format", None, tuple(FORMATS.values()))
    weights = _weights(found)
    bits = weights.only("num_bits", None, tuple(bits for bits, name in FORMATS.items() if name == form))
    weights.only("type", "int", ("int",))
    weights.only("symmetric", True, (True,))
    weights.only("strategy", None, ("channel",) if bits == 8 else ("group",))
    return Quantisation(bits, 0 if bits == 8 else weights.only("group_size", None, (GROUP, LEAST_GROUP)))


def _weights(found: Settings) -> Settings:
    """Return the table of the weights of the only group. Raises HuggingFaceError."""
    groups = found.table("config_groups")
    names = list(groups.keys()) if groups else []
    group = groups.table(names[0]) if groups and len(names) == 1 else None
    if group and not (group.get("input_activations") or group.get("output_activations")):
        weights = group.table("weights")
        if weights:
            return weights
    raise HuggingFaceError(f'{found.where}: config_groups should hold one group of "weights", and of nothing else')
