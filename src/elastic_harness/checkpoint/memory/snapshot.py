"""The memory tier of a node: the newest states in shared memory, which outlives any worker. Without torch.

A frame is a memfd. It lives as long as any process holds a descriptor of it: under `elastic-harness launch` the
launcher, the agent and its writer. One process begins a snapshot and writes the header. Then each worker copies its
share of the pieces and says so. When all shares are there, the snapshot is copied. The snapshot of a run then waits for
the agent, which says that the ledger has all steps before it: a checkpoint ahead of the ledger would leave steps that
nobody wrote down. Now the snapshot is complete. The writer hashes the pieces, which seals it, and may write it to disk.

    0      control: which attempt this is, of which version and lineage; how it went; whether the ledger is as far
    4096   shares: a word for each worker, the attempt whose share it has copied
    8192   header: JSON (meta, skeleton, slices), then a 16-byte hash for each piece, then the pieces

A frame is never reused while it is being written to disk, nor while it holds the newest complete snapshot. So at any
crash the newest complete snapshot survives, and an incomplete one is never mistaken for a complete one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from elastic_harness.checkpoint.layout import Piece, Slice, pieces, share
from elastic_harness.contract.shared_frames import LEDGER_AT
from elastic_harness.errors import CheckpointCorrupt, InfrastructureError
from elastic_harness.failpoints import failpoint
from elastic_harness.shape import parse_object

MAX_SHARES = 512
MEMORY_FRACTION = 0.9  # at most so much of the available memory is taken
_MAGIC = b"EHSNAP02"
_CONTROL = struct.Struct("<8sQqqQQQQdQqd")  # magic and the fields of Control; its own hash follows
_CHECK_AT, _OUTCOME_AT, _SEAL_AT, _SEALED_AT, _SHARES_AT, _HEADER_AT = 128, 256, 384, 448, 4096, 8192
_WORD, _PAIR = struct.Struct("<Q"), struct.Struct("<QQ")
_ALIGN = mmap.PAGESIZE  # of a slice: O_DIRECT then writes it to disk from where it is
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None, use_errno=True)


class SnapshotOutcome(IntEnum):
    """The outcome of writing a snapshot to the local disk."""

    OPEN = 0
    DURABLE = 1
    FAILED = 2


class Control(NamedTuple):
    """How an attempt is described at the beginning of its frame."""

    attempt: int  # unique on this node, later ones are greater
    version: int
    lineage: int
    shares: int  # so many workers copy
    header_bytes: int
    data_at: int  # where the first piece begins
    to_disk: int  # whether it is to be written to disk
    began_at: float  # seconds of the monotonic clock
    nbytes: int  # of the whole frame
    disk_version: int  # of the newest snapshot up to this one that was to be written to disk; -1: none was
    disk_began_at: float  # when that one was begun; 0: none was


class Frames:
    """A node's frames, as one process sees them. `wake`: an eventfd that tells the writer that there is something to
    do, or None. `await_ledger`: a snapshot that this process begins is not complete before the agent has called
    `note_ledger` for it."""

    def __init__(self, descriptors: Sequence[int], wake: int | None = None, *, await_ledger: bool = False) -> None:
        self._frames = [_Frame(descriptor) for descriptor in descriptors]
        self._wake = wake
        self._await_ledger = await_ledger

    def open_snapshot(
        self,
        version: int,
        lineage: int,
        slices: Sequence[Slice],
        header: Mapping[str, Any],
        *,
        shares: int = 1,
        to_disk: bool = True,
    ) -> Snapshot | None:
        """Open a snapshot in a free frame; return None if none is free now. `header` is JSON and goes with the
        snapshot. Does not block. Raises InfrastructureError if there is not enough memory."""
        if not 1 <= shares <= MAX_SHARES:
            raise InfrastructureError(f"{shares} workers on one node, 1 to {MAX_SHARES} can share a snapshot.")
        text = json.dumps({**header, "slices": [list(of) for of in slices]}, separators=(",", ":")).encode()
        cut = pieces(slices)
        data_at = _aligned(_HEADER_AT + len(text) + 16 * len(cut), mmap.PAGESIZE)
        positions, nbytes = _positions(cut, data_at)
        newest = next(iter(self.complete()), None)
        frames = sorted(self._frames, key=_Frame.attempt)
        now = time.monotonic()
        before = (newest.control.disk_version, newest.control.disk_began_at) if newest is not None else (-1, 0.0)
        control = Control(
            1 + frames[-1].attempt(),
            version,
            lineage,
            shares,
            len(text),
            data_at,
            to_disk,
            now,
            nbytes,
            *((version, now) if to_disk else before),
        )
        # The newest complete snapshot stays. It is tried last, and replaced only if there is memory for one snapshot
        # alone and disk has it.
        if newest is not None:
            frames = [*(frame for frame in frames if frame is not newest._frame), newest._frame]
        short = ""
        for frame in frames:
            replaceable = short and newest is not None and newest.outcome == SnapshotOutcome.DURABLE
            if newest is not None and frame is newest._frame and not replaceable:
                continue
            with frame.pinned() as pinned:
                waiting = frame.snapshot()
                if not pinned or (waiting is not None and waiting.waits_for_disk):
                    continue
                short = frame.shortage(nbytes)
                if not short:
                    frame.open(control, text, awaits_ledger=self._await_ledger)
                    return Snapshot(frame, control, positions)
        if short and newest is None:
            raise InfrastructureError(short)
        return None

    def begun(self) -> Snapshot | None:
        """Return the snapshot that was begun last, complete or not."""
        found = [snapshot for frame in self._frames if (snapshot := frame.snapshot()) is not None]
        return max(found, key=lambda snapshot: snapshot.control.attempt, default=None)

    def copied(self) -> list[Snapshot]:
        """Return the snapshots whose shares are all there, the newest first."""
        found = [snapshot for frame in self._frames if (snapshot := frame.snapshot()) is not None and snapshot.copied]
        return sorted(found, key=lambda snapshot: -snapshot.control.attempt)

    def complete(self) -> list[Snapshot]:
        """Return the copied snapshots that wait for nothing else, the newest first."""
        return [snapshot for snapshot in self.copied() if snapshot.complete]

    def room(self, nbytes: int) -> Room | None:
        """Return room for a copy of another node's snapshot, which replaces the older copy. Return None if there is no
        memory."""
        frame = min(self._frames, key=_Frame.attempt)
        return None if frame.shortage(nbytes) else Room(frame, nbytes)

    def provide(self) -> None:
        """Provide memory for the frames that are smaller than the newest snapshot, before it is needed."""
        for newest in self.complete()[:1]:
            for frame in self._frames:
                frame.provide(newest.control.nbytes)

    def wake(self) -> None:
        """Tell the writer that there is something to do."""
        if self._wake is not None:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        for frame in self._frames:
            frame.close()


class Snapshot:
    """One attempt in a frame. Its properties are only true while the frame holds this attempt; `here` tells that."""

    def __init__(self, frame: _Frame, control: Control, positions: Mapping[Piece, int] | None = None) -> None:
        self._frame = frame
        self._known = positions
        self.control = control
        self.where = "shared memory"

    @property
    def version(self) -> int:
        return self.control.version

    @property
    def here(self) -> bool:
        """Whether the frame still holds this attempt."""
        return self._frame.control() == self.control

    @property
    def copied(self) -> bool:
        """Whether all workers have copied their shares."""
        shares = self.control.shares
        words = struct.unpack_from(f"<{shares}Q", self._frame.map, _SHARES_AT)
        return all(word == self.control.attempt for word in words)

    @property
    def awaits_ledger(self) -> bool:
        """Whether the agent has still to say that the ledger has all steps before it."""
        awaiting, noted = _PAIR.unpack_from(self._frame.map, LEDGER_AT)
        return bool(awaiting == self.control.attempt != noted)

    @property
    def complete(self) -> bool:
        """Whether it may be restored: all shares are copied, and the ledger has the steps before it."""
        return self.copied and not self.awaits_ledger

    @property
    def outcome(self) -> SnapshotOutcome:
        attempt, outcome = _PAIR.unpack_from(self._frame.map, _OUTCOME_AT)
        return SnapshotOutcome(outcome) if attempt == self.control.attempt else SnapshotOutcome.OPEN

    @property
    def waits_for_disk(self) -> bool:
        """Whether the snapshot is complete and is still to be written to disk."""
        return bool(self.control.to_disk) and self.complete and self.outcome == SnapshotOutcome.OPEN

    @property
    def sealed(self) -> bool:
        """Whether the pieces have been hashed, and control, header and hashes have not changed since."""
        return self._was_sealed and self._frame.seal_of(self.control) == self._frame.seal()

    @property
    def damaged(self) -> bool:
        """Whether the snapshot was sealed, and control, header or hashes have changed since."""
        return self._was_sealed and not self.sealed

    @property
    def _was_sealed(self) -> bool:
        return bool(_WORD.unpack_from(self._frame.map, _SEALED_AT)[0] == self.control.attempt)

    @cached_property
    def header(self) -> dict[str, Any]:
        """What `Frames.open_snapshot` was given, and the slices."""
        try:
            text = bytes(self._frame.map[_HEADER_AT : _HEADER_AT + self.control.header_bytes])
            return parse_object(text)
        except ValueError as error:
            raise CheckpointCorrupt(f"The snapshot of version {self.version} in memory is damaged: {error}") from error

    @cached_property
    def positions(self) -> Mapping[Piece, int]:
        """Where each piece is in the frame."""
        if self._known is not None:
            return self._known
        slices = [Slice(t, d, *(tuple(numbers) for numbers in boxes)) for t, d, *boxes in self.header["slices"]]
        return _positions(pieces(slices), self.control.data_at)[0]

    def share(self, index: int) -> list[Piece]:
        """Return the pieces that one worker copies."""
        return share(list(self.positions), index, self.control.shares)

    def view(self, piece: Piece) -> memoryview:
        """Return a piece's memory."""
        begin = self.positions[piece]
        return self._frame.view[begin : begin + piece.nbytes]

    def contents(self) -> dict[Slice, memoryview]:
        """Return the memory of each slice, whose pieces follow each other without a gap."""
        begins = {piece.slice: at for piece, at in self.positions.items() if piece.low == 0}
        return {of: self._frame.view[at : at + of.nbytes] for of, at in begins.items()}

    def image(self) -> tuple[memoryview, memoryview]:
        """Return the whole snapshot as it is in the frame, as two runs of bytes, for a `Room` on another node."""
        return self._frame.view[:_SHARES_AT], self._frame.view[_SHARES_AT : self.control.nbytes]

    def populate(self, mine: Sequence[Piece]) -> None:
        """Have the kernel provide the memory of these pieces in one go, which is faster than page by page."""
        if mine:
            self._frame.populate(self.positions[mine[0]], self.positions[mine[-1]] + mine[-1].nbytes)

    def finish_share(self, index: int) -> None:
        """Say that a share is copied."""
        if self.here:
            _WORD.pack_into(self._frame.map, _SHARES_AT + 8 * index, self.control.attempt)

    @property
    def hashes(self) -> dict[Piece, str]:
        """The hash of each piece, once the snapshot is sealed."""
        at = _HEADER_AT + self.control.header_bytes
        digests = bytes(self._frame.map[at : at + 16 * len(self.positions)])
        return {piece: digests[16 * i : 16 * i + 16].hex() for i, piece in enumerate(self.positions)}

    def seal(self) -> None:
        """Hash the pieces, so that readers can check them. Only the writer calls this, for a complete snapshot."""
        at = _HEADER_AT + self.control.header_bytes
        for number, piece in enumerate(self.positions):
            failpoint("checkpoint.hashing", self.version)
            self._frame.map[at + 16 * number : at + 16 * number + 16] = xxhash.xxh3_128_digest(self.view(piece))
        self._frame.set_seal(self.control)

    def note_outcome(self, outcome: SnapshotOutcome) -> None:
        """Note what became of the snapshot on disk."""
        if self.here:
            _PAIR.pack_into(self._frame.map, _OUTCOME_AT, self.control.attempt, outcome)

    def drop(self) -> None:
        """Offer the snapshot no more, because it is damaged."""
        if self.here:
            self._frame.invalidate()

    def pinned(self) -> contextlib.AbstractContextManager[bool]:
        """Keep the frame from being reused while this is held. Yields whether that was possible."""
        return self._frame.pinned()

    def read(self, piece: Piece, into: memoryview) -> None:
        """Copy a piece's bytes as they are here. This makes a snapshot a source to fill from."""
        into[:] = self.view(piece)


