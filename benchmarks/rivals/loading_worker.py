"""One data loader of `benchmarks.loading`, alone in a process: `python loading_worker.py SYSTEM FOLDER …`.

FOLDER was filled by `prepare`. Every system gives batches of {input_ids, labels} (B, S) int64 of windows in random
order. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

SEED = 7


class Rows(Dataset):  # type: ignore[type-arg]
    """Windows of a flat file of tokens; a list of numbers is read at once, which is the fastest that torch has."""

    def __init__(self, path: Path, seq_length: int) -> None:
        tokens = np.asarray(np.memmap(path, np.uint16, mode="r"))
        self.rows = np.lib.stride_tricks.sliding_window_view(tokens, seq_length + 1)[::seq_length]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        rows = self.rows[np.asarray(ids)]
        return {
            "input_ids": torch.from_numpy(rows[:, :-1].astype(np.int64)),
            "labels": torch.from_numpy(rows[:, 1:].astype(np.int64)),
        }


class OneRow(Rows):
    """The same, a window at a time, as most training scripts have it; also what Grain reads."""

    def __getitem__(self, number: Any) -> dict[str, Any]:
        row = self.rows[int(number)]
        return {"input_ids": row[:-1].astype(np.int64), "labels": row[1:].astype(np.int64)}


class OneTensor(OneRow):
    """The same in tensors."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: torch.from_numpy(values) for name, values in super().__getitem__(number).items()}


