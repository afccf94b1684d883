"""A config.json from anywhere, asked key by key: what is not of its type, or means what we do not compute, is refused.

settings.whole("hidden_size")              -> 4096, or "config.json: hidden_size = '4096' should be a whole number"
settings.only("mlp_bias", False, (False,)) -> False, or "config.json: mlp_bias = True ...; valid: False"
settings.passed_over()                     -> keys that nobody asked for and that are not known to be harmless
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from hpcllm.errors import InterchangeError
from hpcllm.printable import printable

# without effect on what a model computes when it is not trained, or never used by these architectures
_HARMLESS = {
    "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "bos_token_id", "classifier_dropout", "dtype",
    "embd_pdrop", "eos_token_id", "gradient_checkpointing", "hidden_dropout", "id2label", "initializer_range",
    "is_decoder", "label2id", "max_window_layers", "model_type", "n_ctx", "pad_token_id", "pretraining_tp",
    "reorder_and_upcast_attn", "resid_pdrop", "return_dict", "sliding_window", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "unk_token_id", "use_cache", "vocab_file",
}  # fmt: skip
_MISSING = object()


class Settings:
    """The keys of one table. `where` is shown in front of each complaint."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table, self.where = table, where
        self._asked: set[str] = set()

    def whole(self, key: str, default: int | None = None, other: str = "", most: int = 2**31) -> int:
        """A number from 1 to `most`. other: a second name of the key. Without a default the key must be there."""
        kind = f"a whole number from 1 to {most}"
        return int(self._take(key, default, other, kind, lambda v: type(v) is int and 1 <= v <= most))

    def whole_or_null(self, key: str, default: int | None) -> int | None:
        """A number from 1 on; None for null."""
        return None if self.get(key, default) is None else self.whole(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._take(key, default, "", "a finite number", _is_number))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._take(key, default, "", "true or false", lambda v: isinstance(v, bool)))

    def only(self, key: str, default: Any, valid: Sequence[Any]) -> Any:
        """One of a few values; what else there is changes the arithmetic to one that we do not have."""
        value = self.get(key, default)
        if value not in valid:
            shown = ", ".join(repr(item) for item in valid)
            self.refuse(key, f"is not of this architecture as it is computed here; valid: {shown}")
        return value

    def keys(self) -> Set[str]:
        return self._table.keys()

    def get(self, key: str, default: Any = None) -> Any:
        """Whatever the key holds."""
        self._asked.add(key)
        return self._table.get(key, default)

    def table(self, key: str) -> Settings | None:
        """A table inside this one; None where the key is missing, null or empty."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            self.refuse(key, "should be a table")
        return Settings(value, f"{self.where}: {key}") if value else None

    def refuse(self, key: str, why: str) -> None:
        """Raises InterchangeError, always."""
        value = self._table.get(key, _MISSING)
        shown = f"{key} is missing, and" if value is _MISSING else f"{key} = {printable(repr(value)[:200])}"
        raise InterchangeError(f"{self.where}: {shown} {why}")

    def passed_over(self) -> list[str]:
        """Keys that say something, that nobody asked for, and that are not known to be harmless."""
        rest = self._table.keys() - self._asked - _HARMLESS
        return sorted(printable(key) for key in rest if self._table[key] not in (None, False, {}, []))

    def _take(self, key: str, default: Any, other: str, kind: str, holds: Callable[[Any], bool]) -> Any:
        self._asked.update({key, other})
        key = other if other and key not in self._table and other in self._table else key
        value = self._table.get(key, default)
        if not holds(value):
            self.refuse(key, f"should be {kind}")
        return value


def _is_number(value: Any) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or (type(value) is int and abs(value) < 2**53)
