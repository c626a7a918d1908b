"""Checkpoints in object storage as differences: what comes back is what was saved, and nothing that is needed goes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from elastic_harness.checkpoint.disk import local
from elastic_harness.checkpoint.disk.manifest import Checkpoint, newest
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.errors import CheckpointCorrupt, HarnessError
from elastic_harness.object_store import ObjectStore

pytestmark = pytest.mark.slow


def trained(folder: Path, steps: int) -> list[Checkpoint]:
    """Checkpoints of a model that really trains, with parts that do not change; the oldest first."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 7))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    made = []
    for step in range(1, steps + 1):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 200)).square().mean().backward()
            optimizer.step()
        state = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
        state |= {f"bf16.{name}": tensor.bfloat16() for name, tensor in state.items()}
        moments = optimizer.state_dict()["state"].items()
        state |= {f"optimizer.{i}.{key}": value for i, values in moments for key, value in values.items()}
        state |= {"empty": torch.empty(0, 3), "grows": torch.zeros(step)}
        made.append(local.save(folder, step, {"step": step}, state, {}))
    return sorted(newest(folder), key=lambda checkpoint: checkpoint.step)


def sizes(url: str) -> dict[str, int]:
    store = ObjectStore(url)
    found: dict[str, int] = {}
    for name in store.names():
        found[name.partition("/")[0]] = found.get(name.partition("/")[0], 0) + store.size(name)
    return found


def same(first: Checkpoint, second: Checkpoint) -> bool:
    one, other = local.load(first), local.load(second)
    equal = all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    return first.manifest == second.manifest and one[0] == other[0] and equal


def test_a_chain_comes_back_bit_for_bit_and_has_an_end(s3: str, tmp_path: Path) -> None:
    made = trained(tmp_path / "here", 7)
    for checkpoint in made:
        transfer.push(checkpoint, s3, full_every=3)
    whole = [name for name in sorted(sizes(s3)) if not any(
        n.endswith("delta.json") for n in ObjectStore(f"{s3}/{name}").names()
    )]  # fmt: skip
    assert whole == ["step-00000001", "step-00000004", "step-00000007"]
    assert sizes(s3)["step-00000002"] < 0.6 * sizes(s3)["step-00000001"]
    for number, checkpoint in enumerate(made):
        there = tmp_path / f"there-{number}"
        assert same(transfer.pull(f"{s3}/{checkpoint.path.name}", there), checkpoint)
        assert [path.name for path in there.iterdir()] == [checkpoint.path.name]
    transfer.pull(f"{s3}/step-00000002", tmp_path / "near")
    assert same(transfer.pull(f"{s3}/step-00000003", tmp_path / "near"), made[2])


def test_what_a_difference_needs_is_not_removed(s3: str, tmp_path: Path) -> None:
    made = trained(tmp_path / "here", 6)
    for checkpoint in made[:5]:
        transfer.push(checkpoint, s3, full_every=4)
    assert transfer.prune(s3, 2) == [], "4 is the difference to 3, to 2, to 1"
    assert transfer.prune(s3, 1) == ["step-00000004", "step-00000003", "step-00000002", "step-00000001"]
    transfer.push(made[5], s3, full_every=4)
    assert transfer.prune(s3, 1) == [] and transfer.names(s3) == ["step-00000006", "step-00000005"]
    assert same(transfer.pull(s3, tmp_path / "there"), made[5])


def test_a_damaged_difference_or_parent_is_noticed(s3: str, tmp_path: Path) -> None:
    import obstore

    made = trained(tmp_path / "here", 3)
    for checkpoint in made:
        transfer.push(checkpoint, s3, full_every=10)
    store = obstore.store.from_url(f"{s3}/step-00000002")
    for name in ("delta.bin", "delta.json"):
        place = f"{made[1].manifest['sha256'][:16]}/{name}"
        whole = bytes(obstore.get(store, place).bytes())
        for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], whole[: len(whole) // 2] + b"x" * 9):
            obstore.put(store, place, damaged)
            with pytest.raises(HarnessError):
                transfer.pull(f"{s3}/step-00000003", tmp_path / "there")
        obstore.put(store, place, whole)
    assert list((tmp_path / "there").iterdir()) == []
    assert same(transfer.pull(f"{s3}/step-00000003", tmp_path / "there"), made[2])


def test_parents_in_a_circle_are_an_error(s3: str, tmp_path: Path) -> None:
    made = trained(tmp_path / "here", 2)
    for checkpoint in made:
        transfer.push(checkpoint, s3, full_every=10)
    store = ObjectStore(f"{s3}/step-00000002")
    place = f"{made[1].manifest['sha256'][:16]}/delta.json"
    index = json.loads(store.read(place, 0, store.size(place)))
    index["parent"] = {"name": "step-00000002", "sha256": made[1].manifest["sha256"]}
    store.put(place, json.dumps(index).encode())
    with pytest.raises(CheckpointCorrupt, match="its parent step-00000002 is none"):
        transfer.pull(s3, tmp_path / "there")


def test_without_the_parent_here_it_is_sent_whole(s3: str, tmp_path: Path) -> None:
    first, second = trained(tmp_path / "here", 2)
    transfer.push(first, s3, full_every=5)
    shutil.rmtree(first.path)
    transfer.push(second, s3, full_every=5)
    assert not any(name.endswith("delta.json") for name in ObjectStore(s3).names())
    assert same(transfer.pull(s3, tmp_path / "there"), second)


def test_a_damaged_parent_here_is_an_error_before_anything_is_visible(s3: str, tmp_path: Path) -> None:
    first, second = trained(tmp_path / "here", 2)
    transfer.push(first, s3, full_every=5)
    state = first.path / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    with pytest.raises(CheckpointCorrupt):
        transfer.push(second, s3, full_every=5)
    assert transfer.names(s3) == ["step-00000001"]


@pytest.mark.parametrize("damage", [b"", b"\xff", b"[]", b"{}", b'{"sha256": 7}'])
def test_a_damaged_manifest_in_the_storage_is_nobody_s_parent(s3: str, tmp_path: Path, damage: bytes) -> None:
    first, second = trained(tmp_path / "here", 2)
    transfer.push(first, s3, full_every=5)
    ObjectStore(s3).put("step-00000001/manifest.json", damage)
    transfer.push(second, s3, full_every=5)
    assert transfer.prune(s3, 2) == [] and same(transfer.pull(s3, tmp_path / "there"), second)
    assert transfer.prune(s3, 1) == ["step-00000001"]
