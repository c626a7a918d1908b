"""Snapshots of a process group that has lost nodes. A node is a name here; its loss is SIGKILL of its ranks and of what
holds their memory, and the end of its folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.checkpoint.layout import whole as whole_slice
from elastic_harness.checkpoint.memory import keeper, ring
from elastic_harness.checkpoint.memory.ring import Share, Whole
from elastic_harness.checkpoint.memory.snapshot import Frames, Snapshot
from elastic_harness.contract.shared_frames import create
from elastic_harness.errors import CheckpointCorrupt
from unit import peers_job
from unit.ranks import Rank


def forget(folder: Path, node: str) -> None:
    """End what is kept on a node."""
    for disk in (node, "disk"):
        for kept in keeper.find(keeper.key_of(folder / disk, node)):
            kept.close(needed=False)


class Job:
    """Ranks on named nodes. `disk`: the folder of checkpoints. `fail`: a failpoint for some ranks."""

    def __init__(
        self,
        folder: Path,
        what: str,
        nodes: str,
        tiers: str = "",
        fail: dict[int, str] | None = None,
        disk: str = "NODE",
    ) -> None:
        self.folder, self.nodes = folder, nodes.split(",")
        self.writers: dict[int, int] = {}
        (folder / f"{what}-store").unlink(missing_ok=True)
        told = what, folder, self.nodes, str(folder / disk), tiers
        self.ranks = [Rank(peers_job.main, n, *told, fail=(fail or {}).get(n, "")) for n in range(len(self.nodes))]

    def said(self, rank: int) -> dict[str, Any]:
        """The next thing that a rank has done; nothing if it has died."""
        said = self.ranks[rank].said()
        if "writer" in said:
            self.writers[rank] = said["writer"]
            return self.said(rank)
        return said

    def all_said(self) -> list[dict[str, Any]]:
        return [self.said(rank) for rank in range(len(self.ranks))]

    def lose(self, *nodes: str) -> None:
        """All ranks die, and with these nodes everything that is on them."""
        for rank, node in enumerate(self.nodes):
            if node in nodes:  # the writers first, which else would hand their memory on
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.writers[rank], signal.SIGKILL)
        self.kill()
        for node in nodes:
            forget(self.folder, node)
            shutil.rmtree(self.folder / node, ignore_errors=True)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.end()

    def end(self) -> list[int]:
        for rank in self.ranks:
            rank.let_go()
        return [rank.end() for rank in self.ranks]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the nodes' folders are; nothing is kept of them after the test."""
    yield tmp_path
    for node in "abcd":
        forget(tmp_path, node)


