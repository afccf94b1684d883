"""Arrays that codecs are tried on, and memory that tells when somebody wrote beside his own.

The values are drawn by hypothesis: their number, kind, place in memory, and which of them are no numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from hpcllm.codecs.protocol import Codec

AS_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0]
KINDS = ["ordinary", "any bits", "tiny", "huge", "many magnitudes", "equal", "zero"]
CANARY = 0xA5


@dataclass(frozen=True)
class Case:
    """n values of a kind, some of them special, `shift` values or 4 * `shift` bytes into their memory."""

    n: int
    kind: str
    seed: int
    specials: list[tuple[int, float]]
    shift: int

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        random = np.random.default_rng(self.seed)
        info = torch.finfo(dtype)
        normal = random.standard_normal(self.n)
        kinds: dict[str, Callable[[], np.ndarray]] = {
            "ordinary": lambda: normal * 1e-3,
            "any bits": lambda: normal,
            "tiny": lambda: random.integers(-9, 10, self.n) * info.smallest_normal * info.eps,
            "huge": lambda: np.sign(normal) * info.max * np.maximum(random.random(self.n), random.random(self.n) < 0.5),
            "many magnitudes": lambda: normal * 2.0 ** random.integers(-20, 5, self.n),
            "equal": lambda: np.full(self.n, 1 / 3),
            "zero": lambda: np.zeros(self.n),
        }
        memory = torch.empty(self.n + self.shift, dtype=dtype)
        values = memory[self.shift :]
        values.copy_(torch.from_numpy(kinds[self.kind]()))
        if self.kind == "any bits":
            bits = torch.from_numpy(random.integers(0, 1 << 32, self.n, dtype="u4").view("i4"))
            values.view(AS_BITS[dtype]).copy_(bits)  # truncates to 16 bits where the values have 16
        for place, special in self.specials:
            if place < self.n:
                values[place] = special
        return values


def cases_of(*numbers: st.SearchStrategy[int], most_shift: int = 9) -> st.SearchStrategy[Case]:
    """Cases of so many values."""
    return st.builds(
        Case,
        st.one_of(*numbers),
        st.sampled_from(KINDS),
        st.integers(0, 1 << 30),
        st.lists(st.tuples(st.integers(0, 70), st.sampled_from(SPECIAL)), max_size=3),
        st.integers(0, most_shift),
    )


cases = cases_of(st.integers(0, 70), st.integers(0, 9000), most_shift=17)


class Guarded:
    """Bytes between canaries, 4 * shift bytes into their memory."""

    def __init__(self, size: int, shift: int = 0) -> None:
        self.memory = torch.full((64 + 4 * shift + size + 64,), CANARY, dtype=torch.uint8)
        self.inside = slice(64 + 4 * shift, 64 + 4 * shift + size)

    def data(self) -> torch.Tensor:
        return self.memory[self.inside]

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return self.data().view(dtype)

    def intact(self) -> bool:
        outside = torch.cat([self.memory[: self.inside.start], self.memory[self.inside.stop :]])
        return bool(torch.all(outside == CANARY))


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.clone().view(AS_BITS[values.dtype])


def encoded(codec: Codec, values: torch.Tensor, index: int = 0) -> torch.Tensor:
    """A copy of the bytes: some codecs hand out the values' own memory."""
    return codec.encode(values, torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8), index).clone()


def decoded(codec: Codec, data: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((n,), 77.0, dtype=dtype)
    codec.decode(data, out)
    return out


def guarded_bytes(codec: Codec, values: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """As encoded, after a look at what is beside the bytes' room; `values` is not handed out."""
    room = Guarded(codec.encoded_bytes(values.numel()), shift)
    data = codec.encode(values, room.data())
    assert room.intact()
    assert data.data_ptr() == room.data().data_ptr()
    return data.clone()
