"""How a process that a test starts gets the device: PyTorch calls this at its import (entry point torch.backends).

Found where tests/ is in PYTHONPATH, through tests/pretend_device-0.dist-info; without HPCLLM_PRETEND it does nothing.
"""

from __future__ import annotations

import os


def start() -> None:
    mode = os.environ.get("HPCLLM_PRETEND", "")
    if not mode:
        return
    import pretend

    if hasattr(pretend, "start") and not pretend.why_not():  # else it is just being imported, and has imported PyTorch
        pretend.start(open_=mode == "open")
