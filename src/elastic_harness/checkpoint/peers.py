"""Copies of a process group's snapshots in the memory of other nodes, so that a node can be lost with all that it
holds.

    save:  a snapshot is sealed  →  its image goes to a rank on the next node  →  checked there  →  all ranks agree
    load:  who holds what  →  the newest of which every share is somewhere  →  each rank is sent the pieces it needs

A rank's holdings are in its own frames, in its frames for copies, and with the keepers of dead ranks of its node.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic_harness.checkpoint.disk.reading import fill, needed
from elastic_harness.checkpoint.disk.tensor_file import hash_of
from elastic_harness.checkpoint.layout import Piece, Slice, pieces
from elastic_harness.checkpoint.memory import ring
from elastic_harness.checkpoint.memory.keeper import Kept
from elastic_harness.checkpoint.memory.ring import Share, Whole
from elastic_harness.checkpoint.memory.snapshot import Frames, Room, Snapshot
from elastic_harness.checkpoint.own_writer import OwnWriter
from elastic_harness.checkpoint.ranks import Ranks
from elastic_harness.checkpoint.tiers import POLL_S, CheckpointTier, Into, Loaded, Report, Tiers, targets_of
from elastic_harness.errors import CheckpointCorrupt, ConfigError, InfrastructureError
from elastic_harness.failpoints import failpoint

PEER_TIMEOUT_S = 120.0  # so long a peer may send nothing
SEAL_S = 60.0  # so long the writer may take to seal a snapshot; peers wait meanwhile, so it is less than their timeout
CHUNK_BYTES = 4 << 20

Image = tuple[memoryview, memoryview]


def this_machine() -> str:
    """Return a name that tells this machine from others, as long as it runs."""
    boot_id = ""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot_id}"


class Peers:
    """Copies this rank's snapshots to other nodes beside training, keeps theirs, and loads from all nodes' memory. The
    constructor and `load_newest` are collective. `links`: from which rank to which copies go; none on a single node.
    `kept`: what the last job's ranks on this node have left."""

    def __init__(
        self,
        ranks: Ranks,
        nodes: Sequence[str],
        links: Sequence[tuple[int, int]],
        kept: Sequence[Kept],
        memory: OwnWriter,
        tiers: Tiers,
        report: Report,
    ) -> None:
        self._ranks, self._nodes, self._memory, self._tiers, self._report = ranks, nodes, memory, tiers, report
        self._to = [to for sender, to in links if sender == ranks.rank]
        self._from = [sender for sender, to in links if to == ranks.rank]
        self._kept = kept
        self._kept_frames = [
            Frames(kept.descriptors[at : at + 2]) for kept in self._kept for at in range(0, len(kept.descriptors), 2)
        ]
        self._bad: set[tuple[Share, str]] = set()  # shares that were damaged, and on which node
        self._copying: threading.Thread | None = None
        self._lost = False  # whether a peer is lost: then the group is of no more use
        self._group = self._new_group()

    def _new_group(self) -> Any:
        """Return a separate group, so that nothing here meets training's collectives. It is on the CPU, so it runs
        beside training."""
        if self._ranks.world == 1:
            return None
        return torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=PEER_TIMEOUT_S))

    def close(self, *, needed: bool) -> None:
        """Wait for the copy that is under way, and let go of what dead ranks have left. Unless it is `needed`, it is
        then gone."""
        self.finish_copy()
        self._release(needed=needed)
        self._hang_up()

    def _release(self, *, needed: bool) -> None:
        for frames in self._kept_frames:
            frames.close()
        for kept in self._kept:
            kept.close(needed=needed)
        self._kept, self._kept_frames = [], []

    def _hang_up(self) -> None:
        """Leave the group. A rank that still waits for this one in it sees the end of the connection."""
        group, self._group = self._group, None
        if group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(group)

    # ---- copying

    def begin_copy(self, snapshot: Snapshot) -> None:
        """Start copying a snapshot once it is sealed. No other copy may be begun before `finish_copy`."""
        if not self._lost:
            self._copying = threading.Thread(target=self._copy, args=(snapshot,), name="checkpoint-peers", daemon=True)
            self._copying.start()

    def finish_copy(self) -> None:
        """Block until the copy is done, or has failed and was reported. If a peer stands still, this takes
        `PEER_TIMEOUT_S`."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None

    def _copy(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        step = snapshot.version
        try:
            problem = self._exchange(snapshot)
        except BaseException as error:  # thread boundary
            self._lost = True
            self._hang_up()
            self._report(
                "peer_copy_failed",
                {
                    "step": step,
                    "error": f"Copying snapshots to other nodes has ended, a peer is lost: {error}. None are copied "
                    "until the next load_checkpoint; this node's own are whole.",
                },
            )
            return
        if problem:
            self._report("peer_copy_failed", {"step": step, "error": problem})
            return
        self._release(needed=False)
        nbytes = snapshot.control.nbytes * len(self._to)
        if nbytes:
            self._report("peer_copied", {"step": step, "bytes": nbytes, "seconds": time.monotonic() - began})

    def _exchange(self, snapshot: Snapshot) -> str:
        """Copy to and from the peers. Return why that did not succeed everywhere, in words, or "". Raises RuntimeError
        if a peer is lost."""
        wrong = ""
        give_up_at = time.monotonic() + SEAL_S
        while snapshot.here and not snapshot.sealed and time.monotonic() < give_up_at:
            time.sleep(POLL_S)
        size = snapshot.control.nbytes if snapshot.sealed else 0
        if not size:
            wrong = f"The snapshot was not sealed within {SEAL_S:.0f} s; the disk or the processor is too slow for it."
        sizes = self._swap([size] * len(self._to), self._to, self._from)
        rooms = [
            frames.room(nbytes) if nbytes else None for frames, nbytes in zip(self._memory.copies, sizes, strict=True)
        ]
        if any(nbytes and room is None for nbytes, room in zip(sizes, rooms, strict=True)):
            wrong = "There is no memory here for copies of other nodes' snapshots."
        welcome = self._swap([int(room is not None) for room in rooms], self._from, self._to)
        image = snapshot.image()
        self._stream(
            [(to, image) for to, wanted in zip(self._to, welcome, strict=True) if wanted],
            [(sender, room.image()) for sender, room in zip(self._from, rooms, strict=True) if room is not None],
            lambda: failpoint("checkpoint.peer_copying", snapshot.version),
        )
        for room in rooms:
            wrong = _refusal(room) or wrong
        agreed = torch.tensor([int(not wrong)])
        if self._group is not None:
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN, group=self._group)
        return wrong or ("" if agreed.item() else "It went wrong on another rank, which says why.")

    def _swap(self, given: Sequence[int], to: Sequence[int], sources: Sequence[int]) -> list[int]:
        """Send a number to each of some ranks, and return the numbers that other ranks send."""
        got = [torch.zeros(1, dtype=torch.int64) for _ in sources]
        sent = [(rank, torch.tensor([number])) for rank, number in zip(to, given, strict=True)]
        self._transfer(sent, list(zip(sources, got, strict=True)))
        return [int(number.item()) for number in got]

    def _stream(
        self, out: Sequence[tuple[int, Image]], into: Sequence[tuple[int, Image]], passed: Callable[[], None]
    ) -> None:
        """Send images to some ranks and receive images from others, a chunk of each at a time. Bytes are sent from
        where they are and received where they stay."""
        sending = [(to, _chunks(image)) for to, image in out]
        receiving = [(sender, _chunks(image)) for sender, image in into]
        for at in range(max((len(chunks) for _, chunks in (*sending, *receiving)), default=0)):
            self._transfer(
                [(to, chunks[at]) for to, chunks in sending if at < len(chunks)],
                [(sender, chunks[at]) for sender, chunks in receiving if at < len(chunks)],
            )
            passed()

    def _transfer(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> None:
        works = [torch.distributed.irecv(tensor, sender, group=self._group) for sender, tensor in into]
        works += [torch.distributed.isend(tensor, to, group=self._group) for to, tensor in out]
        for work in works:
            if work is not None:
                work.wait()

    # ---- loading

    def load_newest(self, step: int | None, least: int, into: Into | None) -> tuple[int, Loaded] | None:
        """Return the newest state that is complete in the nodes' memory, with its step, or None. Every piece is
        checked. `step`: the only step to look for, if given. `least`: older steps do not count. If there is none, that
        is reported with the reason. Raises ConfigError if `into` is of another state, InfrastructureError if a peer is
        lost."""
        self.finish_copy()
        if not self._ranks.all(not self._lost):
            self._hang_up()
            self._group, self._lost = self._new_group(), False
        while True:
            held = self._held()
            here = [list(share) for share in held]
            everybody = [
                [Share(*share) for share in json.loads(said)] for said in self._ranks.gather(json.dumps(here).encode())
            ]
            whole, reason = ring.newest_whole(everybody, step, least)
            if reason and self._ranks.rank == 0 and (any(everybody) or least >= 0):
                instead = f"Step {whole.version} is taken." if whole else "The next tier is used."
                self._report("memory_passed_over", {"step": step, "error": f"{reason} {instead}"})
            if whole is None:
                return None
            try:
                loaded, bad = self._load(whole, held, into)
            except RuntimeError as error:
                raise InfrastructureError(f"A peer was lost while the state was loaded: {error}") from error
            said_bad = self._ranks.gather(json.dumps(bad).encode())
            found = {(index, node) for said in said_bad for index, node in json.loads(said)}
            if loaded is not None and not found:
                self._report("checkpoint_loaded", {"step": whole.version, "tier": CheckpointTier.MEMORY.value})
                return whole.version, loaded
            self._bad |= {(whole.share(index), node) for index, node in found}

    def _held(self) -> dict[Share, Snapshot]:
        """Return the shares that this rank can read in its node's memory. Shares that were found damaged are left
        out."""
        found = self._tiers.sealed()
        for frames in (*self._memory.copies, *self._kept_frames):
            found += [snapshot for snapshot in frames.complete() if snapshot.sealed]
        held: dict[Share, Snapshot] = {}
        for snapshot in found:
            part = snapshot.header.get("part")
            if part is not None:
                share = Share(snapshot.version, part["token"], part["index"], part["count"])
                if (share, self._nodes[self._ranks.rank]) not in self._bad:
                    held.setdefault(share, snapshot)
        return held

    def _load(
        self, whole: Whole, held: Mapping[Share, Snapshot], into: Into | None
    ) -> tuple[Loaded | None, list[tuple[int, str]]]:
        """Return a state, or which shares were damaged on which node."""
        rank, count = self._ranks.rank, len(whole.holders)
        mine = {index: held[whole.share(index)] for index in range(count) if whole.share(index) in held}
        described = self._described(whole, mine)
        of = {piece: index for index, (_, hashes) in described.items() for piece in hashes}
        expected = {piece: text for _, hashes in described.values() for piece, text in hashes.items()}
        tensors, targets = targets_of(of, into)
        wanted = [(piece, of[piece]) for piece in needed(of, targets)]
        remote = [(piece, index, whole.holder(index, rank)) for piece, index in wanted if index not in mine]
        fetched = self._fetch(remote, described, mine)
        source = _Source(expected, {piece: mine[index] for piece, index in of.items() if index in mine}, fetched)
        bad: list[tuple[int, str]] = []
        try:
            fill([source], targets)
        except CheckpointCorrupt as error:
            damaged = {of[piece] for piece, _ in wanted if hash_of(source.view(piece)) != expected[piece]}
            bad = [(index, self._nodes[whole.holder(index, rank)]) for index in sorted(damaged)]
            if not bad:
                raise ConfigError(str(error)) from error
            self._report("checkpoint_corrupt", {"step": whole.version, "error": f"{error} It was in memory."})
        header = described[0][0]
        loaded = Loaded(header["skeleton"], tensors, header["meta"], CheckpointTier.MEMORY, [])
        return (None if bad else loaded), bad

    def _described(
        self, whole: Whole, mine: Mapping[int, Snapshot]
    ) -> dict[int, tuple[dict[str, Any], dict[Piece, str]]]:
        """Return the header of each share, and its pieces with their hashes. The first rank that holds a share tells of
        it."""
        telling = {
            index: [snapshot.header, list(snapshot.hashes.values())]
            for index, snapshot in mine.items()
            if whole.holders[index][0] == self._ranks.rank
        }
        found = {}
        for said in self._ranks.gather(json.dumps(telling).encode()):
            for index, (header, hashes) in json.loads(said).items():
                slices = [Slice(t, d, *(tuple(numbers) for numbers in boxes)) for t, d, *boxes in header["slices"]]
                found[int(index)] = header, dict(zip(pieces(slices), hashes, strict=True))
        return found

    def _fetch(
        self,
        wanted: Sequence[tuple[Piece, int, int]],
        described: Mapping[int, tuple[Any, Mapping[Piece, str]]],
        mine: Mapping[int, Snapshot],
    ) -> dict[Piece, memoryview]:
        """Return the pieces that this rank wants, given as (piece, share, holder), while the other ranks get those that
        they want."""
        number = {piece: at for _, hashes in described.values() for at, piece in enumerate(hashes)}
        piece_of = {(index, at): piece for index, (_, hashes) in described.items() for at, piece in enumerate(hashes)}
        asking = json.dumps([[holder, index, number[piece]] for piece, index, holder in wanted])
        asked = [json.loads(said) for said in self._ranks.gather(asking.encode())]
        fetched = {piece: memoryview(bytearray(piece.nbytes)) for piece, _, _ in wanted}
        incoming: dict[int, list[Tensor]] = {}
        for piece, _, holder in wanted:
            incoming.setdefault(holder, []).append(_tensor(fetched[piece]))
        outgoing: dict[int, list[Tensor]] = {}
        for reader, wishes in enumerate(asked):
            for holder, index, at in wishes:
                if holder == self._ranks.rank:
                    outgoing.setdefault(reader, []).append(_tensor(mine[index].view(piece_of[index, at])))
        for turn in range(max(map(len, (*incoming.values(), *outgoing.values())), default=0)):
            self._transfer(
                [(to, them[turn]) for to, them in outgoing.items() if turn < len(them)],
                [(sender, them[turn]) for sender, them in incoming.items() if turn < len(them)],
            )
        return fetched


class _Source:
    """Pieces in this node's memory, and pieces that were fetched, as a source to fill from."""

    where = "the nodes' memory"

    def __init__(
        self, hashes: Mapping[Piece, str], here: Mapping[Piece, Snapshot], fetched: Mapping[Piece, memoryview]
    ) -> None:
        self.hashes = hashes
        self._here, self._fetched = here, fetched

    def view(self, piece: Piece) -> memoryview:
        return self._fetched[piece] if piece in self._fetched else self._here[piece].view(piece)

    def read(self, piece: Piece, into: memoryview) -> None:
        into[:] = self.view(piece)


def _refusal(room: Room | None) -> str:
    """Return why a copy does not count, in words; empty if it counts."""
    try:
        if room is not None:
            room.accept_copy()
    except CheckpointCorrupt as error:
        return f"{error} It is not used."
    return ""


def _chunks(image: Image) -> list[Tensor]:
    first, rest = image
    return [_tensor(first), *(_tensor(rest[low : low + CHUNK_BYTES]) for low in range(0, len(rest), CHUNK_BYTES))]


def _tensor(content: memoryview) -> Tensor:
    return torch.frombuffer(content, dtype=torch.uint8)
