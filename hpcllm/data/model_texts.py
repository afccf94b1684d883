"""Texts that lie beside weights: the tokenizer and the chat template of a checkpoint or a Hugging Face folder.

    checkpoint            /tokenizer        data@template, data@template_variables
    Hugging Face folder   tokenizer.json    a template file, or chat_template of tokenizer_config.json

A fine-tuning has to give each token the number that the weights know it by; `generate --chat` renders as they were
taught, and ends where they end a turn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcllm.checkpoint.huggingface.folder import TOKENIZER_FILE, read_contents, which
from hpcllm.checkpoint.layout import TEMPLATE, TEMPLATE_VARIABLES
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import tokenizer_json
from hpcllm.config.schema import Config
from hpcllm.data.chat_template import NO_TEMPLATE, TEMPLATES, TemplateSource, own_template
from hpcllm.data.store import TokenStore, variables_of
from hpcllm.errors import ConfigError, DataError
from hpcllm.system.text import printable


@dataclass(frozen=True)
class ModelTexts:
    """Texts beside weights. tokenizer_json: "" if there is none. template: NO_TEMPLATE if there is none."""

    tokenizer_json: str
    template: TemplateSource


def model_texts(path: Path) -> ModelTexts:
    """Read the texts beside the weights of `path`. Not collective. Raises UserError, CheckpointError."""
    path, is_folder = which(path)
    if is_folder:
        try:
            template = own_template(path)
        except DataError:  # most base models have none
            template = NO_TEMPLATE
        return ModelTexts(read_contents(path).texts.get(TOKENIZER_FILE, ""), template)
    with Checkpoint.open(path) as file:
        text = str(file.attributes.get(TEMPLATE, ""))
        variables = variables_of(file.attributes.get(TEMPLATE_VARIABLES, ""))
        return ModelTexts(tokenizer_json(file), _source(text, variables))


def check_fit(config: Config, store: TokenStore) -> list[str]:
    """Compare the texts beside the weights of run.start_from with those of the store. Returns notes for people.

    A store may have more tokens than the weights were taught. Not collective. Raises ConfigError where a fine-tuning
    would read other tokens; plain training may mean to, and gets a note. UserError, CheckpointError of the weights.
    """
    path = Path(config.run.start_from)
    weights = model_texts(path)
    differ = other_token(weights.tokenizer_json, store.tokenizer_json)
    if differ and config.finetuning.kind != "none":
        raise ConfigError(
            f"{str(store.path)!r} was not tokenized as run.start_from = {str(path)!r} has learned it: {differ}; "
            f"prepare it with --tokenizer {path}"
        )
    notes = [f"note: the tokens of {str(store.path)!r} are not those of the weights: {differ}"] if differ else []
    taught, now = weights.template.text, store.header.template
    if taught and now and taught != now:
        notes.append("note: the chats are rendered by another template than that beside the weights")
    return notes


def other_token(taught: str, now: str) -> str:
    """Name the first token of a tokenizer that another one does not number alike; "" if there is none."""
    if not taught:
        return ""
    known, found = tokens_of(taught), tokens_of(now)
    differ = [token for token, number in known.items() if found.get(token) != number]
    if not differ:
        return ""
    first = min(differ, key=known.__getitem__)
    return f"{first!r} is token {known[first]} there, and {found.get(first, 'none')} of the store"


def tokens_of(tokenizer_json: str) -> dict[str, int]:
    """Map the tokens of a tokenizer, those of its vocabulary and added ones, to their numbers. Raises DataError."""
    try:
        facts: dict[str, Any] = json.loads(tokenizer_json)
        vocabulary = (facts.get("model") or {}).get("vocab") or {}
        added = {each["content"]: each["id"] for each in facts.get("added_tokens") or ()}
        return {str(token): int(number) for token, number in {**vocabulary, **added}.items()}
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"a tokenizer cannot be read: {printable(f'{type(error).__name__}: {error}'[:100])}") from error


def _source(text: str, variables: dict[str, str]) -> TemplateSource:
    """Name the template of a text; it runs in this process only if it is one of ours."""
    is_ours = any(text == ours.text for ours in TEMPLATES.values())
    return TemplateSource(text, variables=variables, is_ours=is_ours) if text else NO_TEMPLATE
