"""How well a type of device does what training asks of it: one row a family, for every machine and every paper.

    sustained    large matrix products in training / the best that a benchmark finds: power, clocks, operands in memory
    stream       what kernels that only read and write get of the memory's bandwidth
    scores       the same of kernels that go over attention's scores, and of the products that write them
    flash_*      fused attention / large matrix products, by what it computes (the causal half), for long sequences
    first_flash  its first version / its second
    vector       products that matrix units do not take (float32, rows not aligned to 16 bytes) / peak of matrix units
    launch_s     what a kernel costs beyond its work, while the host is ahead of the device
    tiles        rows and columns of the pieces of a product, and how good they are

Sources. sustained, scores of nvidia-ampere: rows of perf/plan/rows that are not held out; of amd-cdna2: the two of
LUMI; of others: by likeness (devices that draw all their power in large products lower their clocks). stream: copies
reach 80 to 90 % of HBM on NVIDIA, 75 to 80 % on others. flash: arXiv:2307.08691 figures 4 to 7, heads of 128 channels,
on A100 and H100. vector: float32 of data sheets, of which two thirds are reached. tiles: those of cuBLAS on A100.
"""

from __future__ import annotations

from dataclasses import dataclass

Tiles = tuple[tuple[int, int, float], ...]
TILES: Tiles = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.72), (64, 64, 0.5))


@dataclass(frozen=True, kw_only=True)
class Family:
    """Shares of what the device has at best; see above."""

    sustained: float
    stream: float
    scores: float = 0.6
    flash_forward: float
    flash_backward: float
    first_flash: float = 0.55
    vector: float
    launch_s: float
    tiles: Tiles = TILES


def _family(sustained: float, stream: float, flash: tuple[float, float], vector: float, launch_us: float) -> Family:
    return Family(
        sustained=sustained,
        stream=stream,
        flash_forward=flash[0],
        flash_backward=flash[1],
        vector=vector,
        launch_s=1e-6 * launch_us,
    )


FAMILIES: dict[str, Family] = {
    "nvidia-volta": _family(0.90, 0.80, (0.45, 0.35), 0.08, 4.0),
    "nvidia-ampere": _family(0.92, 0.82, (0.72, 0.58), 0.04, 3.0),
    "nvidia-hopper": _family(0.85, 0.82, (0.50, 0.42), 0.04, 3.0),
    "amd-cdna2": _family(0.78, 0.75, (0.50, 0.35), 0.08, 6.0),
    "amd-cdna3": _family(0.90, 0.75, (0.50, 0.35), 0.08, 5.0),
    "intel-xe": _family(0.90, 0.75, (0.45, 0.30), 0.04, 8.0),
    "tpu": _family(0.95, 0.85, (0.50, 0.45), 0.05, 1.0),
}
OTHER = _family(0.85, 0.75, (0.50, 0.40), 0.05, 5.0)  # what nobody has looked at


def family_of(name: str) -> Family:
    return FAMILIES.get(name, OTHER)
