"""Fills memory from a checkpoint, piece by piece, at any sharding. Each piece is checked against its hash. Without
torch.

A piece that cannot be read or has another hash is taken from another place that has it: the same step in another tier.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from elastic_harness.checkpoint.disk import tensor_file
from elastic_harness.checkpoint.disk.manifest import Checkpoint
from elastic_harness.checkpoint.layout import ITEM_BYTES, Piece, Slice, overlap
from elastic_harness.errors import CheckpointCorrupt, HarnessError

READERS = 4  # threads that read and check
Array = np.ndarray[Any, np.dtype[Any]]


class BlockSource(Protocol):
    """A place that has the pieces of a checkpoint. `hashes` has the hash of each. `read` fills memory with a piece's
    bytes as they are there; it raises OSError, EOFError or HarnessError."""

    where: str

    @property
    def hashes(self) -> Mapping[Piece, str]: ...

    def read(self, piece: Piece, into: memoryview) -> None: ...


class Folder:
    """A checkpoint on a file system, as a source. Open it with `with`. Raises CheckpointCorrupt if a file is missing
    or its header is damaged."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.where = str(checkpoint.path)
        self._blocks = checkpoint.blocks
        self._checkpoint = checkpoint
        self._descriptors: dict[str, int] = {}
        self._open = ExitStack()

    @property
    def hashes(self) -> Mapping[Piece, str]:
        return {piece: block.xxh3 for piece, block in self._blocks.items()}

    def __enter__(self) -> Folder:
        path = self._checkpoint.path
        with ExitStack() as opened:
            for name, file in self._checkpoint.manifest["files"].items():
                try:
                    descriptor = os.open(path / name, os.O_RDONLY)
                    opened.callback(os.close, descriptor)
                    start = os.pread(descriptor, int(file["header_bytes"]), 0)
                except OSError as error:
                    raise CheckpointCorrupt(f"{path / name} cannot be read: {error.strerror}.") from error
                if tensor_file.hash_of(start) != file["header_xxh3"]:
                    raise CheckpointCorrupt(f"The header of {path / name} does not have the hash in its manifest.")
                self._descriptors[name] = descriptor
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, piece: Piece, into: memoryview) -> None:
        block = self._blocks[piece]
        tensor_file.read(self._descriptors[block.file], block.begin, into)


def needed(stored: Iterable[Piece], targets: Iterable[Slice]) -> list[Piece]:
    """Return the stored pieces that `fill` reads for these targets."""
    of: dict[str, list[Slice]] = {}
    for target in targets:
        of.setdefault(target.tensor, []).append(target)

    def wanted(piece: Piece, target: Slice) -> bool:
        if piece.slice == target:
            return True
        if not piece.nbytes or piece.slice.shape != target.shape or overlap(piece.slice, target) is None:
            return False
        low, high = _rows(piece.slice, target)
        return piece.low < high and low < piece.high

    return [piece for piece in stored if any(wanted(piece, target) for target in of.get(piece.slice.tensor, []))]


def fill(sources: Sequence[BlockSource], targets: Mapping[Slice, memoryview]) -> list[str]:
    """Fill the targets, each with its slice's bytes in row-major order. Each piece is taken from the first source, or
    from another one if it is damaged there. Return what was repaired, in words. Raises CheckpointCorrupt if a tensor is
    missing or is another one, or if no source has a piece whole. Blocks; several threads read."""
    known = [(source, source.hashes) for source in sources]
    expected = known[0][1]
    stored: dict[str, dict[Slice, list[Piece]]] = {}
    for piece in expected:
        stored.setdefault(piece.slice.tensor, {}).setdefault(piece.slice, []).append(piece)
    repaired: list[str] = []
    lock = threading.Lock()

    def take_piece(piece: Piece, into: memoryview) -> None:
        wrong = []
        for source, hashes in known:
            there = hashes.get(piece) == expected[piece]
            problem = read_piece(source, piece, expected[piece], into) if there else f"{source.where} has another state"
            if problem is None:
                break
            wrong.append(problem)
        else:
            raise CheckpointCorrupt(f"{'; '.join(wrong)}; another checkpoint must be used.")
        if wrong:
            with lock:
                repaired.append(f"{wrong[0]}; taken from {source.where}")

    def take_box(slices: tuple[Slice, Slice], into: memoryview) -> None:
        source, target = slices
        held = bytearray(source.nbytes)
        low, high = _rows(source, target)
        with memoryview(held) as view:
            for piece in stored[source.tensor][source]:
                if piece.low < high and low < piece.high:
                    take_piece(piece, view[piece.low : piece.high])
        _copy_overlap(source, _array(held, source), target, _array(into, target))

    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-reader") as pool:
        jobs = []
        for target, into in targets.items():
            slices = stored.get(target.tensor, {})
            exact = slices.get(target)
            if exact is not None:
                for piece in exact:
                    if piece.nbytes:
                        jobs.append(pool.submit(take_piece, piece, into[piece.low : piece.high]))
                continue
            for near in _overlapping(sources[0], slices, target):
                jobs.append(pool.submit(take_box, (near, target), into))
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return repaired


def read_piece(source: BlockSource, piece: Piece, expected: str, into: memoryview) -> str | None:
    """Read a piece from one place. Return what is wrong with it there; None if it is whole."""
    end = piece.high
    what = f"bytes {piece.low} to {end} of {piece.slice.name} in {source.where}"
    try:
        source.read(piece, into)
    except (OSError, EOFError, HarnessError) as error:
        return f"{what} cannot be read: {str(error) or 'the file is cut off'}"
    actual = tensor_file.hash_of(into)
    if actual != expected:
        return f"{what} have xxh3 {actual[:12]}…, the manifest says {expected[:12]}…"
    return None


def _overlapping(source: BlockSource, slices: Mapping[Slice, Any], target: Slice) -> Iterator[Slice]:
    for near in slices:
        if (near.dtype, near.shape) != (target.dtype, target.shape):
            raise CheckpointCorrupt(
                f"{target.tensor} is {list(near.shape)} {near.dtype} in {source.where}, not {list(target.shape)} "
                f"{target.dtype}."
            )
        if overlap(near, target):
            yield near
    if not slices:
        raise CheckpointCorrupt(f"There is no tensor {target.tensor} in {source.where}.")


def _rows(source: Slice, target: Slice) -> tuple[int, int]:
    """Return the bytes of the source between which the overlap with the target lies. They are whole rows of the first
    dimension."""
    found = overlap(source, target)
    assert found is not None
    offset, sizes = found
    row = source.nbytes // source.sizes[0]
    return (offset[0] - source.offset[0]) * row, (offset[0] - source.offset[0] + sizes[0]) * row


def _array(content: bytearray | memoryview, of: Slice) -> Array:
    """Return the slice's elements, as unsigned integers of their size."""
    return np.frombuffer(content, f"u{ITEM_BYTES[of.dtype]}").reshape(of.sizes)


def _copy_overlap(source: Slice, values: Array, target: Slice, into: Array) -> None:
    found = overlap(source, target)
    assert found is not None
    offset, sizes = found

    def box(of: Slice) -> tuple[slice, ...]:
        return tuple(slice(o - b, o - b + n) for o, n, b in zip(offset, sizes, of.offset, strict=True))

    into[box(target)] = values[box(source)]
