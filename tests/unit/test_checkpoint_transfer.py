"""Checkpoints to and from an S3 server: whole there or not there at all, and the same when they come back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_harness.checkpoint.disk import local
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.commands.checkpoint import main
from elastic_harness.errors import CheckpointCorrupt, ConfigError, InfrastructureError
from elastic_harness.object_store import ObjectStore

obstore = pytest.importorskip("obstore")
pytestmark = pytest.mark.slow


def saved(folder: Path, step: int = 7, numbers: int = 9_000_000) -> local.Checkpoint:
    """36 MB by default: three blocks, and an upload in several parts."""
    tensors = {"model.w": torch.arange(numbers, dtype=torch.float32), "m": torch.full((5,), float(step))}
    local.save(folder, step, {"step": step}, tensors, {})
    return local.newest(folder)[0]


def content(checkpoint: local.Checkpoint) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in local.load(checkpoint)[1].items()}


def test_there_and_back(s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = saved(tmp_path / "here")
    assert main(["push", str(tmp_path / "here"), f"{s3}/runs/a"]) == 0
    assert "uploaded and checked" in capsys.readouterr().out
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert main(["pull", f"{s3}/runs/a", str(tmp_path / "run")]) == 0
    (pulled,) = local.newest(tmp_path / "run" / "checkpoints")
    assert content(pulled) == content(checkpoint) and pulled.manifest == checkpoint.manifest
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000007"]
    with pytest.raises(ConfigError, match="is here already"):
        transfer.pull(f"{s3}/runs/a/step-00000007", tmp_path / "run" / "checkpoints")


def test_a_linked_base_goes_along_and_the_newest_is_pulled(s3: str, tmp_path: Path) -> None:
    for step in (7, 12):
        where = transfer.push(saved(tmp_path / "here", step), s3)
    assert len([n for n in ObjectStore(where).names() if "base-" in n]) == 1
    pulled = transfer.pull(s3, tmp_path / "there")
    assert pulled.step == 12 and content(pulled) == content(local.newest(tmp_path / "here")[0])


def test_pushing_again_sends_nothing_and_another_of_that_name_is_refused(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved(tmp_path / "here", numbers=1000)
    transfer.push(checkpoint, s3)
    monkeypatch.setattr(ObjectStore, "put_file", lambda *arguments: pytest.fail("it is there"))
    transfer.push(checkpoint, s3)
    with pytest.raises(ConfigError, match="another checkpoint"):
        transfer.push(saved(tmp_path / "other", numbers=999), s3)


def test_an_upload_that_was_cut_off_is_no_checkpoint_and_goes_on(s3: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "here")
    code = "import sys; from elastic_harness.commands.checkpoint import main; sys.exit(main(sys.argv[1:]))"
    killed = 0
    for delay_s in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        push = subprocess.Popen(
            [sys.executable, "-c", code, "push", str(tmp_path / "here"), s3], stdout=subprocess.DEVNULL
        )
        time.sleep(delay_s)
        push.kill()
        killed += push.wait() < 0
        if any(name.endswith("manifest.json") for name in ObjectStore(s3).names()):
            break
        with pytest.raises(ConfigError, match="There is no checkpoint"):
            transfer.pull(s3, tmp_path / "there")
    assert killed
    transfer.push(checkpoint, s3)
    assert content(transfer.pull(s3, tmp_path / "there")) == content(checkpoint)


def test_wrong_bytes_in_the_storage_are_noticed_by_both(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved(tmp_path / "here", numbers=1000)
    store = obstore.store.from_url(f"{s3}/step-00000007")
    place = f"{checkpoint.manifest['sha256'][:16]}/state.safetensors"
    damaged = bytearray((checkpoint.path / "state.safetensors").read_bytes())
    damaged[-1] ^= 1
    obstore.put(store, place, bytes(damaged))
    own = ObjectStore.put_file
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put_file", lambda *_: None)  # a storage that keeps what it had
        with pytest.raises(InfrastructureError, match="does not have the bytes that were sent"):
            transfer.push(checkpoint, s3)
    assert not [n for n in ObjectStore(s3).names() if n.endswith("manifest.json")]
    assert ObjectStore.put_file is own
    transfer.push(checkpoint, s3)
    obstore.put(store, place, bytes(damaged))
    with pytest.raises(CheckpointCorrupt, match="is damaged between"):
        transfer.pull(s3, tmp_path / "there")
    obstore.put(store, place, bytes(damaged[:-1]))
    with pytest.raises(CheckpointCorrupt, match="its manifest says"):
        transfer.pull(s3, tmp_path / "there")
    for wrong in (b"{}", b"[1]", b'{"files": {"../x.safetensors": {"bytes": 1}}}'):
        obstore.put(store, "manifest.json", wrong)
        with pytest.raises(CheckpointCorrupt):
            transfer.pull(s3, tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def test_another_upload_of_that_name_at_the_same_time_replaces_nothing(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends its data when ours is checked and its manifest not there yet, and is cut off."""
    ours, other = saved(tmp_path / "ours", numbers=1000), saved(tmp_path / "other", numbers=999)
    create, calls = ObjectStore.create, []

    def late(self: ObjectStore, name: str, manifest: bytes) -> bool:
        calls.append(name)
        if len(calls) == 2:
            raise InfrastructureError("cut off")
        with pytest.raises(InfrastructureError, match="cut off"):
            transfer.push(other, s3)
        return create(self, name, manifest)

    monkeypatch.setattr(ObjectStore, "create", late)
    transfer.push(ours, s3)
    assert len(calls) == 2 and content(transfer.pull(s3, tmp_path / "there")) == content(ours)


def test_only_what_is_directly_below_is_pulled(s3: str, tmp_path: Path) -> None:
    transfer.push(saved(tmp_path / "here", 7, numbers=1000), s3)
    transfer.push(saved(tmp_path / "here", 12, numbers=1000), f"{s3}/another-run")
    assert transfer.pull(s3, tmp_path / "there").step == 7
    with pytest.raises(ConfigError, match="There is no checkpoint below"):
        transfer.pull(f"{s3}/another", tmp_path / "there")


def test_what_is_damaged_here_is_not_uploaded(s3: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "here", numbers=1000)
    os.truncate(checkpoint.path / "state.safetensors", 100)
    with pytest.raises(CheckpointCorrupt):
        transfer.push(checkpoint, s3)
    assert ObjectStore(s3).names() == []


def test_a_manifest_is_created_once(s3: str) -> None:
    store = ObjectStore(s3)
    made: list[Any] = [store.create("a", b"first"), store.create("a", b"second")]
    assert made == [True, False] and store.read("a", 0, 5) == b"first"


def test_what_was_before_updates_became_non_finite_stays_there_too(s3: str, tmp_path: Path) -> None:
    for step in range(1, 7):
        meta = {"nonfinite_since": 3} if step > 3 else {}
        local.save(tmp_path, step, {}, {"x": torch.full((100,), float(step))}, meta)
        transfer.push(local.newest(tmp_path)[0], s3)
    transfer.prune(s3, 1)
    assert transfer.names(s3) == ["step-00000006", "step-00000003", "step-00000002"]
