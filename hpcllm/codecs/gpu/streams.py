"""Lossless codecs of variable rate on a device: the bytes of codecs/streams.py, tile for tile. Kernels: streams.cuh.

    encode   values --measure--> sizes --cumulative sum--> offsets --write--> bytes, header --> host: how many they are
    decode   bytes  --locate---> sizes --cumulative sum--> offsets --read---> values           (nothing comes back)

Encoding waits for the device, to read 16 bytes, since what it returns is as long as they say. Decoding does not wait:
a tile that no encoder wrote sets a word on the device, and the next call that waits anyway, encode or used_bytes
of the same codec, raises CodecError for it; raise_damage() asks at any other time, as after the last bytes of a step.
Nothing is ever read or written outside the arrays. Scratch memory is 8 bytes a tile, twice, from torch's allocator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from hpcllm.codecs.gpu.binaries import Program
from hpcllm.codecs.gpu.launch import LANES, VALUE_NAMES, Launcher
from hpcllm.codecs.streams import TileLayout
from hpcllm.errors import CodecError


@dataclass(frozen=True)
class TileKernels(TileLayout):
    """source, parts: the texts of the codec; launcher: for the device on which all tensors are."""

    source: str = field(kw_only=True)
    parts: tuple[str, ...] = field(kw_only=True)
    launcher: Launcher = field(kw_only=True)

    @property
    def program(self) -> Program:
        return Program(self.source, (f"VALUE={VALUE_NAMES[self.dtype]}",), (*self.parts, "streams.cuh"))

    def used_bytes(self, data: torch.Tensor, n: int) -> int:
        """Waits for the device. Raises CodecError for what was decoded before, too."""
        used = super().used_bytes(data, n)
        self.raise_damage(data.device)
        return used

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        n = values.numel()
        groups = max(1, self.tiles(n))  # an empty array has a header, too
        sizes = torch.empty(groups + 1, dtype=torch.int64, device=values.device)
        self.launcher.launch(self.program, "measure", groups, [values, n, out, sizes, groups])
        offsets = sizes.cumsum(0)
        self.launcher.launch(self.program, "write", groups, [values, n, out, offsets, groups])
        return out[: self.used_bytes(out, n)]

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Does not wait: raises CodecError for a length that cannot be; damage is told later, as the module says."""
        self._read("read" if out.dtype == self.dtype else "read_floats", data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """As decode."""
        self._read("read_add", data, out)

    def raise_damage(self, device: torch.device) -> None:
        """Waits for the device. Raises CodecError if a tile decoded there since the last call was damaged."""
        word = _damage(self, device)
        if tile := int(word.item()):
            word.zero_()
            raise CodecError(f"{self.name}: tile {tile - 1} of what was decoded is damaged: its record cannot be right")

    def _read(self, kernel: str, data: torch.Tensor, out: torch.Tensor) -> None:
        n, used = out.numel(), data.numel()
        tiles, least, most = self.tiles(n), self.table_end(n), self.encoded_bytes(n)
        if not least <= used <= most:
            raise CodecError(f"{self.name}: {used} bytes for {n} values, which take {least} to {most}")
        sizes = torch.empty(tiles + 1, dtype=torch.int64, device=out.device)
        damage, groups = _damage(self, out.device), -(-(tiles + 1) // LANES)
        self.launcher.launch(self.program, "locate", groups, [data, used, n, sizes, damage, groups])
        self.launcher.launch(self.program, kernel, tiles, [data, used, n, sizes.cumsum(0), out, damage, tiles])


@cache
def _damage(codec: TileKernels, device: torch.device) -> torch.Tensor:  # noqa: ARG001 -- each codec has its own
    """A word on the device: a damaged tile + 1, or 0. Made once, and there before another stream may write to it."""
    word = torch.zeros(1, dtype=torch.int64, device=device)
    word.item()  # waits
    return word
