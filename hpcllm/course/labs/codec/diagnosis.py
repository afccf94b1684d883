"""Mistakes of a codec, told by its bytes: each function returns the key of a hint and a place, or None if all is well.

    bytes --> form, length --> scales, block by block --> codes, value by value --> key, what is there

A wrong scale or code is compared with what known mistakes give; the first that fits all wrong places names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.course.labs.codec.ours import BLOCK, LEAST_SCALE, Bytes, Values, blocks_of, encoded_bytes, parts_of

Doubles = NDArray[np.float64]
Fault = tuple[str, str]  # key of the hint, what is seen
CLOSE = 1e-5  # relative, of a scale
HALF = 0.5 + 1e-3  # of a scale, with the rounding of quotients
TOP = 127.0


def wrong_form(found: Any, dtype: type, n: int, function: str) -> Fault | None:
    """Look at what a function returned."""
    if isinstance(found, np.ndarray) and found.dtype == dtype and found.shape == (n,):
        return None
    seen = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
    return "form", f"{function} returns {seen}, not {np.dtype(dtype)} [{n}]"


def wrong_encoding(data: Any, x: Values) -> Fault | None:
    """Find what is wrong with the encoding of x."""
    n, blocks = x.size, blocks_of(x.size)
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1 and data.size != encoded_bytes(n):
        known = {"padded": blocks * (BLOCK + 4), "tail": n + 4 * (n // BLOCK), "empty_block": n + 4 * (n // BLOCK + 1)}
        key = next((key for key, size in known.items() if data.size == size), "length")
        return key, f"encode returns {data.size} bytes for n = {n}, not {encoded_bytes(n)}"
    return wrong_form(data, np.uint8, encoded_bytes(n), "encode") or _wrong_parts(data.copy(), x)


def _wrong_parts(data: Bytes, x: Values) -> Fault | None:
    scales, codes = parts_of(data, x.size)
    found = wrong_scales(scales, x) or wrong_codes(codes, scales, x)
    if found and np.isfinite(x).all():
        behind = np.frombuffer(data[x.size :].tobytes(), np.float32)
        if x.size >= 4 and wrong_scales(behind, x) is None:
            return "layout", f"n = {x.size}: the scales are behind the codes"
        starts = range(0, data.size, BLOCK + 4)
        inside = np.frombuffer(b"".join(data[i : i + 4].tobytes() for i in starts), np.float32)
        if len(starts) > 1 and wrong_scales(inside, x) is None:
            return "layout", f"n = {x.size}: each scale is before the codes of its block"
    return found


def peaks_of(x: Values) -> Doubles:
    """Return the largest magnitude of each block: not finite where a value is not."""
    return np.array([np.abs(x[i : i + BLOCK].astype(np.float64)).max() for i in range(0, x.size, BLOCK)])


def scales_of(x: Values) -> Doubles:
    """Return the scales that x has to have."""
    peaks = peaks_of(x)
    return np.where(np.isfinite(peaks), np.maximum(peaks / TOP, LEAST_SCALE), np.nan)


def wrong_scales(scales: Values, x: Values) -> Fault | None:
    """Compare the scales with those of x."""
    wanted, found = scales_of(x), scales.astype(np.float64)
    stray = np.isnan(wanted) & np.isinf(found)  # decodes to NaN just as well
    good = np.isclose(found, wanted, rtol=CLOSE, atol=0.0, equal_nan=True) | stray
    if good.all():
        return None
    block = int(np.flatnonzero(~good)[0])
    seen = f"n = {x.size}: the scale of block {block} is {found[block]:.6g}, not {wanted[block]:.6g}"
    return _scale_mistake(found, wanted, x, ~good), seen


def _scale_mistake(found: Doubles, wanted: Doubles, x: Values, wrong: NDArray[np.bool_]) -> str:
    broken = np.isnan(wanted)
    if np.any(wrong & broken):
        return "hidden"
    if np.any(wrong & ~np.isfinite(found)):
        return "spread" if broken.any() else "least_scale"
    if np.all(wanted[wrong] <= LEAST_SCALE * (1 + CLOSE)) and np.all(found[wrong] < LEAST_SCALE):
        return "least_scale"
    if wrong.sum() == 1 and wrong[-1] and x.size % BLOCK and wrong.size > 1:
        return "tail"
    fits = (key for key, values in known_scales(x, wanted).items() if _near(found[wrong], values[wrong]))
    return next(fits, "scale")


def known_scales(x: Values, wanted: Doubles) -> Mapping[str, Doubles]:
    """Return the scales that known mistakes give."""
    with np.errstate(all="ignore"):
        rows = [x[i : i + BLOCK].astype(np.float64) for i in range(0, x.size, BLOCK)]
        finite = np.where(np.isfinite(wanted), wanted, 0)
        return {
            "one_scale": np.full_like(wanted, finite.max()),
            "signed_max": np.maximum([row.max() / TOP for row in rows], LEAST_SCALE),
            "steps": np.maximum(wanted * TOP / 128, LEAST_SCALE),
            "steps_255": np.maximum(wanted * TOP / 255, LEAST_SCALE),
            "range": np.maximum([(row.max() - row.min()) / 255 for row in rows], LEAST_SCALE),
            "mean": np.maximum([np.abs(row).mean() / TOP for row in rows], LEAST_SCALE),
            "inverse": 1 / wanted,
            "peak": wanted * TOP,
            "wrong_block": np.roll(wanted, 1),
            "next_block": np.roll(wanted, -1),
        }


def _near(found: Doubles, values: Doubles) -> bool:
    return bool(np.allclose(found, values, rtol=CLOSE, atol=0.0))


def wrong_codes(codes: NDArray[np.int8], scales: Values, x: Values) -> Fault | None:
    """Compare the codes with values over scales."""
    finite = np.isfinite(peaks_of(x)).repeat(BLOCK)[: x.size]
    scale = np.where(finite, scales.astype(np.float64).repeat(BLOCK)[: x.size], 1.0)
    quotient = np.where(finite, x, 0).astype(np.float64) / scale
    wrong = ~(np.abs(codes - quotient) <= HALF) | (codes == -128)
    if not wrong.any():
        return None
    i = int(np.flatnonzero(wrong)[0])
    seen = f"n = {x.size}: value {i} over its scale is {quotient[i]:.6g}, its code {codes[i]}"
    return _code_mistake(codes, quotient, scale, wrong, finite), seen


def _code_mistake(
    codes: NDArray[np.int8], quotient: Doubles, scale: Doubles, wrong: NDArray[np.bool_], finite: NDArray[np.bool_]
) -> str:
    n, at = codes.size, np.flatnonzero(wrong)
    if not finite[at].all():
        return "hidden"
    rolled = [quotient * scale / np.roll(scale, shift) for shift in (BLOCK, -BLOCK)]
    tiled = quotient * scale / np.resize(scale[::BLOCK], n)
    with np.errstate(invalid="ignore"):
        known = {
            "minus_128": np.maximum(np.rint(quotient * 128 / TOP), -128),
            "toward_zero": np.trunc(quotient),
            "floor": np.floor(quotient),
            "ceil": np.ceil(quotient),
            "unsigned": wrapped(np.rint(quotient) + 128),
            "overflow": wrapped(np.rint(quotient * 128 / TOP)),
            **{f"wrong_block {k}": np.rint(each) for k, each in enumerate((tiled, *rolled))},
        }
    fits = (key.split()[0] for key, values in known.items() if _alike(codes[at], values[at]))
    return next(fits, "tail" if at[0] >= n - n % BLOCK else "codes")


def _alike(codes: NDArray[np.int8], values: Doubles) -> bool:
    """Compare codes with the values that they would have been; beyond 127 int8 makes anything of them."""
    fits_int8 = (values >= -128) & (values <= 127)
    return bool(fits_int8.any() and np.array_equal(codes[fits_int8], values[fits_int8]))


def rolled(steps: Doubles, by: int) -> Doubles:
    """Return the scale of each value, were its block so many further on."""
    return np.roll(steps[::BLOCK], by).repeat(BLOCK)[: steps.size]


def wrapped(values: Doubles) -> Doubles:
    """Return what int8 makes of whole numbers by dropping bits."""
    return (np.nan_to_num(values).clip(-(2**31), 2**31) + 128) % 256 - 128


def wrong_values(found: Any, scales: Values, codes: NDArray[np.int8]) -> Fault | None:
    """Compare decoded values with codes times scales."""
    n = codes.size
    if fault := wrong_form(found, np.float32, n, "decode"):
        return fault
    steps = scales.astype(np.float64).repeat(BLOCK)[:n]
    wanted = codes * steps
    wrong = ~np.isclose(found, wanted, rtol=CLOSE, atol=0.0, equal_nan=True)
    if not wrong.any():
        return None
    i = int(np.flatnonzero(wrong)[0])
    seen = f"n = {n}: code {codes[i]} of a block with scale {steps[i]:.6g} decodes to {found[i]:.6g}"
    if np.isnan(wanted[wrong]).all():
        return "hidden", seen
    data = np.concatenate([scales.view(np.int8), codes])
    swapped = np.frombuffer(data[n:].tobytes(), np.float32).astype(np.float64).repeat(BLOCK)[:n]
    known: dict[str, Doubles] = {
        "layout": data[:n] * swapped,
        "unsigned": codes.view(np.uint8) * steps,
        "offset": (codes.view(np.uint8) - 128.0) * steps,
        "wrong_block": np.resize(steps[::BLOCK], n) * codes,
        **{f"wrong_block {k}": codes * rolled(steps, k) for k in (1, -1)},
        "inverse": np.divide(codes, steps),
        "peak": codes * steps / TOP,
    }
    fits = [k for k, v in known.items() if np.allclose(found[wrong], v[wrong], rtol=CLOSE, atol=0.0, equal_nan=True)]
    return fits[0].split()[0] if fits else ("tail" if i >= n - n % BLOCK else "decoding"), seen
