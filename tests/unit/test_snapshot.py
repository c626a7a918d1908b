"""The memory tier: what is complete stays, what is not is never taken for complete, and damage is noticed."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_harness.checkpoint import tiers
from elastic_harness.checkpoint.disk import local
from elastic_harness.checkpoint.disk.manifest import newest
from elastic_harness.checkpoint.layout import Slice, pieces, share
from elastic_harness.checkpoint.memory import snapshot
from elastic_harness.checkpoint.memory.snapshot import Frames, Snapshot, SnapshotOutcome
from elastic_harness.checkpoint.policy import Policy
from elastic_harness.checkpoint.tensors import slice_of
from elastic_harness.checkpoint.tiers import CheckpointTier, Tiers
from elastic_harness.checkpoint.writer import Writer
from elastic_harness.contract import shared_frames
from elastic_harness.errors import CheckpointCorrupt, InfrastructureError

Memory = list[int]


@pytest.fixture
def memory() -> Iterator[Memory]:
    descriptors = shared_frames.create()
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def some_state(value: float) -> dict[Slice, torch.Tensor]:
    tensors = {"w": torch.full((700, 10), value), "b": torch.full((3,), value).bfloat16(), "n": torch.tensor(value)}
    return {slice_of(name, tensor): tensor for name, tensor in tensors.items()}


def take(
    frames: Frames, version: int, *, shares: int = 1, finished: int | None = None, to_disk: bool = True
) -> Snapshot:
    """A snapshot of which `finished` shares are copied; all by default."""
    state = some_state(version)
    header = {"skeleton": {"version": version}, "meta": {"lineage": 0}, "policy": Policy().to_json()}
    taken = frames.open_snapshot(version, 0, list(state), header, shares=shares, to_disk=to_disk)
    assert taken is not None
    for index in range(shares if finished is None else finished):
        tiers.copy(taken, state, taken.share(index))
        taken.finish_share(index)
    return taken


def versions(frames: Frames) -> list[int]:
    return [found.version for found in frames.complete()]


def test_shares_are_disjoint_and_everything() -> None:
    cut = pieces([*some_state(1), Slice("empty", "float32", (0, 4), (0, 0), (0, 4))])
    for count in (1, 2, 3, 7):
        parts = [share(cut, index, count) for index in range(count)]
        assert [piece for part in parts for piece in part] == cut
    large = pieces([Slice("w", "float32", (1 << 28,), (0,), (1 << 28,))])
    sizes = [sum(piece.nbytes for piece in share(large, index, 4)) for index in range(4)]
    assert sizes == [1 << 28] * 4


def test_a_snapshot_counts_when_all_shares_are_there(memory: Memory) -> None:
    frames = Frames(memory)
    take(frames, 10, shares=3, finished=2)
    assert versions(frames) == [] and frames.begun() is not None
    begun = frames.begun()
    assert begun is not None
    begun.finish_share(2)
    assert versions(Frames(memory)) == [10], "as another process sees it"


def test_who_comes_late_to_a_snapshot_gives_it_up(memory: Memory, tmp_path: Path) -> None:
    """The worker that began it has given its frame to a newer one. Nothing has failed."""
    frames, other = Frames(memory), Tiers(Frames(memory), tmp_path)
    take(frames, 8, shares=2, finished=1, to_disk=False)
    late = other.awaited(8, 2)
    assert late is not None
    newer = 10**6  # so its header is longer
    while late.here:
        take(frames, newer, shares=2, finished=1, to_disk=False)
        newer += 1
    other.copy_share(late, some_state(8), 1)
    other.finish_copy()
    assert versions(frames) == []


def test_a_snapshot_of_a_run_counts_when_the_ledger_is_as_far(memory: Memory) -> None:
    frames, state = Frames(memory, await_ledger=True), some_state(10)
    taken = frames.open_snapshot(10, 0, list(state), {"meta": {}})
    assert taken is not None
    for number in (taken.control.attempt - 1, taken.control.attempt + 1, -1, 1 << 64):  # a worker may say anything
        shared_frames.note_ledger(memory, number)
    taken.finish_share(0)
    assert taken.copied and not taken.complete and not taken.waits_for_disk and versions(frames) == []
    shared_frames.note_ledger(memory, taken.control.attempt)
    assert taken.complete and versions(Frames(memory)) == [10], "as another process sees it"
    take(Frames(memory), 11)
    assert versions(frames) == [11, 10], "one that does not wait for the ledger"


def test_the_newest_complete_one_is_never_overwritten(memory: Memory) -> None:
    frames = Frames(memory)
    take(frames, 1, to_disk=False)
    for version in range(2, 8):
        take(frames, version, finished=0, to_disk=False)  # whoever copies dies, again and again
        assert versions(frames) == [1]
    take(frames, 8, to_disk=False)
    assert versions(frames) == [8, 1] or versions(frames) == [8]
    take(frames, 9, finished=0, to_disk=False)
    assert versions(frames)[0] == 8


def test_what_waits_for_disk_is_not_overwritten(memory: Memory) -> None:
    frames = Frames(memory)
    first, second = take(frames, 1), take(frames, 2)
    header = {"policy": {}}
    assert frames.open_snapshot(3, 0, list(some_state(3)), header) is None
    first.note_outcome(SnapshotOutcome.FAILED)
    assert frames.open_snapshot(3, 0, list(some_state(3)), header) is not None
    assert not first.here and second.here
    first.note_outcome(SnapshotOutcome.DURABLE)
    first.finish_share(0)
    assert versions(frames) == [2], "what is said of an old attempt does not count for the new one"


def test_a_frame_in_use_elsewhere_is_not_taken(memory: Memory) -> None:
    frames, others = Frames(memory), Frames(memory)
    first = take(frames, 1, to_disk=False)
    take(frames, 2, to_disk=False)
    (theirs,) = [found for found in others.complete() if found.version == 1]
    with theirs.pinned() as pinned:
        assert pinned
        assert frames.open_snapshot(3, 0, list(some_state(3)), {}) is None
        with first.pinned() as also:
            assert not also
    assert frames.open_snapshot(3, 0, list(some_state(3)), {}) is not None


def test_a_larger_state_and_a_smaller_one(memory: Memory) -> None:
    frames, others = Frames(memory), Frames(memory)
    for version, n in enumerate((10, 3_000_000, 20, 5_000_000)):
        state = {slice_of("x", torch.arange(n)): torch.arange(n)}
        taken = frames.open_snapshot(version, 0, list(state), {"meta": {}}, to_disk=False)
        assert taken is not None
        tiers.copy(taken, state, taken.share(0))
        taken.finish_share(0)
        seen = others.complete()[0]
        assert seen.version == version
        (content,) = seen.contents().values()
        assert torch.equal(torch.frombuffer(content, dtype=torch.int64), torch.arange(n))


def test_too_little_memory_is_said_and_one_frame_is_used_if_disk_has_it(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = Frames(memory)
    first = take(frames, 1)
    monkeypatch.setattr(snapshot, "_memory_available", lambda: 1000)
    assert frames.open_snapshot(2, 0, list(some_state(2)), {}) is None, "version 1 is nowhere else yet"
    first.note_outcome(SnapshotOutcome.DURABLE)
    assert frames.open_snapshot(2, 0, list(some_state(2)), {}) is not None
    with pytest.raises(InfrastructureError, match="more memory, and 0 MB are available"):
        empty = shared_frames.create()
        try:
            Frames(empty).open_snapshot(1, 0, list(some_state(1)), {})
        finally:
            for descriptor in empty:
                os.close(descriptor)


def load(memory: Memory, folder: Path, version: int) -> tiers.Loaded:
    return Tiers(Frames(memory), folder).load(version)


def test_from_memory_to_disk_and_back(memory: Memory, tmp_path: Path) -> None:
    frames = Frames(memory)
    taken = take(frames, 5)
    writer = Writer(frames, tmp_path)
    writer.drain()
    assert taken.sealed and taken.outcome == SnapshotOutcome.DURABLE
    both = Tiers(Frames(memory), tmp_path)
    assert [(s.version, s.tier) for s in both.stored()] == [(5, CheckpointTier.MEMORY), (5, CheckpointTier.NVME)]
    for found in (both.load(5), Tiers(Frames([]), tmp_path).load(5)):
        assert found.skeleton == {"version": 5} and not found.repaired
        assert torch.equal(found.tensors["w"], torch.full((700, 10), 5.0)) and float(found.tensors["n"]) == 5.0


@pytest.mark.parametrize("where", ["data", "hashes", "header", "control", "seal"])
def test_a_flipped_bit_in_memory_is_noticed(memory: Memory, tmp_path: Path, where: str) -> None:
    """It is repaired from disk if disk has it, or else the older one counts."""
    frames = Frames(memory)
    writer = Writer(frames, tmp_path)
    take(frames, 4)
    writer.drain()
    taken = take(frames, 5, to_disk=False)
    writer.drain()
    control = taken.control
    at = {
        "data": control.data_at + 100,
        "hashes": snapshot._HEADER_AT + control.header_bytes + 3,
        "header": snapshot._HEADER_AT + 20,
        "control": 17,
        "seal": snapshot._SEAL_AT,
    }[where]
    taken._frame.map[at] ^= 1
    both = Tiers(Frames(memory), tmp_path)
    if where != "data":
        assert not writer.work(), "it is not sealed once more"
    if where == "data":
        with pytest.raises(CheckpointCorrupt, match="xxh3"):
            both.load(5)
    assert 5 not in [stored.version for stored in both.stored()]
    assert float(both.load(4).tensors["n"]) == 4.0


def test_a_frame_that_is_used_again_is_no_damage(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The writer has listed a sealed snapshot, and a worker begins the next but one in its frame just then."""
    frames = Frames(memory)
    take(frames, 4, to_disk=False)
    writer = Writer(frames, tmp_path)
    writer.drain()
    (listed,) = frames.complete()
    take(frames, 5, to_disk=False)
    take(frames, 6, finished=0, to_disk=False)
    assert listed.damaged and not listed.here
    monkeypatch.setattr(frames, "complete", lambda: [listed])
    assert not writer.work() and "checkpoint_corrupt" not in capfd.readouterr().out
    monkeypatch.undo()
    assert versions(frames) == [5]


