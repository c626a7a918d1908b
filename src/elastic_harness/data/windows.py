"""The content of a sample: S tokens of an index and, one token ahead, their labels.

`Windows` cuts the text at every S tokens, also within documents. `SeparateWindows` cuts at the same places and says
which tokens belong together. `PackedWindows` has whole documents, as the index's packing has put them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from elastic_harness.data.order import offsets
from elastic_harness.data.packing import Packing
from elastic_harness.data.split import Split, held_out
from elastic_harness.errors import ConfigError

Documents = Literal["join", "separate", "pack"]
Batch = dict[str, torch.Tensor]
Int64s = npt.NDArray[np.int64]
NO_LABEL = -100  # what torch's cross entropy leaves out


class Index(Protocol):
    """The part of a token index that is read: `TokenIndexFile`, `Corpus`, or something of that shape. documents: (D +
    1,) their bounds. keys: (D,) hashes of their content."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def eot_id(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> dict[str, Any]: ...
    @property
    def remote(self) -> bool:
        """Whether its bytes may be far away."""
        ...

    @property
    def path(self) -> Path | str: ...
    @property
    def packing(self) -> Packing | None: ...

    @property
    def documents(self) -> npt.NDArray[Any]: ...
    @property
    def keys(self) -> npt.NDArray[Any]: ...
    def __len__(self) -> int: ...
    def read(self, starts: Int64s, length: int) -> npt.NDArray[Any]: ...
    def prefetch(self, starts: Int64s, length: int) -> None: ...


