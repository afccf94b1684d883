"""Codecs whose arrays are in a device's memory: layouts, names and bytes of the CPU's codecs, kernels of this folder.

    raw, bf16, fp16    torch converts in one pass; casts.cu adds up what ranks sent: a row is read once, in one launch,
                       where R rows by torch take R launches, R - 1 of which read and write an fp32 sum
    int8, int4, fp8    quantise.cu, one pass over memory: a group of 32 lanes takes a block, or 128 values
    zfp                zfp.cu and zfp_blocks.cuh, a block a lane
    exp, mpc           tiles.cuh after exponent.cu or mpc.cu

Only streams of tiles ever wait for the device:

    encode   values --measure--> sizes --cumulative sum--> offsets --write--> bytes, header --> host: how many they are
    decode   bytes  --locate---> sizes --cumulative sum--> offsets --read---> values           (nothing comes back)

Encoding reads 24 bytes back, at once, since what it returns is as long as they say. Decoding does not wait: a tile that
no encoder wrote sets a word on the device, one a codec and stream, so that lanes do not meet there. The next call that
waits anyway, encode or used_bytes of the same codec on that stream, raises CodecError for it; the rest is read with the
loss at the end of a step (damage_words). Nothing is ever read or written outside the arrays. Scratch memory is 8 bytes
a tile, twice, from torch's allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hpcllm.codecs.blocks import BlockLayout
from hpcllm.codecs.casts import Cast, Raw
from hpcllm.codecs.gpu.compiler import Program
from hpcllm.codecs.gpu.launch import LANES, VALUE_NAMES, Launcher, rows_of
from hpcllm.codecs.tiles import HEADER_BYTES, TileLayout
from hpcllm.codecs.zfp import ZfpLayout
from hpcllm.errors import CodecError

QUANTISE_GROUP_VALUES = 128  # values that a group takes at once, as common.cuh says
SUM_GROUP_VALUES = 256  # as casts.cu says
ZFP_GROUP_VALUES = 4 * LANES  # a block a lane


@dataclass(frozen=True)
class CastKernels(Cast):
    """bf16 and fp16 on the device that `launcher` serves; a SumEncoder."""

    launcher: Launcher = field(kw_only=True)

    def sum_encode(
        self, parts: torch.Tensor, own_rank: int, own: torch.Tensor, out: torch.Tensor, index: int = 0  # noqa: ARG002
    ) -> torch.Tensor:  # fmt: skip
        """Encode the sum of all rows, see protocol.SumEncoder."""
        n = own.numel()
        data, groups = out[: self.encoded_bytes(n)], -(-n // SUM_GROUP_VALUES)
        rows = rows_of(parts, own_rank, self.encoded_bytes(n))
        program = sum_program(own.dtype, self.wire)
        self.launcher.launch(program, "sum_encode", groups, [*rows, own, data, n, groups])
        return data


@dataclass(frozen=True)
class RawKernels(Raw, CastKernels):
    """raw on the device that `launcher` serves; a SumEncoder."""

    def sum_encode(
        self, parts: torch.Tensor, own_rank: int, own: torch.Tensor, out: torch.Tensor, index: int = 0
    ) -> torch.Tensor:
        """Encode the sum of all rows, see protocol.SumEncoder. The encoding is the memory of `own`."""
        return super().sum_encode(parts, own_rank, own, own.view(torch.uint8), index) if own.numel() else out[:0]


def sum_program(dtype: torch.dtype, wire: torch.dtype) -> Program:
    return Program("casts", (f"VALUE={VALUE_NAMES[dtype]}", f"WIRE={VALUE_NAMES[wire]}"))


@dataclass(frozen=True)
class BlockKernels(BlockLayout):
    """int8, int4 and fp8 on the device that `launcher` serves; a SumEncoder. code: the struct of quantise.cu.

    Sums of encodings are encoded again by one kernel: the addends of all ranks are read once, and nothing in fp32 is
    written on the way.
    """

    code: str = field(kw_only=True)
    launcher: Launcher = field(kw_only=True)

    @property
    def program(self) -> Program:
        """Kernels for arrays of the codec's own dtype; decoding to fp32 uses those for fp32."""
        return self._program(self.dtype)

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:
        n = values.numel()
        data = out[: self.encoded_bytes(n)]
        self._launch("encode", values.dtype, n, [values, data, *self._encoding(n, index)])
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode("decode", data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode("decode_add", data, out)

    def sum_encode(
        self, parts: torch.Tensor, own_rank: int, own: torch.Tensor, out: torch.Tensor, index: int = 0
    ) -> torch.Tensor:
        """Encode the sum of all rows, see protocol.SumEncoder."""
        n = own.numel()
        data = out[: self.encoded_bytes(n)]
        rows = rows_of(parts, own_rank, self.encoded_bytes(n))
        self._launch("sum_encode", own.dtype, n, [*rows, own, data, *self._encoding(n, index)])
        return data

    def _encoding(self, n: int, index: int) -> tuple[int, ...]:
        return n, self.scales_at(n), self.encoded_bytes(n), self.key, index

    def _decode(self, kernel: str, data: torch.Tensor, out: torch.Tensor) -> None:
        n = out.numel()
        self.check_size(data, n)
        self._launch(kernel, out.dtype, n, [data, out, n, self.scales_at(n)])

    def _launch(self, kernel: str, dtype: torch.dtype, n: int, arguments: Sequence[torch.Tensor | int]) -> None:
        groups = -(-n // max(self.block, QUANTISE_GROUP_VALUES))
        self.launcher.launch(self._program(dtype), kernel, groups, [*arguments, groups])

    def _program(self, dtype: torch.dtype) -> Program:
        code = f"CODE={self.code}", f"BLOCK={self.block}", f"STOCHASTIC={int(self.format.stochastic)}"
        return Program("quantise", (f"VALUE={VALUE_NAMES[dtype]}", *code))


@dataclass(frozen=True)
class ZfpKernels(ZfpLayout):
    """zfp on the device that `launcher` serves."""

    launcher: Launcher = field(kw_only=True)

    @property
    def program(self) -> Program:
        return Program("zfp", (f"VALUE={VALUE_NAMES[self.dtype]}", f"RATE={self.rate}"), ("zfp_blocks.cuh",))

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        data = out[: self.encoded_bytes(values.numel())]
        self._launch("encode", values, data)
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.check_length(data, out)
        self._launch("decode" if out.dtype == self.dtype else "decode_floats", out, data)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.check_length(data, out)
        self._launch("decode_add", out, data)

    def _launch(self, kernel: str, values: torch.Tensor, data: torch.Tensor) -> None:
        n, words = values.numel(), data.numel() // 4
        groups = -(-n // ZFP_GROUP_VALUES)
        self.launcher.launch(self.program, kernel, groups, [values, n, data, words, groups])


@dataclass(frozen=True)
class TileKernels(TileLayout):
    """exp and mpc on the device that `launcher` serves. source, parts: the texts of the codec."""

    source: str = field(kw_only=True)
    parts: tuple[str, ...] = field(kw_only=True)
    launcher: Launcher = field(kw_only=True)

    @property
    def program(self) -> Program:
        return Program(self.source, (f"VALUE={VALUE_NAMES[self.dtype]}",), (*self.parts, "tiles.cuh"))

    def used_bytes(self, data: torch.Tensor, n: int) -> int:
        """Read the length from the header; waits for the device. Raises CodecError for what was decoded before, too.

        One copy to the host brings both: each one waits.
        """
        word = _damage(self, data.device)
        header = torch.cat((data[:HEADER_BYTES], word.view(torch.uint8))).cpu()
        used = self.header_bytes(header[: min(HEADER_BYTES, data.numel())], n)
        self._raise(word, int(header[-word.nbytes :].view(torch.int64).item()))
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
        """Decode without waiting. Raises CodecError for an impossible length; damage is reported later (module)."""
        self._read("read" if out.dtype == self.dtype else "read_floats", data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Add the decoded values to `out` without waiting, see decode."""
        self._read("read_add", data, out)

    def _raise(self, word: torch.Tensor, tile: int) -> None:
        """Raise CodecError for a damaged tile + 1 that was read from the word, if it was one, and forget it."""
        if tile:
            word.zero_()
            raise CodecError(self.damage(tile))

    def damage(self, tile: int) -> str:
        """Describe a damaged tile + 1, as a word has it."""
        return f"{self.name}: tile {tile - 1} of what was decoded is damaged: its record cannot be right"

    def _read(self, kernel: str, data: torch.Tensor, out: torch.Tensor) -> None:
        n, used = out.numel(), data.numel()
        tiles, least, most = self.tiles(n), self.table_end(n), self.encoded_bytes(n)
        if not least <= used <= most:
            raise CodecError(f"{self.name}: {used} bytes for {n} values, which take {least} to {most}")
        sizes = torch.empty(tiles + 1, dtype=torch.int64, device=out.device)
        damage, groups = _damage(self, out.device), -(-(tiles + 1) // LANES)
        self.launcher.launch(self.program, "locate", groups, [data, used, n, sizes, damage, groups])
        self.launcher.launch(self.program, kernel, tiles, [data, used, n, sizes.cumsum(0), out, damage, tiles])


# (stream, or None on the CPU; damaged tile + 1, or 0) by codec, device and number of the stream
_words: dict[tuple[TileKernels, torch.device, int], tuple[torch.Stream | None, torch.Tensor]] = {}


def _damage(codec: TileKernels, device: torch.device) -> torch.Tensor:
    """Return the codec's word of the current stream, (1,) int64 on the device."""
    stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
    key = codec, device, stream.stream_id if stream else 0
    if key not in _words:
        _words[key] = stream, torch.zeros(1, dtype=torch.int64, device=device)
    return _words[key][1]


def damage_words(device: torch.device) -> list[tuple[TileKernels, torch.Tensor]]:
    """Return codecs and words of all streams of the device, complete for what the current stream is told from now on.

    A word is (1,) int64: a damaged tile + 1 of what was decoded since it was made or raised, see TileKernels.damage, or
    0. Lanes must have been waited for.
    """
    found = [(codec, *of) for (codec, where, _), of in list(_words.items()) if where == device]
    for _, stream, _ in found:
        if stream:
            torch.accelerator.current_stream(device).wait_stream(stream)
    return [(codec, word) for codec, _, word in found]
