"""Predict what a run will take, and search for the best layout, before it is started. Pure: no torch, no MPI.

layouts.py, machine.py, models.py   what is planned for: a layout, a machine, a model and its stages
resolve.py, run_config.py           is a run file valid on N ranks? run files <--> layouts; does a layout fit?
time/, memory/                      the work and messages of a step, and what each rank holds
prediction.py, cost.py              a step, and a whole training
alike.py, numbered_work.py          for searches: stages that take equally long; the passes of a schedule as numbers
layout_search.py                    the fastest layouts that fit, of those in layout_space.py; sensitivity.py: what if
report.py, ranking.py, explain.py   one prediction, a search, the whole arithmetic: as text and JSON; picture.py
rank_order/                         which rank in which slot of a node: `python -m hpcllm layout`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcllm.plan.layout_search import Search, search
    from hpcllm.plan.layouts import Layout
    from hpcllm.plan.machine import Machine, read_machine
    from hpcllm.plan.models import Model, read_model
    from hpcllm.plan.prediction import Prediction, predict

__all__ = ["Layout", "Machine", "Model", "Prediction", "Search", "predict", "read_machine", "read_model", "search"]
MODULES = {
    "Layout": "layouts",
    "Machine": "machine",
    "read_machine": "machine",
    "Model": "models",
    "read_model": "models",
    "Prediction": "prediction",
    "predict": "prediction",
    "Search": "layout_search",
    "search": "layout_search",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line reads this package before it knows what is run."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
