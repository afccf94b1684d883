"""Kernels on the CPU: compiled by numba once for each machine, strict IEEE arithmetic, run by threads without the GIL.

    first call --> private folder of this user on the node's own disk --> later processes load what was compiled

Without such a folder each process compiles for itself, about a second a kernel. Nothing is kept in a home folder, which
thousands of ranks would read at once, nor where another user could have put code for us to load.

Kernels receive 16-bit values as their bits, because NumPy has no bf16 and numba no fp16 on the CPU:

    torch    float32    bfloat16    float16
    NumPy    float32    uint16      int16         array_of: the same memory
    inside   float32    widened, narrowed         exact; rounded to nearest, ties to even
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
LEAST_FREE_BYTES = 64 << 20  # numba fails where the disk is full; all kernels together take a few megabytes
AS_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
INT32, FLOAT = ir.IntType(32), ir.FloatType()


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """View the memory of a CPU tensor as the array that kernels take; nothing is copied."""
    tensor = tensor.detach()
    return tensor.view(AS_BITS.get(tensor.dtype, tensor.dtype)).numpy()


def cache_folder() -> str:
    """Return a folder on this node that only this user can write to or rename; "" if there is none."""
    parent = Path(os.environ.get("TMPDIR") or "/tmp")
    folder = parent / f"hpcllm-kernels-{os.getuid()}-{_source_hash()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        usable = _is_private(folder.lstat()) and _keeps_names(parent.stat()) and os.access(folder, os.W_OK | os.X_OK)
        return str(folder) if usable and shutil.disk_usage(folder).free > LEAST_FREE_BYTES else ""
    except OSError:
        return ""


def _source_hash() -> str:
    """Hash all modules with kernels: numba looks for changes in a kernel's own file only, not in its callees."""
    package = Path(__file__).parents[1]
    paths = sorted(path for room in ("codecs", "collectives", "model") for path in package.glob(f"{room}/*.py"))
    sources = [path.read_bytes() for path in paths]
    return sha256(b"".join(source for source in sources if b"hpcllm.codecs.kernels import" in source)).hexdigest()[:12]


