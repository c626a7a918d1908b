"""`ResumableDataset`: windows of a token index in a computed order, each once an epoch, resumable in constant time.

Under the harness it is read by sample number (`read`), and the run keeps the position. Alone it is an iterable for a
`torch.utils.data.DataLoader`, sharded by rank. One pass over it is the rest of an epoch, and the next pass is the next
epoch. Its position counts the samples that were handed out. `ResumableLoader` is the DataLoader for it with worker
processes. Its position counts what the consumer was given, not what was read ahead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastic_harness.data import index_builder, tokenizers
from elastic_harness.data.corpus import cache_folder
from elastic_harness.data.mixture import Mixture, MixtureOrder, make_stages
from elastic_harness.data.order import EpochOrder, Order, Permutation, order_key, sample_ids
from elastic_harness.data.readers import find_inputs
from elastic_harness.data.split import Split
from elastic_harness.data.token_index import TokenIndexFile
from elastic_harness.data.windows import Documents, Index, Sources, cut
from elastic_harness.errors import ConfigError

ORDER = "feistel-8/1"  # the algorithm of `order.Permutation`; part of every state
BLOCK = 4096  # positions whose order is computed at once
READ_AHEAD = 256  # samples gathered at once where batches are small
STATE_VERSION = 1
Uneven = Literal["exact", "pad", "drop"]


class ResumableDataset(IterableDataset[dict[str, Any]]):
    """Samples of `seq_length` tokens and their labels, one token ahead, in an order that is new in each epoch.

    The text comes from one of three arguments. index_file: a TokenIndexFile, its path or its address in object storage.
    data_files (with tokenizer): files, folders or patterns, from which an index is built once and kept in the cache
    folder (tokenizer: a name, or an object of tiktoken, tokenizers or transformers: see
    tokenizers.chosen). mixture: several indexes in proportions. index_file and data_files may be given together: then
    the index is read, and it must be of these files and this tokenizer, as `index_builder.mismatch` sees it.

    split: which side of the split by document, of which `validation_fraction` is held out. rank, world_size: this
    process's share when it is iterated over; default: those of the process group, else alone. endless: a pass never
    ends, but goes on with the next epoch. epochs: after so many, over all passes, a pass is empty.

    A sample is {"input_ids": (S,) int64, "labels": (S,) int64, "sample_id": int}. documents: "join" cuts the text at
    every S tokens; "separate" does too and adds "document_ids" (S,) int64, with no label where the next token is of
    another document; "pack" has whole documents and needs an index with a packing.

    uneven: what happens at the end of an epoch if world_size does not divide the rest of it. "exact" gives some ranks
    one sample more, "pad" repeats samples so that all have as many (as plain DDP needs), "drop" leaves the rest out.
    `uneven_samples` says how many in a whole epoch.

    A mixture has no epochs. Each source begins again, in a new order, when all of its samples were read. A pass has as
    many samples as the sources together. Raises ConfigError if there is not one window.
    """

    def __init__(
        self,
        index_file: Index | str | Path | None = None,
        seq_length: int = 1024,
        seed: int = 0,
        *,
        data_files: Sequence[str] | str | None = None,
        tokenizer: object = "bytes",
        mixture: Mixture | None = None,
        documents: Documents = "join",
        split: Split = "train",
        validation_fraction: float = 0.0,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "exact",
        epochs: int | None = None,
        endless: bool = False,
    ) -> None:
        if (index_file is None and data_files is None) == (mixture is None):
            raise ConfigError(
                "ResumableDataset needs index_file, data_files or mixture; give exactly one of them, or index_file "
                "with the data_files that it is of."
            )
        if seq_length < 1:
            raise ConfigError(f"seq_length is {seq_length}, but must be at least 1.")
        if not 0 <= validation_fraction < 1:
            raise ConfigError(f"validation_fraction is {validation_fraction}, but must be at least 0 and below 1.")
        if uneven not in ("exact", "pad", "drop"):
            raise ConfigError(f"uneven is {uneven!r}, but must be 'exact', 'pad' or 'drop'.")
        if documents not in ("join", "separate", "pack"):
            raise ConfigError(f"documents is {documents!r}, but must be 'join', 'separate' or 'pack'.")
        if mixture is not None and (epochs is not None or uneven != "exact"):
            raise ConfigError("A mixture has no epochs: leave out epochs and uneven, and end the loop yourself.")
        if endless and epochs is not None:
            raise ConfigError(f"endless is True and epochs is {epochs}; they exclude each other: leave one out.")
        if data_files is not None:
            files = [data_files] if isinstance(data_files, str) else data_files
            if index_file is None:
                index_file = find_or_build(files, tokenizer)
            else:
                index_file = _of_these(_opened(index_file), files, tokenizer)
        names = list(mixture.sources) if mixture else [""]
        self.indexes = [_opened(given) for given in (mixture.sources.values() if mixture else [index_file])]
        self.documents = documents
        self.seq_length = seq_length
        self.seed = seed
        self.split = split
        self.validation_fraction = validation_fraction
        self._uneven = uneven
        self._epochs = epochs
        self._endless = endless
        self._rank, self._world = _share(rank, world_size)
        self._sources = self._cut(split)
        self._held_out: Sources | None = None
        self._position = 0  # samples handed out, over all ranks and epochs
        for part in self._sources.parts:
            if len(part) < 1:
                raise ConfigError(
                    f"The {split} part of {part.index.path} has {part.tokens} tokens, but one window needs "
                    f"seq_length + 1 = {seq_length + 1}; give more text or a smaller seq_length."
                )
        self.order: Order = EpochOrder(len(self), seed)
        if mixture is not None:
            _check_alike(names, self.indexes)
            stages = make_stages(names, mixture.weights, mixture.changes)
            self.order = MixtureOrder(names, self._sources.sizes, stages, seed)
        if uneven == "drop" and len(self) < self._world:
            raise ConfigError(
                f"uneven='drop' would leave out all of the {len(self)} samples, as there are {self._world} ranks; use "
                "'exact' or 'pad'."
            )

    def __len__(self) -> int:
        """Return the number of samples, over all ranks. An epoch has each of them once, and a whole pass is an
        epoch."""
        return len(self._sources)

    # ---- by number: what the harness uses

    def read(self, sample_ids: npt.ArrayLike) -> dict[str, torch.Tensor]:
        """Return the batch of these samples: ``input_ids``, ``labels`` (m, S) and ``sample_id`` (m,), all int64."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= len(self)):
            raise IndexError(f"sample ids span {ids.min()} … {ids.max()}, but must lie in 0 … {len(self) - 1}.")
        return {**self._sources.read(ids), "sample_id": torch.from_numpy(ids.copy())}

    def texts(self, sample_ids: npt.ArrayLike) -> list[str]:
        """Return the inputs of these samples as text, without ends of texts. Raises ConfigError if the tokenizer of an
        index is not installed here."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        if not ids.size:
            return []
        rows = self._sources.read(ids)["input_ids"].numpy()
        found = []
        for row, index in zip(rows, self._sources.indexes(ids), strict=True):
            file = index.tokenizer_file() if isinstance(index, TokenIndexFile) else ""
            found.append(tokenizers.restore(index.tokenizer, file).decode(row[row != index.eot_id]))
        return found

    @property
    def remote(self) -> bool:
        """Whether reading may have to wait for object storage. Then `prefetch` saves time."""
        return any(index.remote for index in self.indexes)

    def prefetch(self, sample_ids: npt.ArrayLike) -> None:
        """Begin to fetch from object storage what these samples need, and return at once."""
        self._sources.prefetch(np.asarray(sample_ids, dtype=np.int64))

    def validation_batch(self, index: int, batch: int) -> dict[str, torch.Tensor]:
        """Return the held-out batch ``index`` of ``batch`` windows. It is the same in every run of this seed. The
        numbers wrap around at the end."""
        if self._held_out is None:
            self._held_out = self._cut("validation")
        windows = len(self._held_out)
        if windows < 1:
            raise ConfigError(
                f"No document of {self.indexes[0].path} is held out, or none of seq_length + 1 = "
                f"{self.seq_length + 1} tokens; raise data.validation_fraction, or set trainer.eval_interval_steps=0."
            )
        order = Permutation(windows, order_key(self.seed, 0, "validation"))
        return self._held_out.read(order((np.arange(batch) + index * batch) % windows))

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that decides the content of every sample and their order. Datasets with equal fingerprints
        read equal tokens."""
        return {
            "kind": "token index",
            "content": self._corpus(),
            "seq_length": self.seq_length,
            "documents": self.documents,
            "split": self.split,
            "validation_fraction": self.validation_fraction,
            "n_samples": len(self),
            "order": self.order.describe(),
        }

    # ---- alone: an iterable

    @property
    def uneven_samples(self) -> int:
        """How many samples a whole epoch repeats ("pad") or leaves out ("drop"); 0 for a mixture."""
        if self._uneven == "exact":
            return 0
        return abs(self._handed_out(len(self)) - len(self))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's samples from the position to the end of the epoch. The next pass begins the next epoch.
        Raises ConfigError in a worker process of a plain DataLoader."""
        if get_worker_info() is not None:
            raise ConfigError(
                "A DataLoader with num_workers reads ahead in copies of the dataset, which then cannot know what was "
                "used; take num_workers=0 (which is faster here) or elastic_harness.data.ResumableLoader."
            )
        end = self.pass_end()
        for ids, (before, after) in self.groups(READ_AHEAD, first_size=1):
            together = self._sources.read(ids)
            samples = zip(*(rows.unbind(0) for rows in together.values()), strict=True)
            for number, (sample_id, sample) in enumerate(zip(ids.tolist(), samples, strict=True), start=1):
                self._position = min(before + number * self._world, after)
                yield dict(zip(together, sample, strict=True)) | {"sample_id": sample_id}
        self._position = end  # also of a rank that had no sample at the epoch's tail, where others had one

    def batches(self, size: int, read_ahead: int) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
        """Yield the samples of a pass in batches of `size`, each with the position after it. The last batch of an epoch
        may be smaller. `read_ahead` batches are read at once."""
        for ids, (before, after) in self.groups(size * read_ahead, first_size=size):
            low = 0
            for batch in self._sources.read_batches(ids, size):
                batch["sample_id"] = torch.from_numpy(ids[low : low + size])
                low += size
                yield batch, min(before + low * self._world, after)

    def groups(self, size: int, first_size: int) -> Iterator[tuple[npt.NDArray[np.int64], tuple[int, int]]]:
        """Yield this rank's sample ids of a pass in groups, with the position before each group and after it, in
        samples of all ranks. The first group has `first_size` ids, so that resuming is quick. Later groups have `size`,
        and the last one of an epoch may have fewer."""
        samples, remote = self.order.n_samples, self.remote
        position, end, step = self._position, self.pass_end(), first_size
        while position < end:
            epoch, first = divmod(position, samples)
            start = epoch * samples
            mine = range(first + self._rank, first + self._handed_out(end - position), self._world)
            low = 0
            while low < len(mine):
                block = np.array(mine[low : low + step], np.int64)
                low, step = low + step, BLOCK - BLOCK % size or size
                ids = sample_ids(self.order, epoch, block % samples)
                for at in range(0, len(ids), size):
                    before = start + int(block[at]) - self._rank
                    group = ids[at : at + size]
                    if remote:
                        self.prefetch(ids[at + size : at + 2 * size])
                    yield group, (before, min(before + len(group) * self._world, end))
            position, end = end, end + samples if self._endless else end

    def pass_end(self) -> int:
        """Return the position where a pass that begins now ends. That is the epoch's end. For a mixture it is after as
        many samples as the mixture has. If there are no more epochs, it is the position itself. An endless pass goes on
        there."""
        samples = self.order.n_samples if self._endless else len(self)
        done = self._position // samples
        return self._position if self._epochs is not None and done >= self._epochs else (done + 1) * samples

    def _handed_out(self, left: int) -> int:
        """Return how many of the samples that are left in an epoch all ranks together are given, repeated ones
        included."""
        match self._uneven:
            case "pad":
                return -(-left // self._world) * self._world
            case "drop":
                return left - left % self._world
            case _:
                return left

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the state to go on from. It does not depend on rank and world size, and has under 300 bytes of
        JSON."""
        identity = self._identity(self._position)
        return {"version": STATE_VERSION, "order": ORDER, "position": self._position, **identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. Raises ConfigError if the state is of another corpus, seed or sequence
        length."""
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"The dataset's state has version {state.get('version')}, but this program reads {STATE_VERSION}."
            )
        position = int(state["position"])
        for key, own in {"order": ORDER, **self._identity(position)}.items():
            if state.get(key) != own:
                raise ConfigError(
                    f"The state is of another dataset: its {key} is {json.dumps(state.get(key))}, this dataset's "
                    f"{json.dumps(own)}. Give the same index, seed, seq_length and split, or start without the state."
                )
        self.go_to(position)

    @property
    def position(self) -> int:
        """Samples handed out, over all ranks and epochs."""
        return self._position

    def go_to(self, position: int) -> None:
        """Go on after so many samples, over all ranks and epochs."""
        if position < 0:
            raise ConfigError(f"The position is {position}, but must be at least 0.")
        self._position = position

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, the first being 0, unless the position is in that epoch already: so a loop
        over epochs that calls this goes on in the middle of one after `load_state_dict`. Needed only to leave epochs
        out, because each pass is the next epoch by itself. Raises ConfigError for a mixture, which has none."""
        if isinstance(self.order, MixtureOrder):
            raise ConfigError("A mixture has no epochs: leave set_epoch out, and end the loop yourself.")
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"set_epoch was given {epoch!r}; give a whole number of at least 0.")
        if self._position // len(self) != epoch:
            self.go_to(epoch * len(self))

    @property
    def total_tokens(self) -> int:
        """How many tokens this split has, of all sources together."""
        return sum(part.tokens for part in self._sources.parts)

    @property
    def index(self) -> Index:
        """The index, or the first one of a mixture, whose tokenizer is that of all."""
        return self.indexes[0]

    def _identity(self, position: int) -> dict[str, Any]:
        """Return everything that must not have changed up to a position. The weights of a mixture may change after
        it."""
        identity = {
            "corpus": self._corpus(),
            "seed": self.seed,
            "seq_length": self.seq_length,
            "documents": self.documents,
            "split": f"{self.split}/{self.validation_fraction:g}",
        }
        if isinstance(self.order, MixtureOrder):
            begun = [[stage.first, stage.weights] for stage in self.order.stages if stage.first < position]
            identity["weights"] = xxhash.xxh3_64_hexdigest(json.dumps(begun).encode())
        return identity

    def _corpus(self) -> str:
        if isinstance(self.order, MixtureOrder):
            named = [[n, index.fingerprint] for n, index in zip(self.order.names, self.indexes, strict=True)]
            return xxhash.xxh3_128_hexdigest(json.dumps(named).encode())
        return self.index.fingerprint

    def _cut(self, split: Split) -> Sources:
        return Sources(
            [cut(index, self.seq_length, self.documents, split, self.validation_fraction) for index in self.indexes]
        )