class Room:
    """A frame while a sealed snapshot of another node is copied into it. It holds no snapshot until `accept_copy`."""

    def __init__(self, frame: _Frame, nbytes: int) -> None:
        frame.invalidate()
        frame.grow(nbytes)
        self._frame = frame
        self._nbytes = nbytes
        self._page = bytearray(_SHARES_AT)

    def image(self) -> tuple[memoryview, memoryview]:
        """Return the memory to fill with the two runs of bytes of the snapshot's `image`."""
        return memoryview(self._page), self._frame.view[_SHARES_AT : self._nbytes]

    def accept_copy(self) -> Snapshot:
        """Check every piece; then the copy counts. Raises CheckpointCorrupt if it is not what was sealed."""
        control = _control_in(self._page)
        if control is None or control.nbytes != self._nbytes:
            raise CheckpointCorrupt("What was copied from another node is no snapshot.")
        self._frame.map[_OUTCOME_AT:_SHARES_AT] = self._page[_OUTCOME_AT:]
        snapshot = Snapshot(self._frame, control)
        if not snapshot.complete or not snapshot.sealed:
            raise CheckpointCorrupt(f"The copy of another node's snapshot of version {control.version} is damaged.")
        for piece, expected in snapshot.hashes.items():
            if xxhash.xxh3_128_hexdigest(snapshot.view(piece)) != expected:
                raise CheckpointCorrupt(
                    f"In the copy of another node's snapshot of version {control.version}, bytes {piece.low} to "
                    f"{piece.high} of {piece.slice.name} do not have the hash they were sealed with."
                )
        # The hash of the control words goes last: without it the frame counts as empty, so a crash here leaves no copy.
        self._frame.map[:_CHECK_AT] = self._page[:_CHECK_AT]
        self._frame.map[_CHECK_AT:_OUTCOME_AT] = self._page[_CHECK_AT:_OUTCOME_AT]
        return snapshot


