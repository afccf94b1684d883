"""Check that a run file continues the run of a checkpoint: the same model, samples and tokens. Pure.

checkpoint: run/config, fingerprint of tokens and tokenizer  |
run file, filled in; store: its fingerprint                  +--> equal, in whatever spelling | the changed keys, named
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcllm.checkpoint.huggingface.architectures import canonical
from hpcllm.config.schema import Config, from_tables, to_tables
from hpcllm.errors import ConfigError

if TYPE_CHECKING:
    from hpcllm.checkpoint.state import RunFacts
    from hpcllm.data.store import TokenStore

# besides the model: other values would silently train on other samples, or from other weights
FIXED = ("run.seed", "data.sequence_length")


def check_same_run(config: Config, store: TokenStore, before: RunFacts, tokenizer: str, path: Path) -> None:
    """Raise ConfigError if going on from a checkpoint under this run file would silently train something else.

    config: filled in. before, tokenizer: of the checkpoint at `path`. One that `convert` made knows no tokens, but
    their tokenizer.
    """
    then, now = map(_flat, _one_spelling(before.config, to_tables(config)))
    fixed = [key for key in now if key.startswith("model.") or key in FIXED]
    changed = [f"{key} = {now[key]!r}, was {then.get(key)!r}" for key in fixed if now[key] != then.get(key)]
    if before.fingerprint and before.fingerprint != store.fingerprint:
        changed.insert(
            0,
            f"data.store = {now['data.store']!r} holds other tokens, fingerprint {store.fingerprint}, than "
            f"{then.get('data.store')!r} did, fingerprint {before.fingerprint}",
        )
    elif tokenizer != store.tokenizer_json:
        changed.append(f"data.store = {now['data.store']!r} has another tokenizer than {then.get('data.store')!r}")
    if changed:
        raise ConfigError(
            f"{path} was trained otherwise: {'; '.join(changed[:3])}. Take the old values (--set KEY=VALUE), go on "
            "from its weights under another run.name with run.start_from, or start anew with --restart (the old run "
            "folder is kept beside)"
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
