"""Read a config.json from anywhere key by key: a wrong type, or a value that we do not compute, is rejected. Pure.

settings.whole("hidden_size")              -> 4096, or "config.json: hidden_size = '4096' should be a whole number"
settings.only("mlp_bias", False, (False,)) -> False, or "config.json: mlp_bias = True ...; valid: False"
settings.unknown_keys()                    -> keys that were not read and that are not known to be harmless

Rotary positions have two spellings. Both are read; the first is written, for version 5 understands it and version 4
nothing else:

    transformers 4    "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, ...}   or {"type": ...}
    transformers 5    "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, ...}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from hpcllm.config.schema import ModelConfig
from hpcllm.errors import HuggingFaceError
from hpcllm.system.text import printable

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
_KINDS = {"default": "none", "linear": "linear", "llama3": "llama3"}
_KEYS = {
    "rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
}  # fmt: skip


class Settings:
    """The keys of one table. `where` is shown in front of each error."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table, self.where = table, where
        self._read: set[str] = set()

    def whole(self, key: str, default: int | None = None, other: str = "", most: int = 2**31) -> int:
        """A whole number from 1 to `most`. other: a second name of the key. Without a default the key must exist."""
        kind = f"a whole number from 1 to {most}"
        return int(self._take(key, default, other, kind, lambda v: type(v) is int and 1 <= v <= most))

    def whole_or_null(self, key: str, default: int | None) -> int | None:
        """A whole number from 1 on; None for null."""
        return None if self.get(key, default) is None else self.whole(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._take(key, default, "", "a finite number", _is_number))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._take(key, default, "", "true or false", lambda v: isinstance(v, bool)))

    def only(self, key: str, default: Any, valid: Sequence[Any]) -> Any:
        """One of a few values; any other would change the arithmetic to one that we do not have."""
        value = self.get(key, default)
        if value not in valid:
            shown = ", ".join(repr(item) for item in valid)
            self.reject(key, f"is not of this architecture as it is computed here; valid: {shown}")
        return value

    def keys(self) -> Set[str]:
        return self._table.keys()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, whatever it is."""
        self._read.add(key)
        return self._table.get(key, default)

    def table(self, key: str) -> Settings | None:
        """A table inside this one; None where the key is missing, null or empty."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            self.reject(key, "should be a table")
        return Settings(value, f"{self.where}: {key}") if value else None

    def reject(self, key: str, why: str) -> None:
        """Raises HuggingFaceError, always."""
        value = self._table.get(key, _MISSING)
        shown = f"{key} is missing, and" if value is _MISSING else f"{key} = {printable(repr(value)[:200])}"
        raise HuggingFaceError(f"{self.where}: {shown} {why}")

    def unknown_keys(self) -> list[str]:
        """Keys with a value that were not read and that are not known to be harmless."""
        rest = self._table.keys() - self._read - _HARMLESS
        return sorted(printable(key) for key in rest if self._table[key] not in (None, False, {}, []))

    def _take(self, key: str, default: Any, other: str, kind: str, holds: Callable[[Any], bool]) -> Any:
        self._read.update({key, other})
        key = other if other and key not in self._table and other in self._table else key
        value = self._table.get(key, default)
        if not holds(value):
            self.reject(key, f"should be {kind}")
        return value


def _is_number(value: Any) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or (type(value) is int and abs(value) < 2**53)


def read_rope(
    settings: Settings, max_sequence: int, theta_key: str, fraction_key: str, fraction: float
) -> dict[str, Any]:
    """Read our rope_* fields. theta_key, fraction_key: version 4's keys of base and share of turning channels.

    fraction: default share. Raises HuggingFaceError for a kind that we do not have, or a key that we do not know.
    """
    scaling, parameters = settings.table("rope_scaling"), settings.table("rope_parameters")
    table = scaling or parameters or Settings({}, "config.json")
    theta, share = settings.number(theta_key, 10000.0), settings.number(fraction_key, fraction)
    given = table.keys()
    for key in given - _KEYS:
        table.reject(key, f"is not known of rotary positions; valid: {', '.join(sorted(_KEYS))}")
    kind = table.only("rope_type" if "rope_type" in given else "type", "default", tuple(_KINDS))
    ours = {
        "rope_theta": table.number("rope_theta", theta),
        "rope_fraction": table.number("partial_rotary_factor", share),
        "rope_scaling": _KINDS[kind],
    }
    if kind != "default":
        ours["rope_factor"] = table.number("factor")
    if kind == "llama3":
        outside = settings.whole_or_null("original_max_position_embeddings", None)
        ours |= {
            "rope_low_frequency": table.number("low_freq_factor"),
            "rope_high_frequency": table.number("high_freq_factor"),
            "rope_original_sequence": outside or table.whole("original_max_position_embeddings", max_sequence),
        }
    return ours


def write_rope(model: ModelConfig, theta_key: str) -> dict[str, Any]:
    """Write the keys of version 4, but for the share of channels that turn."""
    scaling: dict[str, Any] | None = None
    if model.rope_scaling != "none":
        scaling = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if scaling and model.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": model.rope_low_frequency,
            "high_freq_factor": model.rope_high_frequency,
            "original_max_position_embeddings": model.rope_original_sequence,
        }
    return {theta_key: model.rope_theta, "rope_scaling": scaling}
