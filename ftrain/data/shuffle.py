"""Random order without state: a keyed bijection of range(n), computed for the indices that are asked for.

A shuffled list of 250 million windows is 2 GB on every rank; a Feistel network over the index bits is a few
integer operations. Cycle walking (apply again until the result is below n) cuts the power of four down to any
n (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Defined by integer arithmetic alone, so
the order of a seed is the same for every machine and library version.
"""

import numpy as np

ROUNDS = 8
GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


def mix(x: np.ndarray) -> np.ndarray:
    """A uint64 array through the finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit flips
    half of them."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*numbers: int) -> int:
    """One 64-bit key from integers, in order."""
    value = np.zeros(1, np.uint64)  # an array, because numpy warns when a scalar wraps around
    for number in numbers:
        value = mix(value + np.uint64((number + 1) * int(GAMMA) % 2**64))
    return int(value[0])


def permute(index: np.ndarray, n: int, key_: int) -> np.ndarray:
    """Where a shuffle of range(n) under `key_` puts each index. index: int64, 0 <= index < n. Same shape, int64."""
    assert n >= 1, f"a permutation of {n} things"
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    salts = mix(np.arange(1, ROUNDS + 1, dtype=np.uint64) * GAMMA + np.uint64(key_))
    x = _feistel(index.astype(np.uint64), half, salts)
    while (outside := x >= n).any():
        x[outside] = _feistel(x[outside], half, salts)
    return x.astype(np.int64)


def _feistel(x: np.ndarray, half: int, salts: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for salt in salts:
        left, right = right, left ^ (mix(right * GAMMA + salt) & mask)
    return (left << shift) | right