def test_damage_in_memory_is_repaired_from_disk_and_the_other_way_round(memory: Memory, tmp_path: Path) -> None:
    frames = Frames(memory)
    taken = take(frames, 5)
    writer = Writer(frames, tmp_path)
    writer.drain()
    taken._frame.map[taken.control.data_at + 100] ^= 1
    found = load(memory, tmp_path, 5)
    assert len(found.repaired) == 1 and "taken from" in found.repaired[0]
    assert torch.equal(found.tensors["w"], torch.full((700, 10), 5.0))
    taken._frame.map[taken.control.data_at + 100] ^= 1
    state = newest(tmp_path)[0].path / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-5] ^= 1
    state.write_bytes(content)
    taken._frame.invalidate()
    with pytest.raises(CheckpointCorrupt):
        load(memory, tmp_path, 5)
    assert newest(tmp_path) == [], "it is set aside"


def test_the_writer_brings_the_newest_to_disk_before_it_ends(memory: Memory, tmp_path: Path) -> None:
    frames = Frames(memory)
    take(frames, 7, to_disk=False)
    Writer(frames, tmp_path).finish()
    assert [checkpoint.step for checkpoint in newest(tmp_path)] == [7]
    take(frames, 9, shares=2, finished=1)
    Writer(frames, tmp_path).finish()
    assert [checkpoint.step for checkpoint in newest(tmp_path)] == [7]


def test_a_disk_that_refuses_ends_no_writer(memory: Memory, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    frames = Frames(memory)
    taken = take(frames, 7)
    writer = Writer(frames, tmp_path / "file")
    writer.drain()
    assert taken.outcome == SnapshotOutcome.FAILED and "checkpoint_failed" in capfd.readouterr().out


def test_a_torn_control_page_is_no_snapshot(memory: Memory) -> None:
    frames = Frames(memory)
    taken = take(frames, 7)
    struct.pack_into("<q", taken._frame.map, 16, 8)  # the version alone
    assert versions(frames) == [] and frames.begun() is None


def test_a_load_while_a_save_is_pruned_away(memory: Memory, tmp_path: Path) -> None:
    local.save(tmp_path, 3, {}, {"x": torch.ones(3)}, {})
    with pytest.raises(CheckpointCorrupt, match="no longer"):
        load(memory, tmp_path, 2)
