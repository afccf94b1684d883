"""Every codec against its bound on awkward values, on one rank of each node; on a device, its bytes against the CPU's.

    values: ordinary, tiny, huge, all zero, denormal, NaN and infinite, of lengths that fill no block
        CPU      decode(encode(x)) within bound(x), the same bits as x if lossless
        device   encode(x) the same bytes as on the CPU, decode the same values

A processor that computes wrongly is rare, and does not say so: this finds the ones that do so always.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from hpcllm.codecs import Codec, find_codec
from hpcllm.codecs.gpu.launch import why_no_kernels
from hpcllm.codecs.names import examples
from hpcllm.preflight.collect import Communicators
from hpcllm.preflight.facts import Allocation
from hpcllm.preflight.findings import MOST_NODES, Finding, without
from hpcllm.preflight.page import Measured
from hpcllm.system.slurm import nodes_text

BUDGET_S = 10.0  # the first run compiles kernels
LENGTHS = (1, 31, 257, 5000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measure(comms: Communicators, chosen: torch.device, allocation: Allocation | None) -> Measured | None:
    """The result, on rank 0. Collective over comms.world. Raises StallError."""
    comms.arrive("to try codecs")
    done, faults = self_test(chosen) if comms.leads else (0, [])
    why_none = why_no_kernels(chosen.type)
    comms.arrive("to have tried codecs")
    table = comms.leaders.gather((done, faults, why_none)) if comms.leads else None
    return judge(table, allocation) if table and allocation else None


def judge(table: list[tuple[int, list[str], str]], allocation: Allocation) -> Measured:
    """table: of each node, how many codecs were tried, what was wrong, why its device has no kernels. Pure."""
    wrong: dict[str, list[str]] = {}
    without_kernels: dict[str, list[str]] = {}
    for node, (_, faults, why_none) in zip(allocation.nodes, table, strict=True):
        for fault in faults:
            wrong.setdefault(fault, []).append(node.name)
        if why_none:
            without_kernels.setdefault(why_none, []).append(node.name)
    findings = [
        Finding("breaks", f"codec self test: {fault}", nodes_text(names, MOST_NODES), without(allocation, names))
        for fault, names in wrong.items()
    ]
    findings += [
        Finding("note", f"no kernels for codecs and model, so PyTorch's, and raw, bf16, fp16, int8 only: {why}",
                nodes_text(names, MOST_NODES), "install what is missing, as jobscripts/MACHINE/install.sh does")
        for why, names in without_kernels.items()
    ]  # fmt: skip
    every, least = len(_cases()), min(done for done, _, _ in table)
    cut = "" if least == every else f", cut off after {BUDGET_S:g} s on some nodes"
    text = f"{least} of {every} codecs and types tried on each node{cut}; {len(wrong) or 'none'} wrong"
    return Measured("codecs", text, {"tried": least, "of": every, "wrong": list(wrong)}, findings)


def self_test(chosen: torch.device, budget_s: float = BUDGET_S) -> tuple[int, list[str]]:
    """(codecs tried, what is wrong) on this process and its device."""
    end_s, done, faults = time.perf_counter() + budget_s, 0, []
    for name, dtype in _cases():
        if done and time.perf_counter() > end_s:
            break
        codec = find_codec(name, dtype)
        done += 1
        try:
            if fault := _fault(codec, chosen):
                faults.append(f"{name} of {dtype}: {fault}")
        except Exception as error:  # of any library below: a finding, not the end
            faults.append(f"{name} of {dtype}: {type(error).__name__}: {error}")
    return done, faults


def _cases() -> list[tuple[str, torch.dtype]]:
    return [(name, dtype) for dtype in DTYPES for name in examples()]


def _fault(codec: Codec, chosen: torch.device) -> str:
    """Fault of a codec; "" if it has none."""
    device_codec = _device_codec(codec, chosen)
    for values in _inputs(codec.dtype):
        data = codec.encode(values, torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)).clone()
        back = torch.empty_like(values)
        codec.decode(data, back)
        fault = _too_far(codec, values, back)
        if device_codec and not fault:
            fault = _differs(device_codec, values.to(chosen), data, back)
        if fault:
            return f"{fault} with {values.numel()} values"
    return ""


def _too_far(codec: Codec, values: torch.Tensor, back: torch.Tensor) -> str:
    if codec.lossless:
        same = torch.equal(values.view(torch.uint8), back.view(torch.uint8))
        return "" if same else "lossless, but other bits come back"
    exact, found = (tensor.to(torch.float64).numpy() for tensor in (values, back))
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(exact)
        bound = codec.bound(exact)[finite]
        error = np.abs(found[finite] - exact[finite])
        error = np.where(np.isfinite(bound), error, 0.0)
    return "" if np.all(error <= bound) else f"an error of {np.nanmax(error):.3g} is over the bound"


def _device_codec(codec: Codec, chosen: torch.device) -> Codec | None:
    """Codec of the same name for the device's memory; None on the CPU, and where the device has none."""
    if chosen.type == "cpu":
        return None
    try:
        return find_codec(codec.name, codec.dtype, chosen.type)
    except ValueError:  # without kernels a device has some codecs only; who asks for another is told so
        return None


def _differs(device_codec: Codec, there: torch.Tensor, data: torch.Tensor, back: torch.Tensor) -> str:
    """Difference between the values of a device and the CPU's data and what those come back as."""
    memory = torch.empty(device_codec.encoded_bytes(there.numel()), dtype=torch.uint8, device=there.device)
    coded, out = device_codec.encode(there, memory), torch.empty_like(there)
    if not torch.equal(coded.view(torch.uint8).cpu(), data.view(torch.uint8)):
        return f"{there.device.type} and CPU encode to different bytes"
    device_codec.decode(coded, out)
    same = torch.isclose(out.cpu(), back, rtol=0, atol=0, equal_nan=True)  # a NaN is a NaN, whatever its bits
    return "" if bool(same.all()) else f"{there.device.type} and CPU decode to different values"


def _inputs(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    top, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    for n in LENGTHS:
        ordinary = torch.randn(n, generator=generator)
        for values in (ordinary, ordinary * tiny, torch.zeros(n), ordinary.clamp(-1, 1) * top * 0.99):
            yield values.to(dtype)
        broken = ordinary.clone()
        broken[::7], broken[1::11], broken[2::13] = torch.nan, torch.inf, -torch.inf
        yield broken.to(dtype)
