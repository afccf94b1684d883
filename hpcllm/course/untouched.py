"""Has a student's file replaced a function of the grader, of its clock, or of Python?

    functions and classes of those modules, as they are before the file is loaded --> the same objects after each case?

It finds what a file does to a module or to a class of the grader. Python has other ways: who looks for them finds some.
"""

from __future__ import annotations

import builtins
import inspect
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hpcllm.course.lab import LawError

WATCHED = (builtins, json, math, os, random, statistics, time)
GRADER = "hpcllm.course"
LIBRARIES = ("mpi4py.MPI", "hpcllm.perf.timing", GRADER)


class Untouched:
    """Functions as they are now."""

    def __init__(self) -> None:
        modules = [module for name, module in sys.modules.items() if name.startswith(LIBRARIES)]
        self.places = [place for owner in (*WATCHED, *modules) for place in _places(owner)]

    def check(self) -> None:
        """Compare them. Raises LawError naming the first that was replaced."""
        for owner, name, value in self.places:
            if vars(owner).get(name) is not value:
                raise LawError("tampered", f"{owner.__name__}.{name} is not what it was before the file was loaded")


def _places(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and value of the functions and classes of a module, and of the classes of the grader."""
    for name, value in list(vars(module).items()):
        if callable(value):
            yield module, name, value
        if inspect.isclass(value) and value.__module__.startswith(GRADER):
            yield from ((value, own, each) for own, each in vars(value).items() if callable(each))
