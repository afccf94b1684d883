"""Position in the training run -> sample of the corpus, through a permutation that is computed, not stored.

    position 0 1 2 3 4 5 | 6 7 8 ...      epoch = position div samples, another permutation each
    sample   4 0 3 5 1 2 | 1 4 0 ...      sample k: row k of the split, see packing.py

The permutation is a keyed Feistel network on the smallest power of two >= samples; a result outside the range is
encrypted again until it falls inside ("cycle walking"), twice on average at worst. Source: Black and Rogaway 2002,
"Ciphers with Arbitrary Finite Domains", sections 3 and 4, with alternating steps on unequal halves in place of
swaps. With fewer than eight samples some orders come a few per cent more often than others. The state of a run's data
is one integer, the position, and every layout sees the same order.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache

from hpcllm.errors import DataError

ROUNDS = 8
_WORD = 2**64 - 1


@dataclass(frozen=True)
class Sampler:
    """An endless sequence of sample numbers below `samples`; each epoch is a permutation under a key of its own.

    seed: 0 <= seed < 2^63. Raises DataError if there is no sample to draw.
    """

    samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise DataError(
                f"{self.samples} samples: the split holds fewer tokens than one sequence and its last target; "
                "prepare more text or lower data.sequence_length"
            )

    def index(self, position: int) -> int:
        """The sample at `position` >= 0 of the run."""
        epoch, value = divmod(position, self.samples)
        bits = (self.samples - 1).bit_length()
        keys = _round_keys(self.seed, epoch)
        value = _feistel(value, bits, keys)
        while value >= self.samples:
            value = _feistel(value, bits, keys)
        return value


def sample_count(tokens: int, sequence_length: int) -> int:
    """Number of samples in a split of `tokens` tokens; the last target of one is the first input of the next."""
    return max(0, (tokens - 1) // sequence_length)


@lru_cache(maxsize=4)  # a batch may straddle two epochs
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    key = hashlib.blake2b(f"epoch {epoch}".encode(), digest_size=8 * ROUNDS, key=seed.to_bytes(8, "little"))
    return struct.unpack(f"<{ROUNDS}Q", key.digest())


def _feistel(value: int, bits: int, keys: tuple[int, ...]) -> int:
    """A permutation of 0 .. 2^bits - 1: each step changes one half by a function of the other, so it can be undone."""
    low_bits = (bits + 1) // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << bits - low_bits) - 1
    low, high = value & low_mask, value >> low_bits
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        low ^= _mix(high ^ even) & low_mask
        high ^= _mix(low ^ odd) & high_mask
    return high << low_bits | low


def _mix(word: int) -> int:
    """The 64-bit finaliser of SplitMix64: Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators"."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
