"""Jobs that a test starts beside itself."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """Without what this process's own MPI has left in it; root may start jobs, and hpcllm is found."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PMIX_", "PRTE_", "PMI_", "OMPI_COMM_"))}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | allowed | {"PYTHONPATH": str(ROOT)}