class ResumableLoader(DataLoader[dict[str, Any]]):
    """A DataLoader that gives a ResumableDataset's samples in batches, in the same order with any number of worker
    processes. It keeps the dataset's position at what it has handed out. One pass is the rest of an epoch, unless the
    dataset is endless. The last batch of an epoch may be smaller."""

    def __init__(self, dataset: ResumableDataset, batch_size: int = 1, num_workers: int = 0, **more: Any) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}, but must be at least 1.")
        self._source = dataset
        self._batch_size = batch_size
        self._begin = torch.zeros(1, dtype=torch.int64)  # of the pass; worker processes may outlive the one before
        if num_workers:
            self._begin.share_memory_()
        batches = _Batches(dataset, batch_size, self._begin)
        super().__init__(batches, batch_size=None, num_workers=num_workers, **more)

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        size, end = self._batch_size, self._source.pass_end()
        self._begin[0] = self._source.position
        alone = self.num_workers == 0 and not self.pin_memory  # then torch's loader would only add to the cost
        batches = self._source.batches(size, max(4, -(-READ_AHEAD // size))) if alone else super().__iter__()
        for batch, position in batches:
            self._source.go_to(position)
            yield batch
        self._source.go_to(end)

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)


class _Batches(IterableDataset[Any]):
    """Whole batches of the pass that begins at `begin`, each with the position after it. Worker processes take turns,
    as their DataLoader does."""

    def __init__(self, dataset: ResumableDataset, batch_size: int, begin: torch.Tensor) -> None:
        self._begin = begin
        self._dataset = dataset
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Any], int]]:
        info = get_worker_info()
        turn, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._dataset.go_to(int(self._begin))
        for number, (ids, (_, after)) in enumerate(self._dataset.groups(self._batch_size, self._batch_size)):
            if number % workers == turn:
                yield self._dataset.read(ids), after


