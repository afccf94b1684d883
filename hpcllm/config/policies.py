"""Codecs of each kind of traffic, by policy or by key. Pure.

    gradients    summed over dp, bucket by bucket        forward     activations, stage to stage
    parameters   gathered over dp (sharded optimizer)    backward    their gradients, stage to stage
    tensor       activations and their gradients inside the layers that tp splits

`mzhybrid` and `zhybrid` are those of arXiv:2409.02423: lossless MPC, or mild zfp, where the model is split, and strong
zfp on the gradients. `hpcllm` is ours: block int8 for gradients, whose error stays flat in the number of ranks, and
lossless exponent coding where the model is split.
"""

from __future__ import annotations

from hpcllm.codecs.names import parse_name
from hpcllm.errors import ConfigError

TRAFFIC = ("gradients", "parameters", "forward", "backward", "tensor")
POLICIES = {
    "none": {},
    "mzhybrid": {"gradients": "zfp:8", **dict.fromkeys(("parameters", "forward", "backward", "tensor"), "mpc")},
    "zhybrid": {"gradients": "zfp:8", **dict.fromkeys(("parameters", "forward", "backward", "tensor"), "zfp:16")},
    "hpcllm": {"gradients": "int8:256", **dict.fromkeys(("parameters", "forward", "backward", "tensor"), "exp")},
}
FEEDBACK = "+ef"  # after the name of a lossy codec of gradients: with error feedback


def codecs_of(policy: str, chosen: dict[str, str]) -> dict[str, str]:
    """Kind of traffic -> codec name, "raw" where neither the run file nor the policy names one. Raises ConfigError.

    chosen: what the run file says of each kind; an empty string leaves it to the policy.
    """
    codecs = {kind: chosen.get(kind, "").lower() or POLICIES[policy].get(kind, "raw") for kind in TRAFFIC}
    for kind, name in codecs.items():
        key = f"communication.{kind} = {name!r}"
        try:
            parsed = parse_name(name.removesuffix(FEEDBACK))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
        if name.endswith(FEEDBACK) and (kind != "gradients" or parsed.lossless):
            why = "error feedback makes up for what a lossy codec of gradients loses"
            raise ConfigError(f"{key}: {why}; valid here: {str(parsed)!r}")
        if parsed.stochastic and kind != "gradients":
            why = "stochastic rounding is for sums, whose errors it averages out"
            raise ConfigError(f"{key}: {why}; valid here: {str(parsed).removesuffix(':sr')!r}")
    return codecs


def is_exact(parameter: str, words: str) -> bool:
    """True if a parameter's gradient travels exactly: one of `words` (comma-separated) stands in its name."""
    return any(word in parameter for word in words.split(",") if word)
