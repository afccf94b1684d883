"""Rotary positions in a config.json <-> ours. Pure.

    transformers 4    "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, ...}   or {"type": ...}
    transformers 5    "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, ...}

Both are read. The first is written, for version 5 understands it and version 4 nothing else.
"""

from __future__ import annotations

from typing import Any

from hpcllm.config import ModelConfig
from hpcllm.interchange.settings import Settings

_KINDS = {"default": "none", "linear": "linear", "llama3": "llama3"}
_KEYS = {
    "rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
}  # fmt: skip
_NOTHING = Settings({}, "config.json")


def read_rope(
    settings: Settings, max_sequence: int, theta_key: str, fraction_key: str, fraction: float
) -> dict[str, Any]:
    """Our rope_* fields. theta_key, fraction_key: where version 4 has the base and the share of channels that turn.

    fraction: what is meant where neither says a share. Raises InterchangeError for a kind that we do not have, or a key
    that we do not know.
    """
    scaling, parameters = settings.table("rope_scaling"), settings.table("rope_parameters")
    table = scaling or parameters or _NOTHING
    theta, share = settings.number(theta_key, 10000.0), settings.number(fraction_key, fraction)
    given = table.keys()
    for key in given - _KEYS:
        table.refuse(key, f"is not known of rotary positions; valid: {', '.join(sorted(_KEYS))}")
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
    """The keys of version 4, the turning share aside."""
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
