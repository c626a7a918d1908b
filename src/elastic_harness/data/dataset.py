"""`ResumableDataset`: windows of a token index in a computed order, each once an epoch, resumable in constant time.

Under the harness it is read by sample number (`read`), and the run keeps the position. Alone it is an iterable for a
`torch.utils.data.DataLoader`, sharded by rank; its position counts what was handed out. `ResumableLoader` is the
DataLoader for it with worker processes, whose position is what the consumer was given, not what was read ahead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastic_harness.data import index_builder, tokenizers
from elastic_harness.data.corpus import cache_folder
from elastic_harness.data.order import Permutation, epoch_order, order_key
from elastic_harness.data.readers import find_inputs
from elastic_harness.data.token_index import TokenIndexFile
from elastic_harness.errors import ConfigError

ORDER = "feistel-8/1"  # the algorithm of `order.Permutation`; part of every state
BLOCK = 4096  # positions whose order is computed at once
READ_AHEAD = 64  # samples read at once where they are handed out one by one
STATE_VERSION = 1
Split = Literal["train", "validation"]
Uneven = Literal["exact", "pad", "drop"]


class Windows:
    """Windows of `length` tokens at stride `stride` over those documents of an index that belong to one side of the
    split. Which side depends on the document's content alone, so it stays where it is when data is added."""

    def __init__(
        self, index: TokenIndexFile, length: int, stride: int, split: Split, validation_fraction: float
    ) -> None:
        self._index = index
        self._length = length
        self._stride = stride
        starts, ends = self._runs(index, split, validation_fraction)
        self._starts = starts  # (R,) where each run of consecutive documents begins in the file
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - starts)])  # (R + 1,) tokens before it
        self.tokens = int(self._before[-1])

    @staticmethod
    def _runs(
        index: TokenIndexFile, split: Split, fraction: float
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if fraction == 0:
            whole = np.array([0 if split == "train" else len(index)], np.int64)
            return whole, np.array([len(index)], np.int64)
        held_out = np.asarray(index.keys) < np.uint64(int(fraction * 2.0**64))
        mine = held_out if split == "validation" else ~held_out
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mine, [False]]).astype(np.int8)))
        bounds = np.asarray(index.documents)[edges].astype(np.int64)
        return bounds[0::2], bounds[1::2]

    def __len__(self) -> int:
        return max(0, (self.tokens - self._length) // self._stride + 1)

    def read(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(m, length) tokens of these (m,) windows."""
        firsts = numbers * self._stride
        runs = np.searchsorted(self._before, firsts, side="right") - 1
        inside = firsts + self._length <= self._before[runs + 1]
        if inside.all():
            return self._index.read(self._starts[runs] + firsts - self._before[runs], self._length).astype(np.int64)
        positions = firsts[:, None] + np.arange(self._length, dtype=np.int64)
        runs = np.searchsorted(self._before, positions, side="right") - 1
        return self._index.tokens[self._starts[runs] + positions - self._before[runs]].astype(np.int64)


class ResumableDataset(IterableDataset[dict[str, Any]]):
    """Samples of `seq_length` tokens and their labels, one token ahead, in an order that is new in each epoch.

    index_file: a TokenIndexFile or its path; or data_files (with tokenizer): files, folders or patterns, from which an
    index is built once and kept in the cache folder. split: which side of the split by document, of which
    `validation_fraction` is held out. rank, world_size: this process's share when it is iterated over; default: those
    of the process group, else alone. epochs: iteration ends after so many; default: never.

    A sample is {"input_ids": (S,) int64, "labels": (S,) int64, "sample_id": int}. uneven: what happens at the end of an
    epoch when world_size does not divide what is left of it: "exact" gives some ranks one more, "pad" repeats samples
    so that all have as many (as plain DDP needs), "drop" leaves the rest out; `uneven_samples` says how many in a whole
    epoch. Raises ConfigError if there is not one window.
    """

    def __init__(
        self,
        index_file: TokenIndexFile | str | Path | None = None,
        seq_length: int = 1024,
        seed: int = 0,
        *,
        data_files: Sequence[str] | str | None = None,
        tokenizer: str = "bytes",
        split: Split = "train",
        validation_fraction: float = 0.0,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "exact",
        epochs: int | None = None,
    ) -> None:
        if (index_file is None) == (data_files is None):
            raise ConfigError("ResumableDataset needs either index_file or data_files; give exactly one of them.")
        if seq_length < 1:
            raise ConfigError(f"seq_length is {seq_length}, but must be at least 1.")
        if not 0 <= validation_fraction < 1:
            raise ConfigError(f"validation_fraction is {validation_fraction}, but must be at least 0 and below 1.")
        if uneven not in ("exact", "pad", "drop"):
            raise ConfigError(f"uneven is {uneven!r}, but must be 'exact', 'pad' or 'drop'.")
        if data_files is not None:
            index_file = find_or_build([data_files] if isinstance(data_files, str) else data_files, tokenizer)
        self.index = index_file if isinstance(index_file, TokenIndexFile) else TokenIndexFile(str(index_file))
        self.seq_length = seq_length
        self.seed = seed
        self.split = split
        self.validation_fraction = validation_fraction
        self._uneven = uneven
        self._epochs = epochs
        self._rank, self._world = _share(rank, world_size)
        self._windows = Windows(self.index, seq_length + 1, seq_length, split, validation_fraction)
        self._held_out: Windows | None = None
        self._position = 0  # samples handed out, over all ranks and epochs
        if len(self) < 1:
            raise ConfigError(
                f"The {split} part of {self.index.path} has {self._windows.tokens} tokens, but one window needs "
                f"seq_length + 1 = {seq_length + 1}; give more text or a smaller seq_length."
            )
        if uneven == "drop" and len(self) < self._world:
            raise ConfigError(
                f"uneven='drop' would leave out all of the {len(self)} samples, as there are {self._world} ranks; use "
                "'exact' or 'pad'."
            )

    def __len__(self) -> int:
        """The number of samples in one epoch, over all ranks."""
        return len(self._windows)

    # ---- by number: what the harness uses

    def read(self, sample_ids: npt.ArrayLike) -> dict[str, torch.Tensor]:
        """The batch of these samples: ``input_ids``, ``labels`` (m, S) and ``sample_id`` (m,), all int64."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= len(self)):
            raise IndexError(f"sample ids span {ids.min()} … {ids.max()}, but must lie in 0 … {len(self) - 1}.")
        return {**_shifted(self._windows.read(ids)), "sample_id": torch.from_numpy(ids.copy())}

    def validation_batch(self, index: int, batch: int) -> dict[str, torch.Tensor]:
        """Held-out batch ``index`` of ``batch`` windows: the same in every run of this seed; wraps around."""
        if self._held_out is None:
            length = self.seq_length + 1
            self._held_out = Windows(self.index, length, self.seq_length, "validation", self.validation_fraction)
        windows = len(self._held_out)
        if windows < 1:
            raise ConfigError(
                f"No document of {self.index.path} is held out, or none of seq_length + 1 = {self.seq_length + 1} "
                "tokens; raise data.validation_fraction, or set training.eval_interval_steps=0."
            )
        order = Permutation(windows, order_key(self.seed, 0, "validation"))
        return _shifted(self._held_out.read(order((np.arange(batch) + index * batch) % windows)))

    def fingerprint(self) -> dict[str, Any]:
        """What decides the content of every sample; equal fingerprints read equal tokens."""
        return {
            "kind": "token index",
            "content": self.index.fingerprint,
            "seq_length": self.seq_length,
            "split": self.split,
            "validation_fraction": self.validation_fraction,
            "n_samples": len(self),
        }

    # ---- alone: an iterable

    @property
    def uneven_samples(self) -> int:
        """How many samples a whole epoch repeats ("pad") or leaves out ("drop")."""
        return abs(self._handed_out(len(self)) - len(self))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """This rank's samples from the position on. Raises ConfigError in a worker process of a plain DataLoader."""
        if get_worker_info() is not None:
            raise ConfigError(
                "A DataLoader with num_workers reads ahead in copies of the dataset, which then cannot know what was "
                "used; take num_workers=0 (which is faster here) or elastic_harness.data.ResumableLoader."
            )
        for ids, after in self.groups(READ_AHEAD):
            batch = self.read(ids)
            before = after[0]
            for row, sample_id in enumerate(ids.tolist()):
                self._position = min(before + (row + 1) * self._world, after[1])
                yield {"input_ids": batch["input_ids"][row], "labels": batch["labels"][row], "sample_id": sample_id}

    def groups(self, size: int) -> Iterator[tuple[npt.NDArray[np.int64], tuple[int, int]]]:
        """This rank's sample ids from the position on, `size` at a time, fewer at the end of an epoch; and the position
        before each group and after it, in samples of all ranks."""
        samples = len(self)
        position = self._position
        while True:
            epoch, first = divmod(position, samples)
            if self._epochs is not None and epoch >= self._epochs:
                return
            start, end = epoch * samples, (epoch + 1) * samples
            mine = range(first + self._rank, first + self._handed_out(samples - first), self._world)
            for low in range(0, len(mine), BLOCK - BLOCK % size or size):
                block = np.array(mine[low : low + (BLOCK - BLOCK % size or size)], np.int64)
                ids = epoch_order(samples, self.seed, epoch)(block % samples)
                for at in range(0, len(ids), size):
                    before = start + int(block[at]) - self._rank
                    group = ids[at : at + size]
                    yield group, (before, min(before + len(group) * self._world, end))
            position = end

    def _handed_out(self, left: int) -> int:
        """How many of the samples that are left in an epoch all ranks get together, repeated ones included."""
        match self._uneven:
            case "pad":
                return -(-left // self._world) * self._world
            case "drop":
                return left - left % self._world
            case _:
                return left

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Where to go on: independent of rank and world size, under 300 bytes of JSON."""
        return {"version": STATE_VERSION, "order": ORDER, "position": self._position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. Raises ConfigError if it is of another corpus, seed or sequence length."""
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"The dataset's state has version {state.get('version')}, but this program reads {STATE_VERSION}."
            )
        for key, own in {"order": ORDER, **self._identity()}.items():
            if state.get(key) != own:
                raise ConfigError(
                    f"The state is of another dataset: its {key} is {json.dumps(state.get(key))}, this dataset's "
                    f"{json.dumps(own)}. Give the same index, seed, seq_length and split, or start without the state."
                )
        self.go_to(int(state["position"]))

    def go_to(self, position: int) -> None:
        """Go on after so many samples over all ranks and epochs."""
        if position < 0:
            raise ConfigError(f"The position is {position}, but must be at least 0.")
        self._position = position

    def _identity(self) -> dict[str, Any]:
        return {
            "corpus": self.index.fingerprint,
            "seed": self.seed,
            "seq_length": self.seq_length,
            "split": f"{self.split}/{self.validation_fraction:g}",
        }


class ResumableLoader(DataLoader[dict[str, Any]]):
    """A DataLoader that gives a ResumableDataset's samples in batches, in the same order with any number of worker
    processes, and keeps the dataset's position at what it has handed out. The last batch of an epoch may be smaller."""

    def __init__(self, dataset: ResumableDataset, batch_size: int = 1, num_workers: int = 0, **more: Any) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}, but must be at least 1.")
        self._source = dataset
        super().__init__(_Batches(dataset, batch_size), batch_size=None, num_workers=num_workers, **more)

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        for batch, position in super().__iter__():
            self._source.go_to(position)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)


