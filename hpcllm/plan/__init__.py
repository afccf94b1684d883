"""What a run will take, and which layout is best, before it is started. Pure: no torch, no MPI.

machine.py, models.py, layouts.py   what is planned for; stages.py: which blocks each stage has
fitting.py, run_config.py           whether it can be, and as a run file
time/, network/, memory/            a step's work, its messages, and what it holds
prediction.py, training.py          a step, and a whole training
searching/                          the best layouts
command/                            `python -m hpcllm plan` and `memory`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcllm.plan.layouts import Layout
    from hpcllm.plan.machine import Machine, read_machine
    from hpcllm.plan.models import Model, read_model
    from hpcllm.plan.prediction import Prediction, predict
    from hpcllm.plan.searching.search import Search, search

__all__ = ["Layout", "Machine", "Model", "Prediction", "Search", "predict", "read_machine", "read_model", "search"]
MODULES = {
    "Layout": "layouts",
    "Machine": "machine",
    "read_machine": "machine",
    "Model": "models",
    "read_model": "models",
    "Prediction": "prediction",
    "predict": "prediction",
    "Search": "searching.search",
    "search": "searching.search",
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: the command line reads this package before it knows what is run."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
