"""Blocks by torch.compile, where the run file says so: fewer and longer kernels, made by a C++ compiler (or Triton).

    first step    run_block --trace--> a graph --> generated source --g++--> a library, kept on disk for the next start
    then          run_block = that library, the same for all blocks: their parameters are its arguments

Values are those of the plain blocks to rounding, and the same bits from start to start on one machine. What generated
kernels allocate is not seen by the count of bytes in a run's first step (training/memory.py), so none is made then.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hpcllm.errors import ConfigError
from hpcllm.model.transformer import Decoder, run_block

WAY_OUT = "or take model.compile = false, which computes the same without one"


def check_compiler() -> None:
    """Compile a small function, on one rank and before any work. Raises ConfigError if that does not succeed.

    Takes seconds, most of which a run would spend a little later.
    """
    compiler = (os.environ.get("CXX") or "g++").split()[0]  # as PyTorch itself looks for one
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"model.compile = true needs a C++ compiler, and {compiler!r} is not on PATH; install it (Debian and "
            f"Ubuntu: package g++), name another in CXX, {WAY_OUT}"
        )
    folder = str(Path(torch.__file__).parent)
    if " " in folder:  # which PyTorch hands to the compiler without quotes
        raise ConfigError(
            f"model.compile = true compiles with the headers of PyTorch, whose folder {folder!r} has a space; make the "
            f"environment elsewhere, {WAY_OUT}"
        )
    try:
        _compiled(lambda x: x.sin() + x.cos())(torch.zeros(64))
    except Exception as error:  # of any stage, from the tracer to the linker
        lines = [type(error).__name__, *str(error).strip().splitlines()]
        reason = next((line.strip() for line in lines if "error:" in line), lines[-1])
        raise ConfigError(f"model.compile = true, but torch.compile fails here: {reason}; {WAY_OUT}") from error


def compile_blocks(decoders: Sequence[Decoder]) -> None:
    """Let these decoders run their blocks compiled, from the next pass on, which takes as long as compiling does."""
    run = _compiled(run_block)
    for decoder in decoders:
        decoder.run_block = run


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    import torch._inductor.config as inductor  # takes seconds, and only who compiles needs it

    inductor.compile_threads = 1  # else it starts worker processes, and MPI runs already
    made: Callable[..., Tensor] = torch.compile(function, dynamic=False)
    return made