class _Batches(IterableDataset[Any]):
    """Whole batches with the position after each. Worker processes take turns, as their DataLoader does."""

    def __init__(self, dataset: ResumableDataset, batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Any], int]]:
        info = get_worker_info()
        turn, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number, (ids, (_, after)) in enumerate(self._dataset.groups(self._batch_size)):
            if number % workers == turn:
                yield self._dataset.read(ids), after


def find_or_build(data_files: Sequence[str], tokenizer: str) -> TokenIndexFile:
    """The index of these files: from the cache folder, or built into it. Known by names, sizes and times of the files
    and by the tokenizer."""
    chosen = tokenizers.load(tokenizer)
    files = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in find_inputs(data_files)]
    key = xxhash.xxh3_128_hexdigest(json.dumps([files, chosen.identity], sort_keys=True).encode())
    path = cache_folder().with_name("indexes") / f"{key}.bin"
    if not path.exists():
        index_builder.build_once(data_files, path, chosen)
    return TokenIndexFile(path)


def _share(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} and world_size={world_size}: give both, with 0 <= rank < world_size.")
    return rank, world_size


def _shifted(tokens: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Of (m, S + 1) tokens the inputs and, one token ahead, the labels."""
    both = torch.from_numpy(tokens)
    return {"input_ids": both[:, :-1].contiguous(), "labels": both[:, 1:].contiguous()}