class _Frame:
    """One memfd. It is opened once more, so that its lock belongs to this process alone. It is mapped anew when it has
    grown."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self._size = 0
        self._populated: set[tuple[int, int]] = set()
        self._view: memoryview | None = None

    def close(self) -> None:
        os.close(self._descriptor)

    @property
    def map(self) -> mmap.mmap:
        size = os.fstat(self._descriptor).st_size
        if size != self._size and size:
            self._map, self._size = mmap.mmap(self._descriptor, size), size
            self._populated, self._view = set(), None
        return self._map

    @property
    def view(self) -> memoryview:
        mapped = self.map
        if self._view is None:
            self._view = memoryview(mapped)
        return self._view

    def control(self) -> Control | None:
        """Return what the frame holds, or None. While it is being written, the hash does not fit and None is
        returned."""
        mapped = self.map
        if len(mapped) < _HEADER_AT:
            return None
        control = _control_in(mapped[:_OUTCOME_AT])
        return control if control is not None and control.nbytes <= len(mapped) else None

    def attempt(self) -> int:
        """Return the attempt that the frame holds, 0 if none."""
        control = self.control()
        return 0 if control is None else control.attempt

    def snapshot(self) -> Snapshot | None:
        control = self.control()
        return None if control is None else Snapshot(self, control)

    def open(self, control: Control, header: bytes, *, awaits_ledger: bool) -> None:
        """Make the frame hold an attempt of which nothing is copied yet."""
        self.invalidate()
        self.grow(control.nbytes)
        mapped = self.map
        _PAIR.pack_into(mapped, LEDGER_AT, control.attempt * awaits_ledger, 0)
        mapped[_SHARES_AT:_HEADER_AT] = bytes(_HEADER_AT - _SHARES_AT)
        mapped[_HEADER_AT : _HEADER_AT + len(header)] = header
        # The hash of the control words goes last: until then the frame counts as empty, also after a crash.
        packed = _CONTROL.pack(_MAGIC, *control)
        mapped[: len(packed)] = packed
        mapped[_CHECK_AT : _CHECK_AT + 8] = xxhash.xxh3_64_digest(packed)

    def grow(self, nbytes: int) -> None:
        if self._size < nbytes:
            try:
                os.ftruncate(self._descriptor, nbytes)
            except OSError as error:
                raise InfrastructureError(
                    f"A snapshot in memory cannot have {nbytes} bytes: {error.strerror}; see ulimit -a."
                ) from error

    def provide(self, nbytes: int) -> None:
        """Grow the frame to this size, with memory, if there is enough."""
        if os.fstat(self._descriptor).st_size < nbytes and not self.shortage(nbytes):
            with self.pinned() as pinned, contextlib.suppress(OSError):
                if pinned:
                    os.posix_fallocate(self._descriptor, 0, nbytes)

    def shortage(self, nbytes: int) -> str:
        """Return why this frame cannot grow to so many bytes, in words; empty if it can."""
        missing, available = nbytes - self._size, _memory_available()
        if missing <= MEMORY_FRACTION * available:
            return ""
        return (
            f"A snapshot of the state needs {missing / 1e6:.0f} MB more memory, and {available / 1e6:.0f} MB are "
            "available on this machine; run fewer workers on it, or give it more."
        )

    def invalidate(self) -> None:
        if not self._size:
            return
        self.map[_CHECK_AT : _CHECK_AT + 8] = bytes(8)  # first: half-cleared control words then fit no hash
        self.map[: _CONTROL.size] = bytes(_CONTROL.size)

    def seal_of(self, control: Control) -> bytes:
        """Return the hash over control, header and the pieces' hashes."""
        return xxhash.xxh3_128_digest(_CONTROL.pack(_MAGIC, *control) + bytes(self.map[_HEADER_AT : control.data_at]))

    def seal(self) -> bytes:
        return bytes(self.map[_SEAL_AT : _SEAL_AT + 16])

    def set_seal(self, control: Control) -> None:
        self.map[_SEAL_AT : _SEAL_AT + 16] = self.seal_of(control)
        _WORD.pack_into(self.map, _SEALED_AT, control.attempt)

    @contextmanager
    def pinned(self) -> Iterator[bool]:
        """Hold the frame for this process, if no other process holds it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def populate(self, low: int, high: int) -> None:
        low -= low % mmap.PAGESIZE
        if (low, high) in self._populated:
            return
        self._populated.add((low, high))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + low
        _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(high - low), _MADV_POPULATE_WRITE)  # or page by page


def _control_in(page: bytes | bytearray) -> Control | None:
    packed = page[: _CONTROL.size]
    magic, *fields = _CONTROL.unpack(packed)
    if magic != _MAGIC or page[_CHECK_AT : _CHECK_AT + 8] != xxhash.xxh3_64_digest(packed):
        return None
    return Control(*fields)


def _memory_available() -> int:
    """Return how many bytes processes may still take: on the machine, and in the control group if it has a limit."""
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/meminfo") as lines:
            limits.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")))
    with contextlib.suppress(OSError, ValueError):
        group = "/sys/fs/cgroup/memory"
        with open(f"{group}.max") as most, open(f"{group}.current") as now:
            limits.append(int(most.read()) - int(now.read()))
    return min(limits, default=1 << 62)


def _positions(cut: Sequence[Piece], data_at: int) -> tuple[dict[Piece, int], int]:
    """Return where each piece goes, and where the last one ends. The pieces of a slice follow each other without a
    gap."""
    positions, position = {}, data_at
    for piece in cut:
        if piece.low == 0:
            position = _aligned(position, _ALIGN)
        positions[piece] = position
        position += piece.nbytes
    return positions, _aligned(position, mmap.PAGESIZE)


def _aligned(value: int, to: int) -> int:
    return value + -value % to
