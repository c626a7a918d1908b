"""How state is cut up for storing: tensors into slices, slices into pieces, pieces into shares. Without torch.

A slice is a box of a tensor: all of it, or the part that one shard holds. Its bytes, in row-major order, are cut into
pieces of at most 16 MiB. Pieces are the unit of copying and of hashing, and a piece that has not changed is not written
again. A share is what one of several writers writes: a run of pieces of about the same size as the other shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PIECE_BYTES = 16 << 20
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip


class Slice(NamedTuple):
    """A box of a tensor. `dtype` is torch's name of it, `shape` that of the whole tensor. The box begins at `offset`
    and has `sizes`."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]

    @property
    def whole(self) -> bool:
        return self.sizes == self.shape

    @property
    def name(self) -> str:
        """The slice's name: for a whole tensor the tensor's own, else with the place where the slice begins."""
        return self.tensor if self.whole else f"{self.tensor}@{','.join(map(str, self.offset))}"


def whole(tensor: str, dtype: str, shape: Sequence[int]) -> Slice:
    """Return the slice that is all of a tensor."""
    return Slice(tensor, dtype, tuple(shape), (0,) * len(shape), tuple(shape))


def overlap(first: Slice, second: Slice) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return where two slices of one tensor overlap, as (offset, sizes) in the tensor; None if nowhere."""
    low = tuple(max(a, b) for a, b in zip(first.offset, second.offset, strict=True))
    ends = zip(first.offset, first.sizes, second.offset, second.sizes, strict=True)
    high = tuple(min(a + n, b + m) for a, n, b, m in ends)
    sizes = tuple(h - o for o, h in zip(low, high, strict=True))
    return (low, sizes) if all(n > 0 for n in sizes) else None


class Piece(NamedTuple):
    """Bytes `low` to `high` of a slice, its `number`-th piece."""

    slice: Slice
    number: int
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        return self.high - self.low

    @property
    def alone(self) -> bool:
        """Whether the piece is all of its slice."""
        return self.nbytes == self.slice.nbytes


def pieces(slices: Iterable[Slice]) -> list[Piece]:
    """Return the pieces of some slices, in order. An empty slice has one empty piece."""
    found = []
    for piece_of in slices:
        size = piece_of.nbytes
        step = PIECE_BYTES - PIECE_BYTES % ITEM_BYTES[piece_of.dtype]
        found += [Piece(piece_of, i, low, min(low + step, size)) for i, low in enumerate(range(0, max(size, 1), step))]
    return found


def share(all_pieces: Sequence[Piece], index: int, count: int) -> list[Piece]:
    """Return the pieces that the `index`-th of `count` writers writes. The shares are disjoint and cover everything.
    They differ in size by at most a piece."""
    total = sum(piece.nbytes for piece in all_pieces)
    mine, position = [], 0
    for piece in all_pieces:
        if min(position * count // max(total, 1), count - 1) == index:
            mine.append(piece)
        position += piece.nbytes
    return mine
