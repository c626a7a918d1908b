"""Best-fit packing: whole documents into windows of S tokens, so that few are cut and little room is left.

A document longer than a window is cut into windows of its own and a rest. The rests are placed by decreasing length,
each into the fullest window that still has room (best-fit decreasing, as in Ding et al. 2024, "Fewer truncations
improve language modeling", arXiv 2404.10830). This is done once, offline. The outcome is a section of the index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_harness.data.split import held_out
from elastic_harness.errors import ConfigError

Int64s = npt.NDArray[np.int64]
REPORT_EVERY = 1 << 16


@dataclass(frozen=True)
class Packing:
    """Which pieces of documents each window has."""

    seq_length: int
    validation_fraction: float
    n_train: int  # the first so many windows are for training
    bins: npt.NDArray[Any]  # (B + 1,) window b has the pieces bins[b] … bins[b + 1]
    starts: npt.NDArray[Any]  # (P,) where each piece begins in the tokens
    lengths: npt.NDArray[Any]  # (P,) how many labels each piece has; it reads one token more

    @property
    def n_bins(self) -> int:
        return len(self.bins) - 1

    @property
    def filled(self) -> float:
        """The fraction of all places that have a label."""
        return float(np.sum(self.lengths, dtype=np.int64)) / max(1, self.n_bins * self.seq_length)


def pack(
    documents: npt.NDArray[Any],
    keys: npt.NDArray[Any],
    seq_length: int,
    validation_fraction: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Packing:
    """Return the packing of documents with these bounds and keys. Pure, except that it calls `progress(done, of)` now
    and then. Raises ConfigError if there is nothing to pack."""
    if seq_length < 1:
        raise ConfigError(f"--seq-length is {seq_length}, but must be at least 1.")
    validation = held_out(keys, validation_fraction)
    parts = []
    for mine in (~validation, validation):
        starts, lengths = _pieces(np.asarray(documents, np.int64), mine, seq_length)
        bins = best_fit(lengths, seq_length, progress)
        order = np.argsort(bins, kind="stable")
        parts.append((np.bincount(bins), starts[order], lengths[order]))
    counts = np.concatenate([counts for counts, _, _ in parts])
    if len(counts) == 0:
        raise ConfigError("There is no document of at least two tokens to pack.")
    return Packing(
        seq_length,
        validation_fraction,
        len(parts[0][0]),
        np.concatenate([[0], np.cumsum(counts)]).astype("<u8"),
        np.concatenate([starts for _, starts, _ in parts]).astype("<u8"),
        np.concatenate([lengths for _, _, lengths in parts]).astype("<u4"),
    )


def best_fit(lengths: Int64s, capacity: int, progress: Callable[[int, int], None] | None = None) -> Int64s:
    """Return (P,) the bin of each piece, of at most `capacity`, by best-fit decreasing. Bins count from 0 as they
    open."""
    bins = np.empty(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # the open bins by the room they have left
    rooms = 0  # bit r is set where with_room[r] has any
    opened = 0
    order = np.argsort(-lengths, kind="stable")
    for done, (piece, length) in enumerate(zip(order.tolist(), lengths[order].tolist(), strict=True)):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen, opened = capacity, opened, opened + 1
        bins[piece] = chosen
        left = room - length
        if left:
            with_room[left].append(chosen)
            rooms |= 1 << left
        if progress is not None and done % REPORT_EVERY == 0:
            progress(done, len(lengths))
    return bins


def _pieces(documents: Int64s, mine: npt.NDArray[np.bool_], seq_length: int) -> tuple[Int64s, Int64s]:
    """Return where the pieces of these documents begin, and how many labels each has. All tokens of a document but the
    first are labels."""
    firsts, labels = documents[:-1][mine], np.diff(documents)[mine] - 1
    counts = -(-labels // seq_length)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(firsts, counts) + within * seq_length
    return starts, np.minimum(np.repeat(labels, counts) - within * seq_length, seq_length)
