"""Check that a run file continues the run of a checkpoint: the same model, samples and tokens. Pure.

checkpoint: run/config, tokenizer     |
run file, filled in; store: tokenizer +--> equal, in whatever spelling | the changed keys, named
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcllm.checkpoint.huggingface.architectures import canonical
from hpcllm.config.schema import Config, from_tables, to_tables
from hpcllm.errors import ConfigError

# besides the model: other values would silently train on other samples, or from other weights
FIXED = ("run.seed", "data.sequence_length")


def check_same_run(config: Config, tokens: str, stored: Mapping[str, Any], tokenizer: str, path: Path) -> None:
    """Raise ConfigError if going on from a checkpoint under this run file would silently train something else.

    config: filled in. stored: the run file in the checkpoint at `path`. tokens, tokenizer: JSON of
    the tokenizers of the store and of the checkpoint.
    """
    before, now = map(_flat, _one_spelling(stored, to_tables(config)))
    fixed = [key for key in now if key.startswith("model.") or key in FIXED]
    changed = [f"{key} = {now[key]!r}, was {before.get(key)!r}" for key in fixed if now[key] != before.get(key)]
    if tokenizer != tokens:
        changed.append(f"data.store = {now['data.store']!r} has another tokenizer than {before.get('data.store')!r}")
    if changed:
        raise ConfigError(
            f"{path} was trained otherwise: {'; '.join(changed[:3])}. Take the old values, another run.name, "
            "or start anew with --restart (the old run folder is kept beside)"
        )


def _one_spelling(*files: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Write models alike that compute the same: a preset or its keys written out, kv_heads = heads or 0."""
    try:
        models = [canonical(from_tables(dict(tables)).model) for tables in files]
    except ConfigError:  # a checkpoint of another version of hpcllm: compared as it is
        return list(files)
    return [{**tables, "model": dataclasses.asdict(model)} for tables, model in zip(files, models, strict=True)]


def _flat(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}
