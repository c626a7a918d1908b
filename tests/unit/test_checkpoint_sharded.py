"""Several writers of one checkpoint: real FSDP2 and DTensors on gloo, loaded in other worlds and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager
from elastic_harness.checkpoint.disk import local, parts
from elastic_harness.checkpoint.disk.manifest import newest
from elastic_harness.checkpoint.disk.parts import Part, save_part
from elastic_harness.checkpoint.disk.reading import Folder, fill
from elastic_harness.checkpoint.layout import Slice
from elastic_harness.checkpoint.tensors import content_of
from unit import sharded_job
from unit.ranks import Rank


def job(folder: Path, world: int, what: str, kind: str, dies: int | None = None) -> dict[str, Any]:
    """What all ranks said, which is the same; nothing if one of them dies: the others are killed then."""
    ranks = [Rank(sharded_job.main, n, world, str(folder / "checkpoints"), what, kind, dies) for n in range(world)]
    if dies is not None:
        assert ranks[dies].end() == 9
        for rank in ranks:
            rank.kill()
            rank.end()
        return {}
    said = [rank.said() for rank in ranks]
    assert [rank.end() for rank in ranks] == [0] * world
    assert said == said[:1] * world
    return said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "save_in", "load_in"),
    [("fsdp", 4, 3), ("fsdp", 2, 4), ("fsdp", 3, 1), ("hybrid", 4, 2), ("columns", 3, 2), ("plain", 2, 3)],
)
def test_what_some_ranks_saved_others_load(tmp_path: Path, kind: str, save_in: int, load_in: int) -> None:
    saved = job(tmp_path, save_in, "save", kind)
    (checkpoint, older) = newest(tmp_path / "checkpoints")
    files = sorted(path.name for path in checkpoint.path.glob("state-*"))
    assert files == [f"state-{rank:05d}-of-{save_in:05d}.safetensors" for rank in range(save_in)]
    sizes = [(checkpoint.path / name).stat().st_size for name in files]
    assert max(sizes) < 2 * min(sizes), "everybody writes about as much"
    assert not list((tmp_path / "checkpoints").glob("*.parts-*"))
    local.check(checkpoint)
    assert job(tmp_path, load_in, "load", kind) == saved
    if kind == "fsdp":
        with CheckpointManager(CheckpointConfig(nvme_path=str(tmp_path / "checkpoints")), lambda *_: None) as manager:
            whole = manager.load_checkpoint()
        assert whole is not None and whole.model_state is not None
        assert whole.model_state["0.weight"].shape == (70, 33) and older.step == 3


@pytest.mark.slow
def test_without_one_rank_s_part_there_is_no_checkpoint(tmp_path: Path) -> None:
    job(tmp_path, 3, "save", "fsdp", dies=1)
    assert [checkpoint.step for checkpoint in newest(tmp_path / "checkpoints")] == [3]
    assert job(tmp_path, 2, "load", "fsdp")["step"] == 3
    assert not list((tmp_path / "checkpoints").glob("*.parts-*"))


@pytest.mark.slow
def test_what_rank_0_cannot_fetch_fails_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    folder, bucket = str(tmp_path / "checkpoints"), "ftp://127.0.0.1/checkpoints"  # an error at once
    ranks = [Rank(sharded_job.fetch, n, 3, folder, bucket) for n in range(3)]
    first, *others = (rank.said() for rank in ranks)
    assert first["kind"] == "ConfigError" and "ftp://127.0.0.1/checkpoints" in first["text"]
    for said in others:
        assert said == {"kind": "InfrastructureError", "text": f"Rank 0 failed: {first['text']}"}
    assert [rank.end() for rank in ranks] == [0, 0, 0]


def rows(tensor: torch.Tensor, low: int, high: int) -> dict[Slice, memoryview]:
    of = Slice("w", "float32", tuple(tensor.shape), (low, 0), (high - low, tensor.shape[1]))
    return {of: content_of(tensor[low:high])}


def test_parts_come_in_any_order_and_twice(tmp_path: Path) -> None:
    w = torch.randn(10, 4)
    meta: dict[str, Any] = {"lineage": 0}

    def write(index: int, low: int, high: int, token: str = "ab-0") -> Path | None:
        return save_part(tmp_path, 7, Part(index, 3, token), {"w": 1}, rows(w, low, high), meta)

    assert write(2, 7, 10) is None and write(0, 0, 3) is None
    assert write(2, 7, 10) is None, "its writer died and does it again"
    assert write(1, 0, 3, "ef-0") is None, "of another attempt"
    assert newest(tmp_path) == []
    assert write(1, 3, 7) == tmp_path / "step-00000007"
    (checkpoint,) = newest(tmp_path)
    skeleton, tensors, _ = local.load(checkpoint)
    assert torch.equal(tensors["w"], w) and skeleton == {"w": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"], "the other attempt is removed"


def test_parts_that_do_not_fit_together_are_no_checkpoint(tmp_path: Path) -> None:
    w = torch.randn(10, 4)
    save_part(tmp_path, 7, Part(0, 2, "ab-0"), {}, rows(w, 0, 3), {})
    with pytest.raises(Exception, match=r"contradicts itself about w|do not fit"):
        save_part(tmp_path, 7, Part(1, 2, "ab-0"), {}, rows(w, 4, 10), {})
    assert newest(tmp_path) == []
    parts.clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


BOXES = [((0, 0), (10, 6)), ((2, 0), (3, 6)), ((0, 1), (10, 2)), ((4, 3), (5, 3)), ((9, 5), (1, 1))]


@pytest.mark.parametrize("box", BOXES)
def test_any_box_is_filled_from_any_slices(tmp_path: Path, box: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    w = torch.randn(10, 6)
    for index, (low, high) in enumerate([(0, 1), (1, 5), (5, 10)]):
        save_part(tmp_path, 7, Part(index, 3, "ab-0"), {}, rows(w, low, high), {})
    (checkpoint,) = newest(tmp_path)
    offset, sizes = box
    into = torch.empty(sizes)
    with Folder(checkpoint) as source:
        fill([source], {Slice("w", "float32", (10, 6), offset, sizes): content_of(into)})
    assert torch.equal(into, w[offset[0] : offset[0] + sizes[0], offset[1] : offset[1] + sizes[1]])
