"""Lines of JSON that a killed job, a full disk or a person may have damaged: what can be read is read.

A log is never a reason not to train, so nothing here raises for what a file holds.
"""

from __future__ import annotations

import json
from typing import Any

MOST_BYTES = 1 << 20  # of a line; ours have about a thousandth of that
MOST_STEPS = 1 << 53  # all below are exact as a float


def record_of(line: bytes) -> dict[str, Any] | None:
    """Read an object that has a step, of any digits and nesting; None for anything else."""
    if len(line) > MOST_BYTES:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # no UTF-8, no JSON, too many digits, nested too deep
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < MOST_STEPS else None  # True is an int too, but no step
