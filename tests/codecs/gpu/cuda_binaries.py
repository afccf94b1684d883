"""Machine code of kernels by the real CuPy and NVRTC, neither of which needs a device. A script, since compilers crash.

    python cuda_binaries.py sm_80 < [[source, [macro, ..], [part, ..], folder], ..] in JSON
        -> [{"bytes": .., "end_bytes": .., "kernels": {name: {"parameters": .., "registers": .., "stack_bytes": ..}}}],
           or [{"is_text": true}] for compute_80

What a kernel takes is in the section .nv.info of the ELF file: records of a format, an attribute and a value (format
and attribute numbers as cuobjdump and NVIDIA's own assembler print them).
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compilers import library
from cupy.cuda import nvrtc
from elf import sections

from hpcllm.codecs.gpu.compiler import ELF, Program, binary_of, end_bytes

SIZED = 4  # the format of a record with bytes behind it
PARAMETER, STACK_BYTES, REGISTERS = 0x17, 0x12, 0x2F


def records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, bytes) of the sized records of a section .nv.info."""
    at = 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == SIZED:
            yield attribute, data[at : at + size]
            at += size


def kernels(code: bytes) -> dict[str, dict[str, int]]:
    """What each kernel of a file takes."""
    found = dict(sections(code))
    symbols = [struct.unpack_from("<I", found[".symtab"], at)[0] for at in range(0, len(found[".symtab"]), 24)]
    strings = found[".strtab"]
    of: dict[str, dict[str, int]] = {}
    for attribute, data in records(found[".nv.info"]):
        if attribute in (STACK_BYTES, REGISTERS):
            symbol, value = struct.unpack("<II", data)
            name = strings[symbols[symbol] : strings.index(b"\0", symbols[symbol])].decode()
            of.setdefault(name, {})["registers" if attribute == REGISTERS else "stack_bytes"] = value
    for name in [name for name in of if f".nv.info.{name}" in found]:
        of[name]["parameters"] = sum(attribute == PARAMETER for attribute, _ in records(found[f".nv.info.{name}"]))
    return {name: values for name, values in of.items() if "parameters" in values}


def main() -> None:
    library("nvrtc")  # with its parts, which that of some of PyTorch's wheels does not find
    answers: list[dict[str, Any]] = []
    for source, macros, parts, folder in json.load(sys.stdin):
        program = Program(source, tuple(macros), tuple(parts), Path(folder))
        code = Path(binary_of(program, sys.argv[1], nvrtc)).read_bytes()
        if not code.startswith(ELF):
            answers.append({"is_text": code.startswith(b"//") and b".entry" in code and code.endswith(b"\0")})
            continue
        answers.append({"bytes": len(code), "end_bytes": end_bytes(code), "kernels": kernels(code)})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
