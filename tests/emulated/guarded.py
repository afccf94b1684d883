"""An emulator in which a kernel that leaves its arrays kills the process.

launch    arguments --copied--> between two pages that nobody may touch --kernel--> copied back

1st run   |no page|array...............|.......|no page|
2nd run   |no page|.......|...............array|no page|
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

from emulated import Emulator
from hpcllm.codecs.gpu.compiler import Program

PAGE = mmap.PAGESIZE


class Guarded(Emulator):
    """An Emulator whose launches run at both edges of memory; what the second one left is the result."""

    def launch(self, program: Program, kernel: str, groups: int, arguments: Sequence[torch.Tensor | int]) -> None:
        for at_end in (False, True):
            moved: dict[tuple[int, int], torch.Tensor] = {}  # by place, since a kernel may get an array twice
            words = [_moved(argument, at_end, moved) for argument in arguments]
            super().launch(program, kernel, groups, words)
        for (address, size), there in moved.items():
            ctypes.memmove(address, there.data_ptr(), size)


def _moved(
    argument: torch.Tensor | int, at_end: bool, moved: dict[tuple[int, int], torch.Tensor]
) -> torch.Tensor | int:
    if not isinstance(argument, torch.Tensor) or not argument.numel():
        return argument
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
    key = argument.data_ptr(), (last + 1) * argument.itemsize
    if key not in moved:
        moved[key] = at_the_edge(key[1], at_end)
        ctypes.memmove(moved[key].data_ptr(), *key)
    return moved[key].view(argument.dtype)


def at_the_edge(size: int, at_end: bool) -> torch.Tensor:
    """Return (size,) bytes that begin where a page begins which kills whoever touches the one before, or end so."""
    inner = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, inner + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for edge in (start, start + PAGE + inner):
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(edge), PAGE, 0):
            raise OSError("mprotect failed")
    offset = PAGE + (inner - size if at_end else 0)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=size)
