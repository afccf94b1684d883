"""Stochastic rounding without state: floor(x + u), where u in [0, 1) is a hash of a key and of the value's place.

    key, place of the block in the whole array  --mix64-->  seed of the block (64 bits)
    seed, place in the block                    --mix32-->  u (24 bits)

So neither threads nor the cuts of a segmented collective change a bit. The mixers are finalisers of hash tables, made
so that a flipped bit of the input flips each bit of the output half of the time.
Sources: MurmurHash3 (fmix64); C. Wellons, "Prospecting for Hash Functions", 2018 (lowbias32).
"""

from __future__ import annotations

import numpy as np

from hpcllm.codecs.kernels import kernel

UNIT = np.float32(2.0**-24)


@kernel
def block_seed(key: np.uint64, place: np.uint64) -> np.uint64:
    return mix64(mix64(key + np.uint64(0x9E3779B97F4A7C15)) + place)


@kernel
def floor_randomly(x: np.float32, seed: np.uint64, i: int) -> np.float32:
    """x rounded down or up, up with the probability of its fraction. i < 2^32."""
    bits = mix32(np.uint32(i), np.uint32(seed), np.uint32(seed >> np.uint64(32)))
    rounded: np.float32 = np.floor(x + np.float32(np.int32(bits >> np.uint32(8))) * UNIT)
    return rounded


@kernel
def mix64(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    z = (z ^ (z >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return z ^ (z >> np.uint64(33))


@kernel
def mix32(i: np.uint32, low: np.uint32, high: np.uint32) -> np.uint32:
    """Both halves of the seed come in, between different steps: seeds that are near give sequences that are not."""
    z = np.uint32(i * np.uint32(0x9E3779B9) + low)
    z = np.uint32((z ^ (z >> np.uint32(16))) * np.uint32(0x7FEB352D)) ^ high
    z = np.uint32((z ^ (z >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(z ^ (z >> np.uint32(16)))