def find_or_build(data_files: Sequence[str], tokenizer: object) -> TokenIndexFile:
    """Return the index of these files, from the cache folder or built into it. It is known by names, sizes and times of
    the files and by the tokenizer."""
    chosen = tokenizers.chosen(tokenizer)
    files = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in find_inputs(data_files)]
    key = xxhash.xxh3_128_hexdigest(json.dumps([files, chosen.identity], sort_keys=True).encode())
    path = cache_folder("indexes") / f"{key}.bin"
    if not path.exists():
        index_builder.build_once(data_files, path, chosen)
    return TokenIndexFile(path)


def _of_these(index: Index, data_files: Sequence[str], tokenizer: object) -> Index:
    """Return the index. Raises ConfigError if it is not of these files and this tokenizer."""
    if not isinstance(index, TokenIndexFile):
        raise ConfigError("data_files can be compared with a token index only; give one of index_file and data_files.")
    if differs := index_builder.mismatch(index, data_files, tokenizers.chosen(tokenizer)):
        raise ConfigError(
            f"{index.path} is not the index of these data_files: {differs}. Build it again (elastic-harness index "
            "build), or leave out index_file or data_files."
        )
    return index


def _share(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} and world_size={world_size}: give both, with 0 <= rank < world_size.")
    return rank, world_size


def _opened(given: Index | str | Path | None) -> Index:
    return TokenIndexFile(given) if isinstance(given, (str, Path)) else cast(Index, given)


def _check_alike(names: Sequence[str], indexes: Sequence[Index]) -> None:
    """Raise ConfigError if the tokens of a mixture's indexes do not mean the same."""
    for name, index in zip(names, indexes, strict=True):
        if index.tokenizer != indexes[0].tokenizer:
            raise ConfigError(
                f"The sources {names[0]} and {name} have different tokenizers, {json.dumps(indexes[0].tokenizer)} and "
                f"{json.dumps(index.tokenizer)}; build both with the same."
            )
