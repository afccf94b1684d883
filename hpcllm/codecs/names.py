"""Names of codecs, and what follows from a name without running the codec. Pure: no torch.

int8:256:sr        kind : values in a block, or bits a value for zfp : sr for stochastic rounding
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = tuple(32 << k for k in range(8))  # 32 to 4096: multiples of the 32 lanes that the GPU kernels work in
ZFP_RATES = tuple(range(3, 33))  # below 2.25 the library itself breaks
DEFAULTS = {"raw": 0, "bf16": 0, "fp16": 0, "fp8": 128, "int8": 256, "int4": 128, "exp": 0, "zfp": 16, "mpc": 0}
CHOICES = {"fp8": BLOCKS, "int8": BLOCKS, "int4": BLOCKS, "zfp": ZFP_RATES}
STOCHASTIC = ("int8", "int4")


@dataclass(frozen=True)
class CodecName:
    kind: str
    parameter: int = 0
    stochastic: bool = False

    def __str__(self) -> str:
        return ":".join([self.kind, *([str(self.parameter)] if self.parameter else []), *["sr"] * self.stochastic])

    @property
    def lossless(self) -> bool:
        return self.kind in ("raw", "exp", "mpc")

    def bits(self, value_bits: int) -> float:
        """Return the bits of a value on the wire, metadata included; for exp and mpc those of measured gradients."""
        if self.kind in ("int8", "int4"):
            return int(self.kind[3:]) + 32 / self.parameter
        measured = {"exp": {16: 11.4, 32: 27.4}, "mpc": {16: 12.5, 32: 29.1}}
        scaled = 8 + 32 / max(1, self.parameter)
        fixed = {"raw": value_bits, "bf16": 16, "fp16": 16, "fp8": scaled, "zfp": self.parameter}
        return fixed[self.kind] if self.kind in fixed else measured[self.kind][value_bits]


def parse_name(text: str) -> CodecName:
    """Parse 'int8' or 'INT8:128:sr', defaults filled in. Raises ValueError with what would be valid."""
    kind, *rest = text.lower().split(":")
    if kind not in DEFAULTS:
        import difflib  # only where a mistake is explained

        close = difflib.get_close_matches(kind, DEFAULTS, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"codec {text!r} is unknown; {hint}valid: {', '.join(examples())}")
    stochastic = rest[-1:] == ["sr"]
    if stochastic:
        rest.pop()
        if kind not in STOCHASTIC:
            raise ValueError(f"codec {text!r}: only {' and '.join(STOCHASTIC)} round stochastically")
    if not rest:
        return CodecName(kind, DEFAULTS[kind], stochastic)
    choices = CHOICES.get(kind, ())
    if len(rest) > 1 or not rest[0].isascii() or not rest[0].isdigit() or int(rest[0]) not in choices:
        valid = f"{kind}:{choices[0]} to {kind}:{choices[-1]}" if choices else f"{kind} alone, it takes no parameter"
        powers = " in powers of two" if choices is BLOCKS else ""
        raise ValueError(f"codec {text!r} is unknown; valid: {valid}{powers}")
    return CodecName(kind, int(rest[0]), stochastic)


def examples() -> list[str]:
    """Return one name of each kind."""
    return [str(CodecName(kind, parameter)) for kind, parameter in DEFAULTS.items()]