def split(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": rows[:, :-1].to(torch.int64), "labels": rows[:, 1:].to(torch.int64)}


def stacked(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Collate for windows that come as arrays."""
    return split(torch.from_numpy(np.stack([sample["tokens"] for sample in samples])))


def ours(folder: Path, S: int, B: int, W: int) -> Any:
    from elastic_harness.data import ResumableDataset, ResumableLoader

    return ResumableLoader(ResumableDataset(folder / "index.bin", S, SEED, endless=True), batch_size=B, num_workers=W)


def torch_by_item(folder: Path, S: int, B: int, W: int) -> Any:
    return DataLoader(OneTensor(folder / "tokens.u16", S), batch_size=B, shuffle=True, drop_last=True, num_workers=W)


def torch_loader(folder: Path, S: int, B: int, W: int) -> Any:
    rows = Rows(folder / "tokens.u16", S)
    sampler = BatchSampler(RandomSampler(rows), B, drop_last=True)
    return DataLoader(rows, sampler=sampler, batch_size=None, num_workers=W)


def stateful_loader(folder: Path, S: int, B: int, W: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import BatchSampler as Batches
    from torchdata.stateful_dataloader.sampler import RandomSampler as Random

    rows = Rows(folder / "tokens.u16", S)
    return StatefulDataLoader(rows, sampler=Batches(Random(rows), B, drop_last=True), batch_size=None, num_workers=W)


def grain(folder: Path, S: int, B: int, W: int) -> Any:
    """W: reading threads."""
    from grain import python as g

    dataset = g.MapDataset.source(OneRow(folder / "tokens.u16", S)).seed(SEED).shuffle().batch(B)
    return dataset.to_iter_dataset(g.ReadOptions(num_threads=W, prefetch_buffer_size=64 if W else 0))


def litdata(folder: Path, S: int, B: int, W: int) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(
        str(folder / "litdata"), item_loader=TokensLoader(block_size=S + 1), shuffle=True, drop_last=True
    )
    return StreamingDataLoader(dataset, batch_size=B, num_workers=W, collate_fn=lambda rows: split(torch.stack(rows)))


def mosaic(folder: Path, S: int, B: int, W: int) -> Any:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=B, shuffle_seed=SEED)
    return DataLoader(dataset, batch_size=B, num_workers=W, collate_fn=stacked)


SYSTEMS: dict[str, Callable[[Path, int, int, int], Any]] = {
    "ours": ours,
    "torch_by_item": torch_by_item,
    "torch": torch_loader,
    "stateful": stateful_loader,
    "grain": grain,
    "litdata": litdata,
    "mosaic": mosaic,
}


# ---- the data, in each one's format


def prepare(folder: Path, tokens: int, S: int) -> dict[str, str]:
    """Write random tokens in every format; returns what could not be, and why."""
    from elastic_harness.data.token_index import write_index

    values = np.random.default_rng(0).integers(0, 50_000, tokens, dtype=np.uint16)
    values.tofile(folder / "tokens.u16")
    write_index(
        folder / "index.bin",
        tokens=[values.tobytes()],
        lengths=np.array([tokens], np.uint64),
        keys=np.array([1], np.uint64),
        sources=np.zeros(1, np.uint32),
        names=["random"],
        vocab_size=50_000,
        eot_id=0,
        tokenizer={"kind": "random"},
    )
    missing: dict[str, str] = {}
    for name, write in (("litdata", write_litdata), ("mosaic", write_mosaic)):
        try:
            write(folder, values, S)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return missing


def litdata_item(part: str) -> Iterator[torch.Tensor]:
    path, low, high = part.split(":")
    yield torch.from_numpy(np.fromfile(path, np.uint16)[int(low) : int(high)].astype(np.int32))


def write_litdata(folder: Path, values: np.ndarray, S: int) -> None:
    from litdata import TokensLoader, optimize

    step = (S + 1) * 1000
    parts = [f"{folder / 'tokens.u16'}:{low}:{low + step}" for low in range(0, len(values) - step, step)]
    optimize(
        fn=litdata_item,
        inputs=parts,
        output_dir=str(folder / "litdata"),
        chunk_size=(S + 1) * 8192,
        item_loader=TokensLoader(),
        num_workers=1,
        verbose=False,
    )


def write_mosaic(folder: Path, values: np.ndarray, S: int) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds"), columns={"tokens": f"ndarray:uint16:{S + 1}"}) as out:
        for low in range(0, len(values) - S - 1, S):
            out.write({"tokens": values[low : low + S + 1]})


# ---- what is measured


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def speed(loader: Any, B: int, warm_s: float, measure_s: float) -> dict[str, Any]:
    batches = endless(loader)
    first = next(batches)
    shape, kind = tuple(first["input_ids"].shape), str(first["labels"].dtype).removeprefix("torch.")
    end = time.perf_counter() + warm_s
    while time.perf_counter() < end:
        next(batches)
    count, begun = 0, time.perf_counter()
    while (now := time.perf_counter()) < begun + measure_s:
        for _ in range(16):
            next(batches)
        count += 16
    return {"samples_per_s": count * B / (now - begun), "shape": shape, "dtype": kind}


def resume(make: Callable[[], Any], system: str, consumed: int) -> dict[str, Any]:
    """From a state at `consumed` batches to the first batch in a new loader, its construction excluded."""
    loader = make()
    if system == "ours":
        loader._source.go_to(consumed * loader._batch_size)
        state = loader.state_dict()
    elif not system.startswith("torch"):
        iterator = iter(loader)
        for _ in range(consumed):
            next(iterator)
        state = iterator.get_state() if system == "grain" else None
        if state is None and system == "mosaic":
            state = loader.dataset.state_dict(consumed * loader.batch_size, from_beginning=False)
        state = state if state is not None else loader.state_dict()
        del iterator
    fresh = make()
    begun = time.perf_counter()
    if system.startswith("torch"):
        iterator = iter(fresh)
        for _ in range(consumed):
            next(iterator)
    elif system == "grain":
        iterator = iter(fresh)
        iterator.set_state(state)
    elif system == "mosaic":
        fresh.dataset.load_state_dict(state)
        iterator = iter(fresh)
    else:
        fresh.load_state_dict(state)
        iterator = iter(fresh)
    next(iterator)
    elapsed = time.perf_counter() - begun
    return {"resume_s": elapsed, "state_bytes": 0 if system.startswith("torch") else len(repr(state))}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=[*SYSTEMS, "prepare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--warm-s", type=float, default=1.0)
    parser.add_argument("--measure-s", type=float, default=2.0)
    parser.add_argument("--resume-after", type=int, metavar="BATCHES")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.system == "prepare":
        print(json.dumps({"missing": prepare(arguments.folder, arguments.tokens, arguments.seq_length)}))
        return 0

    def make() -> Any:
        return SYSTEMS[arguments.system](arguments.folder, arguments.seq_length, arguments.batch, arguments.workers)

    if arguments.resume_after is not None:
        found = resume(make, arguments.system, arguments.resume_after)
    else:
        found = speed(make(), arguments.batch, arguments.warm_s, arguments.measure_s)
    print(json.dumps(found), flush=True)
    if arguments.system == "litdata":  # its copy of the chunks would stay behind
        shutil.rmtree(os.environ.get("DATA_OPTIMIZER_CACHE_FOLDER", arguments.folder / "none"), ignore_errors=True)
    os._exit(0)  # threads of some rivals do not end by themselves


if __name__ == "__main__":
    sys.exit(main())
