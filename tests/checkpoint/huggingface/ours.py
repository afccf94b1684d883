"""Checkpoints with random weights, written without a model: each tensor a function of its name alone."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.checkpoint.huggingface.convert import never_trained
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.slabs import whole
from hpcllm.checkpoint.writer import prepare, write
from hpcllm.config.schema import ModelConfig
from hpcllm.model.shapes import parameter_shapes

TOKENIZER = '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "</s>", "special": true}]}'


def values(name: str, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """As a checkpoint has them: bfloat16 as uint16."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    tensor = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).to(getattr(torch, dtype))
    return tensor.view(torch.uint16).numpy() if dtype == "bfloat16" else tensor.numpy()


def checkpoint_of(path: Path, model: ModelConfig, dtype: str = "float32", tokenizer: str = TOKENIZER) -> Path:
    """Written by the calling process alone."""
    shapes = {f"model/{name}": shape for name, shape in parameter_shapes(model).items()}
    specs = {name: DatasetSpec(shape, dtype) for name, shape in shapes.items()}
    tensors = {name: values(name, shape, dtype) for name, shape in shapes.items()}
    if tokenizer:
        text = np.frombuffer(tokenizer.encode(), np.uint8)
        specs["tokenizer"] = DatasetSpec(text.shape, "uint8")
        tensors["tokenizer"] = text
    plan = prepare(MPI.COMM_SELF, specs, [whole(name, spec.shape) for name, spec in specs.items()])
    return write(path, MPI.COMM_SELF, plan, lambda slab: tensors[slab.dataset], never_trained(model).attributes()).path
