"""What stands on the command line of `schedule`, checked: a mistake is named with what would be valid. Pure."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from pathlib import Path

from hpcllm.errors import ConfigError
from hpcllm.pipeline.timing import Times

PICTURES = (".svg", ".png")
UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
LARGEST_BYTES = 1 << 50
LONGEST = 1e9
KEYS = ("F", "B", "W", "send")
SHAPE = ("stages", "microbatches")  # needed
MORE = ("chunks", "times", "recompute", "bytes")
TAKES = {  # what each form of the command takes, beside --json and --draw
    "NAME": ("name", *SHAPE, *MORE, "write"),
    "custom": ("name", "file", "times", "recompute", "bytes"),
    "--compare": ("compare", *SHAPE, *MORE),
    "--measured": ("measured",),
}


def form(arguments: argparse.Namespace) -> str:
    """Which form of the command this is, a key of TAKES. Raises ConfigError for what does not go together."""
    found = "--compare" if arguments.compare else "--measured" if arguments.measured is not None else arguments.name
    found = found if found in TAKES else "NAME"
    needed = ("name", *SHAPE) if found == "NAME" else SHAPE if found == "--compare" else TAKES[found][:2]
    every = dict.fromkeys(option for options in TAKES.values() for option in options)
    given = [option for option in every if getattr(arguments, option) not in (None, False)]
    wrong = [_said(option) for option in given if option not in TAKES[found]]
    missing = [_said(option) for option in needed if option not in given]
    if wrong or missing:
        told = f"does not take {', '.join(wrong)}" if wrong else f"needs {', '.join(missing)}"
        raise ConfigError(f"schedule {found} {told}; it takes {', '.join(map(_said, TAKES[found]))}, --draw, --json")
    return found


def count(option: str, text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) < 1:
        raise ConfigError(f"--{option} {text!r} is no count; valid: 1 to 999999999")
    return int(text)


def times(text: str | None, recompute: bool) -> Times:
    """'F=1,B=2,W=1,send=0.1' -> Times. What is left out: F=1, B = 2 F, W = B / 2, send=0. Raises ConfigError."""
    given: dict[str, float] = {}
    for word in text.split(",") if text is not None else ():
        key, equals, value = word.strip().partition("=")
        if key not in KEYS or not equals or key in given:
            raise ConfigError(
                f"--times {text!r}: {word!r} is not one of {'=, '.join(KEYS)}=, each once, as in F=1,B=2,W=1"
            )
        given[key] = _duration(key, value)
    forward = given.get("F", 1.0)
    backward = given.get("B", 2 * forward)
    weight = given.get("W", backward / 2)
    if weight > backward:
        raise ConfigError(f"--times: W={weight:g} is a part of B={backward:g}; it can be that at most")
    return Times(forward, backward, weight, given.get("send", 0.0), recompute)


def message_bytes(text: str) -> int:
    """'4194304', '4MiB' or '1.5 GiB' -> bytes. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", text, re.ASCII)
    size = float(match[1]) * UNITS[match[2]] if match and match[2] in UNITS else 0.0
    if not 1 <= size <= LARGEST_BYTES or size != int(size):
        raise ConfigError(
            f"--bytes {text!r} is no size of a message; valid: 4194304, 512KiB, 4MiB, 1.5GiB, up to 1024TiB"
        )
    return int(size)


def picture(text: str) -> Path:
    """The path of a picture that can be drawn here. Raises ConfigError."""
    path = Path(text)
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"a picture {text!r} cannot be drawn; valid: a name that ends in {' or '.join(PICTURES)}")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"drawing {text!r} needs matplotlib: pip install 'hpcllm[plot]', or draw an .svg without it")
    return path


def _duration(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    positive = key in ("F", "B")
    if not 0 <= value <= LONGEST or (positive and value == 0):
        least = "above 0" if positive else "from 0"
        raise ConfigError(f"--times: {key}={text!r} is no time; valid: a number {least}, up to {LONGEST:g}")
    return value


def _said(option: str) -> str:
    return "NAME" if option == "name" else f"--{option}"
