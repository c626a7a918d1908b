"""Which sample comes at which position: a computed permutation, a pure function of (seed, epoch).

Large ranges use a generalised Feistel network on a rectangle a x b that just covers the range. It needs constant
memory, and any position takes constant time, so resuming costs nothing. Small ranges get a true shuffle, because a
Feistel network on a handful of values reaches only part of their permutations.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

TINY = 4096  # up to here the whole shuffled order is held: at most 32 KiB
ROUNDS = 8  # six already pass the usual statistics; two more cost little

_31, _32 = np.uint64(31), np.uint64(32)
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS_OF_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


def order_key(seed: int, epoch: int, purpose: str = "order") -> int:
    """Return the key of one epoch's order. It is a hash, so that neighbouring seeds and epochs share nothing."""
    text = f"elastic_harness/{purpose}/{seed}/{epoch}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


class SamplePlaces(NamedTuple):
    """The samples at some positions, each field (m,) int64: the source, how often the source was gone through before
    (its pass), and the sample's number within the source."""

    sources: Int64s
    passes: Int64s
    numbers: Int64s


class Order(Protocol):
    """The whole sample order of a run. n_samples: positions in an epoch. names, sizes: of a mixture's sources; a single
    source has no name. `verify` makes the order again from `describe()`, so it must need nothing else."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def n_samples(self) -> int: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    def __hash__(self) -> int: ...

    def places(self, epoch: int, positions: Int64s) -> SamplePlaces: ...

    def drawn(self, epoch: int, position: int) -> tuple[int, ...]:
        """Return how many samples each source has given before this position, since the start of the run."""
        ...

    def describe(self) -> dict[str, Any]: ...


def sample_ids(order: Order, epoch: int, positions: Int64s) -> Int64s:
    """Return the (m,) ids at these positions."""
    return ids_of(order, order.places(epoch, positions))


def ids_of(order: Order, places: SamplePlaces) -> Int64s:
    """Return the (m,) ids of the samples at these places. The sources' samples are numbered one source after
    another."""
    if len(order.sizes) == 1:
        return places.numbers
    return places.numbers + offsets(order.sizes)[places.sources]


def offsets(sizes: tuple[int, ...]) -> Int64s:
    """Return (K,) the id of each source's first sample."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)[:-1]])


class EpochOrder:
    """One source, in a new order in each epoch."""

    names = ()

    def __init__(self, n_samples: int, seed: int) -> None:
        self.n_samples = n_samples
        self.sizes: tuple[int, ...] = (n_samples,)
        self.seed = seed

    def places(self, epoch: int, positions: Int64s) -> SamplePlaces:
        numbers = epoch_order(self.n_samples, self.seed, epoch)(positions)
        return SamplePlaces(np.zeros_like(numbers), np.full_like(numbers, epoch), numbers)

    def drawn(self, epoch: int, position: int) -> tuple[int, ...]:
        return (epoch * self.n_samples + position,)

    def describe(self) -> dict[str, Any]:
        return {"kind": "epochs", "n_samples": self.n_samples, "seed": self.seed}


@lru_cache(maxsize=64)
def epoch_order(n: int, seed: int, epoch: int, purpose: str = "order") -> Permutation:
    """Return the permutation of ``range(n)`` that epoch ``epoch`` of a run with seed ``seed`` follows."""
    return Permutation(n, order_key(seed, epoch, purpose))


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
        """Return the ids at these positions, an int64 array of the same shape. Positions must lie in range(n)."""
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
        left = values // b
        right = values - left * b
        for r, round_key in enumerate(self._round_keys):
            if r % 2 == 0:
                left = _add(left, _mix(right ^ round_key), a)
            else:
                right = _add(right, _mix(left ^ round_key), b)
        return left * b + right


def _add(values: UInt64s, hashes: UInt64s, modulus: np.uint64) -> UInt64s:
    """Return (values + hash scaled to the modulus) mod modulus, in place; values and modulus are below 2^32."""
    hashes >>= _32
    hashes *= modulus
    hashes >>= _32
    values += hashes
    values -= (values >= modulus) * modulus
    return values


def _derive(key: int, index: int) -> np.uint64:
    digest = hashlib.sha256(f"{key}/{index}".encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def _mix(values: UInt64s) -> UInt64s:
    """Return splitmix64's finalizer (Steele, Lea, Flood 2014) after its additive constant; it wraps modulo 2^64."""
    z = values + _GAMMA
    for shift, factor in _ROUNDS_OF_MIX:
        z ^= z >> shift
        z *= factor
    z ^= z >> _31
    return z


def _shuffle(n: int, key: np.uint64) -> Int64s:
    """Return an order sorted by a hash. Every order is as likely as any other, and no generator's version matters."""
    return np.argsort(_mix(_mix(np.arange(n, dtype=np.uint64) ^ key)), kind="stable").astype(np.int64)
