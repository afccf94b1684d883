"""Check that a run file continues the run of a checkpoint: the same model, samples and tokens. Pure.

checkpoint: run/config, fingerprint of tokens and tokenizer  |
run file, filled in; store: its fingerprint                  +--> equal, in whatever spelling | the changed keys, named
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcllm.checkpoint.folder import newest_first
from hpcllm.checkpoint.huggingface.architectures import canonical
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.state import facts
from hpcllm.config.schema import Config, from_tables, to_tables
from hpcllm.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from hpcllm.checkpoint.state import RunFacts
    from hpcllm.data.store import TokenStore

# besides the model and [finetuning]: other values would silently train on other samples, or from other weights
FIXED = ("run.seed", "data.sequence_length", "data.document_mask", "data.packing")
FREE = ("finetuning.reward.limit_s",)  # of which nothing that is learned depends
BEFORE_MASKS: dict[str, Any] = {"document_mask": False, "packing": "stream"}  # keys of [data] that older runs lack


def check_same_run(config: Config, store: TokenStore, before: RunFacts, tokenizer: str, path: Path) -> None:
    """Raise ConfigError if going on from a checkpoint under this run file would silently train something else.

    config: filled in. before, tokenizer: of the checkpoint at `path`. One that `convert` made knows no tokens, but
    their tokenizer.
    """
    filled = {"data": BEFORE_MASKS, "finetuning": to_tables(Config())["finetuning"]}  # in records of older versions
    begun = {**before.config, **{name: keys | before.config.get(name, {}) for name, keys in filled.items()}}
    then, now = map(_flat, _one_spelling(begun, to_tables(config)))
    fixed = [k for k in now if (k.startswith(("model.", "finetuning.")) or k in FIXED) and k not in FREE]
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


def as_begun(config: Config) -> Config:
    """Take the keys that a run was begun without, where its folder has checkpoints of a version before them.

    Reads the newest checkpoint's record of the run file alone; check_same_run compares it with the rest. Not
    collective.
    """
    folder = Path(config.run.folder) / config.run.name
    path = next(iter(newest_first(folder / "checkpoints")), None)
    if path is None:
        return config
    try:
        with Checkpoint.open(path) as checkpoint:
            known = facts(checkpoint).config.get("data", {})
    except CheckpointError:  # damaged: resume says it, and looks at an older one
        return config
    missing = {key: value for key, value in BEFORE_MASKS.items() if known and key not in known}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **missing))


def _one_spelling(*files: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Write models alike that compute the same: a preset or its keys written out, kv_heads = heads or 0."""
    try:
        models = [canonical(from_tables(dict(tables)).model) for tables in files]
    except ConfigError:  # a checkpoint of another version of hpcllm: compared as it is
        return list(files)
    return [{**tables, "model": dataclasses.asdict(model)} for tables, model in zip(files, models, strict=True)]


def _flat(tables: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{key}.")
        else:
            found[above + key] = tuple(value) if isinstance(value, list) else value  # TOML has lists, a Config tuples
    return found