def events(said: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [fields for one in said for event, fields in one.get("told", []) if event == name]


def load(folder: Path, nodes: str, disk: str = "NODE", *, crash: bool = False) -> list[dict[str, Any]]:
    """What the ranks of a new job have loaded. `crash`: they are killed then."""
    job = Job(folder, "load", nodes, disk=disk)
    said = job.all_said()
    if crash:
        job.kill()
    else:
        assert job.end() == [0] * len(said)
    return said


def loaded(said: list[dict[str, Any]]) -> tuple[int, str, str]:
    """What all have loaded: step, hash and tier."""
    (found,) = {(one["step"], one["digest"], one["tier"]) for one in said}
    return found


def kept_on(folder: Path, node: str) -> list[keeper.Kept]:
    return keeper.find(keeper.key_of(folder / node, node))


@pytest.mark.slow
def test_a_lost_node_s_shares_come_from_its_peer_in_any_world(folder: Path) -> None:
    job = Job(folder, "save", "a,a,b,b", "memory,memory")
    (first, *_), saved = job.all_said(), job.all_said()
    assert len(events(saved, "peer_copied")) == 8 and first["copies"] == 1
    job.lose("b")
    assert loaded(load(folder, "a,a,c,c", crash=True)) == (6, saved[0]["digest"], "memory")
    assert loaded(load(folder, "c,a,a", crash=True)) == (6, saved[0]["digest"], "memory"), "still there"
    for kept in kept_on(folder, "a"):
        frames = Frames(kept.descriptors[2:])
        copy = frames.complete()[0]
        piece = max(copy.positions, key=lambda piece: piece.nbytes)
        copy.view(piece)[17] ^= 1
        frames.close()
        kept.close(needed=True)
    said = load(folder, "a")
    assert loaded(said) == (3, first["digest"], "memory"), "the copy that is damaged is not used"
    assert "manifest says" in events(said, "checkpoint_corrupt")[0]["error"]
    assert "shares of ranks 2, 3 (of 4) are in no node's memory" in events(said, "memory_passed_over")[-1]["error"]
    end = time.monotonic() + 10
    while found := kept_on(folder, "a"):  # keepers end by themselves, a moment after the job
        for kept in found:
            kept.close(needed=True)
        assert time.monotonic() < end, "a job that ends well leaves nothing"
        time.sleep(0.1)


@pytest.mark.slow
def test_of_a_copy_that_was_cut_off_nothing_is_used(folder: Path) -> None:
    job = Job(folder, "save", "a,a,b,b", "memory,memory", fail={2: "checkpoint.peer_copying step=6 hit=1 kill"})
    (saved, *_), cut = job.all_said(), job.all_said()
    assert cut[2] == {} and "a peer is lost" in events(cut[:1], "peer_copy_failed")[0]["error"]
    job.lose("b")
    said = load(folder, "a,c")
    assert loaded(said) == (3, saved["digest"], "memory")
    passed = events(said, "memory_passed_over")[0]["error"]
    assert re.search(r"snapshot of step 6 the shares of ranks 2(, 3)? \(of 4\) are in no node's memory", passed)


@pytest.mark.slow
def test_when_neighbours_are_lost_the_next_tier_is_used_and_that_is_said(folder: Path) -> None:
    job = Job(folder, "save", "a,b,c", "nvme,memory", disk="disk")
    (saved, *_), _ = job.all_said(), job.all_said()
    job.lose("a", "b")
    said = load(folder, "c,d", "disk")
    assert loaded(said) == (3, saved["digest"], "nvme")
    (passed,) = events(said, "memory_passed_over")
    assert "the shares of ranks 0 (of 3) are in no node's memory" in passed["error"] and "next tier" in passed["error"]
    said = load(folder, "c,d", "disk")
    assert loaded(said) == (3, saved["digest"], "nvme")
    assert "No node has a snapshot" in events(said, "memory_passed_over")[0]["error"]


@pytest.mark.slow
def test_on_one_node_nothing_is_copied_or_kept(folder: Path) -> None:
    job = Job(folder, "save", "a,a", "memory")
    said = job.all_said()
    assert [one["copies"] for one in said] == [0, 0] and not events(said, "peer_copied")
    for rank, process in enumerate(job.ranks):
        for pid in (process.pid, job.writers[rank]):
            held = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
            assert len({link for link in held if "memfd:snapshot" in link}) == 2
    job.kill()
    assert not kept_on(folder, "a")


def sealed(version: int, frames: Frames) -> Snapshot:
    of = whole_slice("w", "uint8", (100_000,))
    snapshot = frames.open_snapshot(version, 0, [of], {"part": None}, to_disk=False)
    assert snapshot is not None
    (piece,) = snapshot.positions
    snapshot.view(piece)[:] = bytes([version]) * piece.nbytes
    snapshot.finish_share(0)
    snapshot.seal()
    return snapshot


def copied(snapshot: Snapshot, frames: Frames, damage_at: int | None = None) -> None:
    room = frames.room(snapshot.control.nbytes)
    assert room is not None
    for out, into in zip(snapshot.image(), room.image(), strict=True):
        into[:] = out
    if damage_at is not None:
        room.image()[1][damage_at] ^= 4
    room.accept_copy()


@pytest.mark.parametrize("damage_at", [0, 4096 + 20, 4096 * 2 + 50_000], ids=["shares", "header", "piece"])
def test_a_copy_that_is_damaged_on_the_way_does_not_count(damage_at: int) -> None:
    descriptors = create(), create()
    here, there = map(Frames, descriptors)
    copied(sealed(1, here), there)
    with pytest.raises(CheckpointCorrupt, match="copy of another node's snapshot"):
        copied(sealed(2, here), there, damage_at)
    assert [copy.version for copy in there.complete()] == [1] and there.complete()[0].sealed
    copied(sealed(3, here), there)
    assert [copy.version for copy in there.complete()] == [3, 1], "in place of the damaged one"
    assert bytes(there.complete()[0].view(*there.complete()[0].positions)) == b"\3" * 100_000
    here.close(), there.close()
    for descriptor in (*descriptors[0], *descriptors[1]):
        os.close(descriptor)


@pytest.mark.parametrize("ended", [True, False], ids=["told", "alone"])
def test_a_keeper_gives_what_it_has_until_told_or_alone(ended: bool) -> None:
    key, descriptors = keeper.key_of(Path("/here"), f"{os.getpid()}"), create()
    os.write(descriptors[1], b"kept")
    with keeper.listen(key) as listening:
        alone_s = 60.0 if ended else 0.2
        thread = threading.Thread(target=keeper.keep, args=(listening, descriptors, alone_s))
        thread.start()
        first, second = *keeper.find(key), *keeper.find(key)
        assert [os.pread(kept.descriptors[1], 9, 0) for kept in (first, second)] == [b"kept"] * 2
        first.close(needed=True)
        second.close(needed=not ended)
        thread.join(timeout=10)
        assert not thread.is_alive()
    for descriptor in descriptors:
        os.close(descriptor)
    assert keeper.find(key) == []


def test_copies_go_round_the_nodes() -> None:
    assert ring.links(["a", "a", "b", "b"], 1) == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert ring.links(["a", "b", "a", "b"], 1) == [(0, 1), (2, 3), (1, 0), (3, 2)]
    assert ring.links(["a", "a", "a", "b"], 1) == [(0, 3), (1, 3), (2, 3), (3, 0)], "nodes of any sizes"
    assert ring.links(["a", "b", "c"], 2) == [(0, 1), (1, 2), (2, 0), (0, 2), (1, 0), (2, 1)]
    assert ring.links(["a", "b"], 5) == [(0, 1), (1, 0)]
    assert ring.links(["a", "a"], 1) == ring.links(["a"], 1) == ring.links(["a", "b"], 0) == []


def test_the_newest_of_which_every_share_is_somewhere() -> None:
    def shares(version: int, *indices: int, token: str = "x") -> list[Share]:
        return [Share(version, token, index, 3) for index in indices]

    held = [shares(5, 0, 2) + shares(4, 0, 2), shares(5, 1) + shares(4, 1, 0), shares(6, 1, token="y")]
    found, reason = ring.newest_whole(held)
    assert found == Whole(5, "x", ((0,), (1,), (0,))) and "step 6 the shares of ranks 0, 2 (of 3)" in reason
    assert ring.newest_whole(held, step=4) == (Whole(4, "x", ((0, 1), (1,), (0,))), "")
    assert ring.newest_whole(held, least=6)[0] is None
    assert ring.newest_whole([[], []]) == (None, "No node has a snapshot of it in memory.")
    assert found.share(1) == Share(5, "x", 1, 3)
    assert [Whole(4, "x", ((0, 1),)).holder(0, reader) for reader in (0, 1, 2, 3)] == [0, 1, 0, 1]
