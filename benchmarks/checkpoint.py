"""Saving and loading 1.2 GB of model and AdamW state on local disk, beside torch.save and PyTorch's DCP.

    python -m benchmarks.checkpoint [--mb 1200] [--rounds 5]

All write the same tensors into new files of the same folder, in turns, and count as done when the data is on disk. The
disk's own limit is one file of that size written through O_DIRECT and synced; the reading limit one file read cold into
memory that is there. "Cold" means that the files were dropped from the page cache before.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.common import finish, ratio_summary, say, summary, target
from elastic_harness.checkpoint import local

PIECE = 16 << 20


def make_state(megabytes: int, tensors: int = 50) -> dict[str, torch.Tensor]:
    """A third each for weights and the two moments of AdamW, float32."""
    each = megabytes * 1_000_000 // (3 * tensors) // 4
    draw = torch.Generator().manual_seed(0)
    names = [f"{kind}.{i}" for kind in ("model", "exp_avg", "exp_avg_sq") for i in range(tensors)]
    return {name: torch.rand(each // 1000, 1000, generator=draw) for name in names}


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
    (checkpoint,) = local.newest(folder / "ours")
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
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--out", help="default: benchmarks/results/checkpoint.json")
    arguments = parser.parse_args(argv)
    state = make_state(arguments.mb)
    nbytes = sum(t.numel() * 4 for t in state.values())
    into = memoryview(bytearray(nbytes + (1 << 20)))
    seconds: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], None]) -> None:
        seconds.setdefault(name, []).append(timed(work))

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
            "seconds": {name: summary(values) for name, values in seconds.items()},
            "ratios": ratios,
            "targets": {
                "save / write limit": target(ratios["save / write limit"]["median"], 1.5),
                "load cold / read limit": target(ratios["load cold / read limit"]["median"], 1.6),
                "load warm / read limit": target(ratios["load warm / read limit"]["median"], 2.0),
            },
        },
        arguments.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
