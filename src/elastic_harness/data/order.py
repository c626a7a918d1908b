"""The order of samples within an epoch: a computed permutation, a pure function of (seed, epoch).

Large ranges use a generalised Feistel network on a rectangle a x b that just covers the range: constant
memory, any position in constant time, so resuming costs nothing. Small ranges get a true shuffle, because
a Feistel network on a handful of values reaches only part of their permutations.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

TINY = 4096  # up to here the whole shuffled order is held: at most 32 KiB
ROUNDS = 8  # six already pass the usual statistics; two more cost little

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


def order_key(seed: int, epoch: int, purpose: str = "order") -> int:
    """The key of one epoch's order: a hash, so that neighbouring seeds and epochs share nothing."""
    text = f"elastic_harness/{purpose}/{seed}/{epoch}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


@lru_cache(maxsize=8)
def epoch_order(n: int, seed: int, epoch: int) -> Permutation:
    """The permutation of ``range(n)`` that epoch ``epoch`` of a run with seed ``seed`` follows."""
    return Permutation(n, order_key(seed, epoch))


class Permutation:
    """A bijection of ``range(n)`` onto itself, fixed by ``key``; calling it maps positions to ids."""

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ValueError(f"n is {n}, but a permutation needs at least one element.")
        self.n = n
        self.key = key
        self._round_keys = [_derive(key, r) for r in range(ROUNDS)]
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        self._table = _shuffle(n, self._round_keys[0]) if n <= TINY else None

    def __call__(self, positions: npt.ArrayLike) -> Int64s:
        """The ids at these positions, an int64 array of the same shape. Positions must lie in range(n)."""
        given = np.asarray(positions, dtype=np.int64)
        if given.size and (given.min() < 0 or given.max() >= self.n):
            raise IndexError(f"positions span {given.min()} … {given.max()}, but must lie in 0 … {self.n - 1}.")
        if self._table is not None:
            return self._table[given]
        ids = self._scramble(given.astype(np.uint64).ravel())
        # The rectangle holds fewer than a values more than n. One that lands there walks on along its
        # cycle, which leads back into range(n); the walk starts inside, so it always ends.
        outside = np.flatnonzero(ids >= np.uint64(self.n))
        while outside.size:
            ids[outside] = self._scramble(ids[outside])
            outside = outside[ids[outside] >= np.uint64(self.n)]
        return ids.astype(np.int64).reshape(given.shape)

    def _scramble(self, values: UInt64s) -> UInt64s:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = values // b, values % b
        for r, round_key in enumerate(self._round_keys):
            if r % 2 == 0:
                left = (left + _mix(right ^ round_key) % a) % a
            else:
                right = (right + _mix(left ^ round_key) % b) % b
        return left * b + right


def _derive(key: int, index: int) -> np.uint64:
    digest = hashlib.sha256(f"{key}/{index}".encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def _mix(values: UInt64s) -> UInt64s:
    """splitmix64's finalizer (Steele, Lea, Flood 2014) after its additive constant; wraps modulo 2^64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _shuffle(n: int, key: np.uint64) -> Int64s:
    """Sorting by a hash: every order is as likely as any other, and no generator's version matters."""
    return np.argsort(_mix(_mix(np.arange(n, dtype=np.uint64) ^ key)), kind="stable").astype(np.int64)