class Windows:
    """Window i is the tokens from i·S to i·S + S, and one more for the last label, of those documents that belong to
    one side of the split. The side depends on a document's content alone, so it stays the same when data is added."""

    def __init__(self, index: Index, seq_length: int, split: Split, validation_fraction: float) -> None:
        self.index = index
        self.seq_length = seq_length
        starts, ends = _runs(index, split, validation_fraction)
        self._starts = starts  # (R,) where each run of consecutive documents begins in the file
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - starts)])  # (R + 1,) tokens before it
        self.tokens = int(self._before[-1])

    def __len__(self) -> int:
        return max(0, (self.tokens - 1) // self.seq_length)

    def read(self, numbers: Int64s) -> Batch:
        """Return ``input_ids`` and ``labels``, (m, S) int64, of these (m,) windows."""
        starts, left = self._places(numbers)
        if (left > self.seq_length).all():
            return _shifted(self.index.read(starts, self.seq_length + 1))
        return _shifted(self._across_runs(self._stretches(numbers)))

    def read_batches(self, numbers: Int64s, size: int) -> Iterator[Batch]:
        """Yield the same, `size` windows at a time. All tokens are gathered at once and widened batch by batch, which
        suits the processor's caches better."""
        starts, left = self._places(numbers)
        if (left > self.seq_length).all():
            tokens = self.index.read(starts, self.seq_length + 1)
            for low in range(0, len(numbers), size):
                yield _shifted(tokens[low : low + size])
        else:
            yield from _batches(self, numbers, size)

    def prefetch(self, numbers: Int64s) -> None:
        """Begin to fetch what these windows need, if the index is far away."""
        starts, _ = self._places(numbers)
        self.index.prefetch(np.minimum(starts, len(self.index) - self.seq_length - 1), self.seq_length + 1)

    def _places(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """Return where these windows begin in the file, and how many tokens are left in their runs from there on."""
        firsts = numbers * self.seq_length
        if len(self._starts) == 1:
            return firsts + self._starts[0], self.tokens - firsts
        runs = np.searchsorted(self._before, firsts, side="right") - 1
        return self._starts[runs] + firsts - self._before[runs], self._before[runs + 1] - firsts

    def _stretches(self, numbers: Int64s) -> list[list[tuple[int, int]]]:
        """Return for each window the stretches of the file that it consists of: where each begins, and its length."""
        length = self.seq_length + 1
        found = []
        for first in (numbers * self.seq_length).tolist():
            run = int(np.searchsorted(self._before, first, side="right")) - 1
            skipped, wanted, parts = first - int(self._before[run]), length, []
            while wanted:
                size = min(int(self._before[run + 1] - self._before[run]) - skipped, wanted)
                parts.append((int(self._starts[run]) + skipped, size))
                run, skipped, wanted = run + 1, 0, wanted - size
            found.append(parts)
        return found

    def _across_runs(self, windows: list[list[tuple[int, int]]]) -> npt.NDArray[Any]:
        """Return (m, S + 1) tokens."""
        return np.stack(
            [np.concatenate([self.index.read(np.array([at]), size)[0] for at, size in parts]) for parts in windows]
        )


class SeparateWindows(Windows):
    """The same windows with ``document_ids`` (m, S) int64, 0 for a window's first document, and no label where the next
    token begins another document."""

    def read(self, numbers: Int64s) -> Batch:
        windows = self._stretches(numbers)
        tokens = self._across_runs(windows)
        ids = np.zeros(tokens.shape, np.int64)
        bounds = self.index.documents
        for row, parts in enumerate(windows):
            at = 0
            for start, size in parts:
                low, high = np.searchsorted(bounds, [start, start + size])
                begins = np.asarray(bounds[low:high], np.int64) - start + at
                ids[row, begins] = 1
                at += size
            ids[row, 0] = 0
        ids = np.cumsum(ids, axis=1)
        batch = _shifted(tokens)
        batch["labels"][torch.from_numpy(ids[:, 1:] != ids[:, :-1])] = NO_LABEL
        return {**batch, "document_ids": torch.from_numpy(np.ascontiguousarray(ids[:, :-1]))}

    def read_batches(self, numbers: Int64s, size: int) -> Iterator[Batch]:
        return _batches(self, numbers, size)


class PackedWindows:
    """Whole documents, put together so that little room is left. Documents longer than a window are cut. The rest of a
    window is end-of-text without labels, a document of its own."""

    def __init__(self, index: Index, seq_length: int, split: Split, validation_fraction: float) -> None:
        packing = index.packing
        wanted = (seq_length, validation_fraction)
        if packing is None or (packing.seq_length, packing.validation_fraction) != wanted:
            have = (
                "no packing"
                if packing is None
                else f"a packing for seq_length={packing.seq_length} and "
                f"validation_fraction={packing.validation_fraction:g}"
            )
            raise ConfigError(
                f"The index {index.path} has {have}, but documents='pack' needs one for seq_length={seq_length} and "
                f"validation_fraction={validation_fraction:g}. Make it with: elastic-harness index pack {index.path} "
                f"-o PACKED.bin --seq-length {seq_length} --validation-fraction {validation_fraction:g}"
            )
        self.index = index
        self.seq_length = seq_length
        self._packing = packing
        low, high = (0, packing.n_train) if split == "train" else (packing.n_train, packing.n_bins)
        self._first, self._count = low, high - low
        self.tokens = int(np.sum(packing.lengths[int(packing.bins[low]) : int(packing.bins[high])], dtype=np.int64))

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: Int64s) -> Batch:
        shape = (len(numbers), self.seq_length)
        inputs, labels = np.full(shape, self.index.eot_id, np.int64), np.full(shape, NO_LABEL, np.int64)
        ids = np.zeros(shape, np.int64)
        for row, pieces in enumerate(self._pieces(numbers)):
            at = 0
            for number, (start, length) in enumerate(pieces):
                tokens = self.index.read(np.array([start]), length + 1)[0]
                inputs[row, at : at + length] = tokens[:-1]
                labels[row, at : at + length] = tokens[1:]
                ids[row, at : at + length] = number
                at += length
            ids[row, at:] = len(pieces)
        return {
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
            "document_ids": torch.from_numpy(ids),
        }

    def read_batches(self, numbers: Int64s, size: int) -> Iterator[Batch]:
        return _batches(self, numbers, size)

    def prefetch(self, numbers: Int64s) -> None:
        for pieces in self._pieces(numbers):
            for start, length in pieces:
                self.index.prefetch(np.array([start]), length + 1)

    def _pieces(self, numbers: Int64s) -> list[list[tuple[int, int]]]:
        """Return for each window its pieces: where each begins in the file, and how many labels it has."""
        bins, starts, lengths = self._packing.bins, self._packing.starts, self._packing.lengths
        found = []
        for number in (numbers + self._first).tolist():
            low, high = int(bins[number]), int(bins[number + 1])
            found.append(list(zip(starts[low:high].tolist(), lengths[low:high].tolist(), strict=True)))
        return found


class Sources:
    """The windows of several indexes as one range of sample ids, one index after another."""

    def __init__(self, parts: Sequence[Windows | PackedWindows]) -> None:
        self.parts = list(parts)
        self.sizes = tuple(len(part) for part in parts)
        self._offsets = offsets(self.sizes)

    def __len__(self) -> int:
        return sum(self.sizes)

    def read(self, ids: Int64s) -> Batch:
        if len(self.parts) == 1:
            return self.parts[0].read(ids)
        batch: Batch = {}
        for part, offset, here in self._by_part(ids):
            for name, rows in part.read(ids[here] - offset).items():
                if name not in batch:
                    batch[name] = torch.empty((len(ids), *rows.shape[1:]), dtype=rows.dtype)
                batch[name][torch.from_numpy(here)] = rows
        return batch

    def read_batches(self, ids: Int64s, size: int) -> Iterator[Batch]:
        """Return the same, `size` samples at a time."""
        return self.parts[0].read_batches(ids, size) if len(self.parts) == 1 else _batches(self, ids, size)

    def prefetch(self, ids: Int64s) -> None:
        for part, offset, here in self._by_part(ids):
            part.prefetch(ids[here] - offset)

    def indexes(self, ids: Int64s) -> list[Index]:
        """Return the index that each of these windows is of."""
        owners = np.searchsorted(self._offsets, ids, side="right") - 1
        return [self.parts[owner].index for owner in owners.tolist()]

    def _by_part(self, ids: Int64s) -> list[tuple[Windows | PackedWindows, int, Int64s]]:
        """Return each part that has some of these ids, with its first id, and where among them its own ids are."""
        owners = np.searchsorted(self._offsets, ids, side="right") - 1
        return [
            (self.parts[owner], int(self._offsets[owner]), np.flatnonzero(owners == owner))
            for owner in np.unique(owners).tolist()
        ]


def cu_seqlens(document_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bounds of the documents in the flattened batch, (n + 1,) int32, and the length of the longest
    document, from (m, S) document ids. Attention kernels for sequences of varying length take these. Each row begins a
    document."""
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    bounds = torch.nonzero(begins.flatten()).flatten()
    bounds = torch.cat([bounds, bounds.new_tensor([document_ids.numel()])])
    return bounds.to(torch.int32), int(bounds.diff().max())


def cut(index: Index, seq_length: int, documents: Documents, split: Split, fraction: float) -> Windows | PackedWindows:
    """Return the windows of an index. Raises ConfigError for a packing that it does not have."""
    if documents == "pack":
        return PackedWindows(index, seq_length, split, fraction)
    kind = SeparateWindows if documents == "separate" else Windows
    return kind(index, seq_length, split, fraction)


def _runs(index: Index, split: Split, fraction: float) -> tuple[Int64s, Int64s]:
    """Return where the runs of consecutive documents of one side begin and end."""
    if fraction == 0:
        return np.array([0 if split == "train" else len(index)], np.int64), np.array([len(index)], np.int64)
    validation = held_out(index.keys, fraction)
    mine = validation if split == "validation" else ~validation
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mine, [False]]).astype(np.int8)))
    bounds = np.asarray(index.documents)[edges].astype(np.int64)
    return bounds[0::2], bounds[1::2]


def _shifted(tokens: npt.NDArray[Any]) -> Batch:
    """Return the inputs and, one token ahead, the labels, from (m, S + 1) tokens."""
    return {
        "input_ids": torch.from_numpy(tokens[:, :-1].astype(np.int64)),
        "labels": torch.from_numpy(tokens[:, 1:].astype(np.int64)),
    }


def _batches(source: Windows | PackedWindows | Sources, numbers: Int64s, size: int) -> Iterator[Batch]:
    for low in range(0, len(numbers), size):
        yield source.read(numbers[low : low + size])
