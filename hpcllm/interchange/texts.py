"""The small files of a Hugging Face folder: those that the weights came with, or new ones that say the same.

config.json             the architecture
generation_config.json  where a text begins and ends
tokenizer.json          as the run had it; tokenizer_config.json: how transformers should load it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpcllm.checkpoint.layout import Attribute
from hpcllm.config import ModelConfig
from hpcllm.data.tokenizer import END_OF_TEXT_NAMES
from hpcllm.interchange.architectures import Architecture, canonical, read_model, write_model
from hpcllm.interchange.contents import COMPANIONS, CONFIG, TOKENIZER_FILE
from hpcllm.interchange.importing import CARRIED
from hpcllm.interchange.settings import Settings


def as_json(table: dict[str, Any]) -> str:
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


def texts_of(
    attributes: Mapping[str, Attribute], tokenizer: str, model: ModelConfig, kind: str, dtype: str, keeps_types: bool
) -> tuple[Architecture, dict[str, str]]:
    """The architecture to write, and what stands in each small file.

    attributes, tokenizer: of the checkpoint. kind: of architecture, "" for the one that the weights came in, else the
    first that can say the model. dtype: of the weights; keeps_types: none were rounded to it. Raises InterchangeError.
    """
    words = {TOKENIZER_FILE: tokenizer} if tokenizer else {}
    names = {file: f"{CARRIED}/{file}" for file in (CONFIG, *COMPANIONS)}
    carried = {file: str(attributes[name]) for file, name in names.items() if name in attributes}
    if CONFIG in carried:
        table = json.loads(carried[CONFIG])
        architecture, before = read_model(Settings(table, CONFIG))
        if kind in ("", architecture.kind) and before == canonical(model):
            if not keeps_types:
                carried[CONFIG] = as_json({**table, "dtype" if "dtype" in table else "torch_dtype": dtype})
            return architecture, {**carried, **words}
    architecture, table = write_model(model, kind)
    return architecture, {**_new(table, tokenizer, dtype, model), **words}


def _new(table: dict[str, Any], tokenizer: str, dtype: str, model: ModelConfig) -> dict[str, str]:
    content, end = _end_of_text(tokenizer) if tokenizer else (None, None)
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}  # as GPT-2: one token parts texts
    texts = {CONFIG: as_json({**table, **ids, "torch_dtype": dtype}), "generation_config.json": as_json(ids)}
    if content:
        names = {"bos_token": content, "eos_token": content, "clean_up_tokenization_spaces": False}
        loads = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.max_sequence}
        texts["tokenizer_config.json"] = as_json({**loads, **names})
    return texts


def _end_of_text(tokenizer: str) -> tuple[str | None, int | None]:
    """The special token between texts, as `data.tokenizer` finds it, but without the library."""
    added = json.loads(tokenizer).get("added_tokens", [])
    special = {token["content"]: token["id"] for token in added if token.get("special")}
    return next(((name, special[name]) for name in END_OF_TEXT_NAMES if name in special), (None, None))