def _is_private(status: os.stat_result) -> bool:
    """Check the result of lstat: a symbolic link, which could lead anywhere, is no folder."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _keeps_names(parent: os.stat_result) -> bool:
    """True if other users cannot replace a folder of ours in this parent by one of theirs."""
    return parent.st_uid in (0, os.getuid()) and bool(parent.st_mode & stat.S_ISVTX or not parent.st_mode & 0o022)


if not numba.config.CACHE_DIR:  # NUMBA_CACHE_DIR says otherwise
    numba.config.CACHE_DIR = cache_folder()


def kernel(function: F) -> F:
    """Compile a function over NumPy arrays; a division by zero gives what IEEE says."""
    compiled: F = numba.njit(nogil=True, cache=_can_write(numba.config.CACHE_DIR), error_model="numpy")(function)
    return compiled


def summing_kernel(function: F) -> F:
    """Compile as `kernel` does, with sums in whatever order fills vector registers: not the same on every machine."""
    cache, flags = _can_write(numba.config.CACHE_DIR), {"reassoc", "contract", "nsz"}
    compiled: F = numba.njit(nogil=True, cache=cache, error_model="numpy", fastmath=flags)(function)
    return compiled


def inner_kernel(function: F) -> F:
    """Compile as `summing_kernel` does, for kernels alone: without the way in from Python, in half the time."""
    cache, flags = _can_write(numba.config.CACHE_DIR), {"reassoc", "contract", "nsz"}
    compiled: F = numba.njit(
        nogil=True, cache=cache, error_model="numpy", fastmath=flags, no_cpython_wrapper=True, no_cfunc_wrapper=True
    )(function)
    return compiled


def _can_write(folder: str) -> bool:
    """True if numba can write there; else it would choose a folder itself: the installation, or the home folder."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:  # FileNotFoundError for an empty name
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for kernels, of these types, out of one that builds its code with llvmlite's builder."""

    def decorate(build: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            value = build(builder, *values)
            return context.get_dummy_value() if result == types.void else value

        @wraps(build)  # numba asks how many arguments there are
        def typed(_context: Any, *_types: Any) -> Any:
            return result(*arguments), generate

        return intrinsic(typed)

    return decorate


NO = ir.Constant(ir.IntType(1), 0)
word_instruction = instruction(types.uint64, types.uint64)
float_of = instruction(types.float32, types.uint32)(lambda builder, bits: builder.bitcast(bits, FLOAT))
bits_of = instruction(types.uint32, types.float32)(lambda builder, value: builder.bitcast(value, INT32))
first_one = word_instruction(lambda builder, bits: builder.cttz(bits, NO))  # index of the lowest set bit, or 64
count_ones = word_instruction(lambda builder, bits: builder.ctpop(bits))
leading_zeros = word_instruction(lambda builder, bits: builder.ctlz(bits, NO))  # above the highest set bit, or 64
reverse_bytes = word_instruction(lambda builder, bits: builder.bswap(bits))


@intrinsic  # type: ignore[untyped-decorator]
def widened(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
    """Convert an element of an array_of, or an int8, to float32; exact."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        if value == types.int8:
            return builder.sitofp(args[0], FLOAT)
        if value == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), FLOAT)
        return builder.bitcast(builder.shl(builder.zext(args[0], INT32), INT32(16)), FLOAT)

    return types.float32(value), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrowed(typing_context: Any, value: Any, element: Any) -> Any:  # noqa: ARG001
    """Round a float32 to the type of `element`, an element of an array_of."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if element == types.float32:
            return args[0]
        if element == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        return builder.trunc(_bf16_bits(builder, args[0]), ir.IntType(16))

    return element(types.float32, element), generate


def _bf16_bits(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, INT32)
    high = builder.lshr(bits, INT32(16))
    half = builder.add(INT32(0x7FFF), builder.and_(high, INT32(1)))  # ties go to the even one
    rounded = builder.lshr(builder.add(bits, half), INT32(16))
    quiet_nan = builder.or_(high, INT32(0x40))  # rounding could carry a NaN into infinity
    return builder.select(builder.fcmp_unordered("uno", value, value), quiet_nan, rounded)


@kernel
def transpose_bits(bytes8: NDArray[np.uint64]) -> None:
    """Exchange bit j of byte i and bit i of byte j in each word of eight bytes, in place."""
    for w in range(len(bytes8)):
        x = bytes8[w]
        t = (x ^ (x >> np.uint64(7))) & np.uint64(0x00AA00AA00AA00AA)
        x ^= t ^ (t << np.uint64(7))
        t = (x ^ (x >> np.uint64(14))) & np.uint64(0x0000CCCC0000CCCC)
        x ^= t ^ (t << np.uint64(14))
        t = (x ^ (x >> np.uint64(28))) & np.uint64(0x00000000F0F0F0F0)
        bytes8[w] = x ^ t ^ (t << np.uint64(28))


@kernel
def copy_bytes(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
    """Copy to the front of `out`. A loop, which is many times as fast as numba's assignment of slices."""
    for i in range(len(data)):
        out[i] = data[i]
    return len(data)


@kernel
def put_floats(values: NDArray[Any], add: bool, out: NDArray[Any]) -> None:
    """Write the first values to `out`, in its type, or add them to it."""
    if add:
        for i in range(len(out)):
            out[i] += widened(values[i])
    else:
        for i in range(len(out)):
            out[i] = narrowed(widened(values[i]), out[i])


def run_in_threads(job: Callable[[int, int], T], count: int, least: int) -> list[T]:
    """Run job(first, end) over parts of range(count): one part a thread of torch's, each of at least `least` items."""
    parts = max(1, min(torch.get_num_threads(), count // least))
    cuts = [count * part // parts for part in range(parts + 1)]
    others = [_threads().submit(job, first, last) for first, last in pairwise(cuts[1:])]
    return [job(cuts[0], cuts[1]), *(other.result() for other in others)]


@cache
def _threads() -> ThreadPoolExecutor:
    """Start the threads when a first array is large enough. They run kernels only, never torch."""
    return ThreadPoolExecutor(os.cpu_count(), "codecs")
