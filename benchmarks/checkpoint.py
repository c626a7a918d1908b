"""Saving and loading 1.2 GB of model and AdamW state, beside torch.save and PyTorch's DCP, in every tier.

    python -m benchmarks.checkpoint [--mb 1200] [--rounds 5] [--s3 radosgw]

All write the same tensors into new files of the same folder, in turns, and count as done when the data is on disk. The
disk's own limit is one file of that size written through O_DIRECT and synced; the reading limit one file read cold into
memory that is there. "Cold" means that the files were dropped from the page cache before. "Tiers" is the way of a
running job: through shared memory and the writer, until it is on disk, the one before removed after each. Shares: 1, 2
and 4 processes copy one state into shared memory. Object storage: a server on this machine, beside the bare client
(obstore) that sends and fetches one file of that size; a push also reads everything back, a pull checks and syncs.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import torch
import torch.distributed.checkpoint as dcp

from benchmarks import s3_server
from benchmarks.common import finish, ratio_summary, say, summary, target
from elastic_harness.checkpoint import tiers as tiers_module
from elastic_harness.checkpoint.disk import local
from elastic_harness.checkpoint.disk.manifest import newest
from elastic_harness.checkpoint.disk.retention import Retention
from elastic_harness.checkpoint.layout import Slice
from elastic_harness.checkpoint.memory.snapshot import Frames, SnapshotOutcome
from elastic_harness.checkpoint.own_writer import OwnWriter
from elastic_harness.checkpoint.policy import Policy
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.checkpoint.tensors import content_of, slice_of
from elastic_harness.checkpoint.tiers import Captured, CheckpointTier, Tiers
from elastic_harness.contract import shared_frames

PIECE = 16 << 20


def make_state(megabytes: int, tensors: int = 50) -> dict[str, torch.Tensor]:
    """A third each for weights and the two moments of AdamW, float32."""
    each = megabytes * 1_000_000 // (3 * tensors) // 4
    draw = torch.Generator().manual_seed(0)
    names = [f"{kind}.{i}" for kind in ("model", "exp_avg", "exp_avg_sq") for i in range(tensors)]
    return {name: torch.rand(each // 1000, 1000, generator=draw) for name in names}


class Tiered:
    """Shared memory and the writer, as a job has them."""

    def __init__(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        self.tensors = {slice_of(name, tensor): tensor for name, tensor in state.items()}
        self.writer = OwnWriter(folder, lambda *_: None)
        self.tiers = Tiers(self.writer.frames, folder, self.writer)
        self.version = 0

    def save(self) -> None:
        self.version += 1
        policy = Policy(Retention(keep_last=1))
        snapshot = self.tiers.begin_snapshot(Captured(self.version, {}, self.tensors, {"lineage": 0}, policy))
        assert snapshot is not None
        self.tiers.finish_copy()
        assert self.tiers.wait(snapshot) == SnapshotOutcome.DURABLE

    def load(self) -> None:
        """Into memory that is there, as the memcpy beside it."""
        into = {of: content_of(tensor) for of, tensor in self.tensors.items()}
        assert self.tiers.load(self.version, lambda _: into).tier == CheckpointTier.MEMORY


def copy_in_shares(frames: Frames, tensors: dict[Slice, torch.Tensor], version: int, count: int) -> float:
    """Seconds until so many processes have copied their shares; they are there, and have seen the memory, before."""
    snapshot = frames.open_snapshot(version, 0, list(tensors), {}, shares=count, to_disk=False)
    assert snapshot is not None
    context = multiprocessing.get_context("fork")
    go, ready = context.Event(), context.Barrier(count + 1)

    def copier(index: int) -> None:
        mine = snapshot.share(index)
        tiers_module.copy(snapshot, tensors, mine)
        ready.wait()
        go.wait()
        tiers_module.copy(snapshot, tensors, mine)
        snapshot.finish_share(index)

    copiers = [context.Process(target=copier, args=(index,)) for index in range(count)]
    for process in copiers:
        process.start()
    ready.wait()
    begun = time.perf_counter()
    go.set()
    while not snapshot.complete:
        time.sleep(0.0005)
    seconds = time.perf_counter() - begun
    for process in copiers:
        process.join()
    return seconds


def object_storage(kind: str, folder: Path, rounds: int, note: Callable[[str, Callable[[], Any]], None]) -> None:
    """Upload and download beside the bare client, in turns."""
    (folder / "server").mkdir()
    with s3_server.serving(folder / "server", kind) as variables:
        os.environ.update(variables)
        bare = obstore.store.from_url(f"{s3_server.URL}/bare", client_options={"allow_http": True})
        (checkpoint,) = newest(folder / "ours")
        file = checkpoint.path / "state.safetensors"
        for number in range(rounds):
            url = f"{s3_server.URL}/ours-{number}"
            note("s3_put_bare", lambda: obstore.put(bare, "file", file))
            note("s3_push_ours", lambda url=url: transfer.push(checkpoint, url))
            note("s3_get_bare", lambda: fetch(bare, file.stat().st_size, folder / "bare"))
            note("s3_pull_ours", lambda url=url, number=number: transfer.pull(url, folder / f"pulled-{number}"))
            shutil.rmtree(folder / f"pulled-{number}")
            transfer.prune(url, 0)


def fetch(store: Any, size: int, into: Path) -> None:
    """One object into a synced file, in ranges, several at once."""
    descriptor = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def part(low: int) -> None:
        os.pwrite(descriptor, obstore.get_range(store, "file", start=low, end=min(low + PIECE, size)), low)

    with ThreadPoolExecutor(transfer.REQUESTS) as pool:
        list(pool.map(part, range(0, size, PIECE)))
    os.fsync(descriptor)
    os.close(descriptor)


def disk_limit(folder: Path, nbytes: int) -> None:
    piece = mmap.mmap(-1, PIECE)
    piece[:] = os.urandom(1 << 20) * 16
    descriptor = os.open(folder / "limit", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    for _ in range(nbytes // PIECE):
        os.write(descriptor, piece)
    os.fsync(descriptor)
    os.close(descriptor)


def save_ours(folder: Path, state: dict[str, torch.Tensor]) -> None:
    local.save(folder / "ours", 1, {}, state, {})


def save_ours_again(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """The next checkpoint, of which two thirds are on disk already; then only the first is left to be loaded."""
    path = local.save(folder / "ours", 2, {}, state, {})
    shutil.rmtree(path)


def save_torch(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """As careful as ours: under another name, synced, renamed."""
    with open(folder / "torch.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(folder / "torch.tmp", folder / "torch.pt")


def save_dcp(folder: Path, state: dict[str, torch.Tensor]) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True)


def load_ours(folder: Path, state: dict[str, torch.Tensor]) -> None:
    (checkpoint,) = newest(folder / "ours")
    local.load(checkpoint)


def load_torch(folder: Path, state: dict[str, torch.Tensor]) -> None:
    torch.load(folder / "torch.pt", weights_only=True)


def load_dcp(folder: Path, state: dict[str, torch.Tensor]) -> None:
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(into, storage_reader=dcp.FileSystemReader(folder / "dcp"), no_dist=True)


def read_limit(folder: Path, into: memoryview) -> None:
    descriptor = os.open(next((folder / "ours").rglob("state.safetensors")), os.O_RDONLY)
    done = 0
    while count := os.preadv(descriptor, [into[done : done + PIECE]], done):
        done += count
    os.close(descriptor)


def copy_flat(state: dict[str, torch.Tensor], into: torch.Tensor) -> None:
    """The state into memory that is there, by as many threads as there are cores."""
    at = 0
    for tensor in state.values():
        content = tensor.view(torch.uint8).reshape(-1)
        into[at : at + len(content)].copy_(content)
        at += len(content)


def drop(folder: Path) -> None:
    """Out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def touch(folder: Path) -> None:
    """Into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(PIECE):
                    pass


def timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--s3", choices=("radosgw", "moto"), help="default: radosgw where it is installed")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--out", help="default: benchmarks/results/checkpoint.json")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    state = make_state(arguments.mb)
    nbytes = sum(t.numel() * 4 for t in state.values())
    into = memoryview(bytearray(nbytes + (1 << 20)))
    seconds: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], None]) -> None:
        seconds.setdefault(name, []).append(timed(work))

    shares = {1: 0.0, 2: 0.0, 4: 0.0}
    descriptors = shared_frames.create()
    frames, tensors = Frames(descriptors), {slice_of(name, tensor): tensor for name, tensor in state.items()}
    torch.set_num_threads(1)  # it is going to be forked
    for number in range(arguments.rounds):
        for count in shares:
            seconds.setdefault(f"copy_{count}_shares", []).append(
                copy_in_shares(frames, tensors, 10 * number + count, count)
            )
    for process_wide in descriptors:
        os.close(process_wide)
    frames.close()
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.folder) as scratch:
        tiered = Tiered(Path(scratch), state)
        for _ in range(3):
            tiered.save()  # both frames, and one to be removed
        flat = memoryview(bytearray(nbytes))
        target_bytes = torch.frombuffer(flat, dtype=torch.uint8)
        for _ in range(arguments.rounds):
            note("write_limit_beside_tiers", lambda: disk_limit(Path(scratch), nbytes))
            (Path(scratch) / "limit").unlink()
            note("tiers_to_disk", tiered.save)
            note("memcpy", lambda: copy_flat(state, target_bytes))
            note("load_ours_memory_tier", tiered.load)
        tiered.writer.close()
    server = arguments.s3 or ("moto" if s3_server.radosgw_missing() else "radosgw")
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.folder) as scratch:
        save_ours(Path(scratch), state)
        object_storage(server, Path(scratch), max(3, arguments.rounds // 2), note)
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.folder) as scratch:
            folder = Path(scratch)
            note("write_limit", lambda folder=folder: disk_limit(folder, nbytes))
            (folder / "limit").unlink()
            saves: dict[str, Callable[..., None]] = {"ours": save_ours, "torch": save_torch, "dcp": save_dcp}
            loads: dict[str, Callable[..., None]] = {"ours": load_ours, "torch": load_torch, "dcp": load_dcp}
            for name, save in saves.items():
                note(f"save_{name}", lambda save=save, folder=folder: save(folder, state))
            again = {name: t + 1 if name.startswith("model.") else t for name, t in state.items()}
            note("save_ours_a_third_changed", lambda folder=folder, again=again: save_ours_again(folder, again))
            del again
            for warm in (False, True):
                kind = "warm" if warm else "cold"
                touch(folder) if warm else drop(folder)
                note(f"read_limit_{kind}", lambda folder=folder: read_limit(folder, into))
                for name, load in loads.items():
                    if not warm:
                        drop(folder)
                    note(f"load_{name}_{kind}", lambda load=load, folder=folder: load(folder, state))
        say(f"round {number + 1}: " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in seconds.items()))
    ratios = {
        "save / write limit": ratio_summary(seconds["save_ours"], seconds["write_limit"]),
        "tiers to disk / write limit": ratio_summary(seconds["tiers_to_disk"], seconds["write_limit_beside_tiers"]),
        "load from memory / memcpy": ratio_summary(seconds["load_ours_memory_tier"], seconds["memcpy"]),
        "2 shares / 1": ratio_summary(seconds["copy_2_shares"], seconds["copy_1_shares"]),
        "4 shares / 1": ratio_summary(seconds["copy_4_shares"], seconds["copy_1_shares"]),
        "bare put / push": ratio_summary(seconds["s3_put_bare"], seconds["s3_push_ours"]),
        "bare get / pull": ratio_summary(seconds["s3_get_bare"], seconds["s3_pull_ours"]),
        "load cold / read limit": ratio_summary(seconds["load_ours_cold"], seconds["read_limit_cold"]),
        "load warm / read limit": ratio_summary(seconds["load_ours_warm"], seconds["read_limit_warm"]),
        "torch.save / ours": ratio_summary(seconds["save_torch"], seconds["save_ours"]),
        "dcp save / ours": ratio_summary(seconds["save_dcp"], seconds["save_ours"]),
        "torch.load cold / ours": ratio_summary(seconds["load_torch_cold"], seconds["load_ours_cold"]),
        "dcp load cold / ours": ratio_summary(seconds["load_dcp_cold"], seconds["load_ours_cold"]),
    }
    finish(
        "checkpoint",
        {
            "bytes": nbytes,
            "s3 server": server,
            "memory taken, in states": 2,
            "seconds": {name: summary(values) for name, values in seconds.items()},
            "ratios": ratios,
            "targets": {
                "save / write limit": target(ratios["save / write limit"]["median"], 1.5),
                "tiers to disk / write limit": target(ratios["tiers to disk / write limit"]["median"], 1.5),
                "load from memory / memcpy": target(ratios["load from memory / memcpy"]["median"], 2.0),
                "push": target(ratios["bare put / push"]["median"], 0.9, at_least=True),
                "pull": target(ratios["bare get / pull"]["median"], 0.9, at_least=True),
                "load cold / read limit": target(ratios["load cold / read limit"]["median"], 1.6),
                "load warm / read limit": target(ratios["load warm / read limit"]["median"], 2.0),
            },
        },
        arguments.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
