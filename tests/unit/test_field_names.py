"""The names under which the field knows what the package has: thin faces, which do what their originals do."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic_harness.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointState,
    CheckpointTier,
    MemorySnapshotBackend,
    NVMeBackend,
    S3Backend,
    create_checkpoint_state,
    load_checkpoint_to_model,
)
from elastic_harness.checkpoint.remote import transfer
from elastic_harness.errors import ConfigError
from elastic_harness.scaling import ElasticScalingManager, GradAccumulationConfig, ScalingConfig, ScalingRule


@pytest.fixture
def manager(
    moto: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CheckpointManager]:
    pytest.importorskip("obstore")
    for name, value in moto.items():
        monkeypatch.setenv(name, value)
    config = CheckpointConfig(
        checkpoint_interval=4,
        memory_snapshot_interval=2,
        nvme_path=str(tmp_path / "disk"),
        s3_bucket="bucket",
        s3_prefix=tmp_path.name,
        keep_last_n=5,  # type: ignore[call-arg]
    )
    with CheckpointManager(config) as manager:
        yield manager


def state(step: int) -> CheckpointState:
    return CheckpointState(step, {"w": torch.full((4,), float(step))})


@pytest.mark.slow
def test_the_tiers_by_name(manager: CheckpointManager) -> None:
    began = time.time()
    asked = [(s, t) for s in range(1, 9) for t in (CheckpointTier.MEMORY, CheckpointTier.NVME) if due(manager, s, t)]
    memory, disk = CheckpointTier.MEMORY, CheckpointTier.NVME
    assert asked == [(2, memory), (4, disk), (6, memory), (8, disk)]
    manager.wait_for_pending_saves()
    assert {stored.version for stored in manager.list_checkpoints() if stored.tier == CheckpointTier.NVME} == {4, 8}
    manager.save_checkpoint(state(9), CheckpointTier.MEMORY)
    found = {tier: manager.load_checkpoint(tier=tier) for tier in ("memory", "nvme")}
    assert {tier: one.step for tier, one in found.items() if one} == {"memory": 9, "nvme": 8}
    assert found["nvme"] and began <= (found["nvme"].timestamp or 0.0) <= time.time()
    with pytest.raises(ConfigError, match="no checkpoint of step 9 in the tier nvme"):
        manager.load_checkpoint(9, tier=CheckpointTier.NVME)
    manager.clear_memory_snapshots()
    assert manager.load_checkpoint(tier="memory") is None and MemorySnapshotBackend(manager).list() == []
    newest = manager.load_checkpoint()
    assert newest and newest.step == 8


def due(manager: CheckpointManager, step: int, tier: CheckpointTier) -> bool:
    """Whether it asks for this tier; then it gets what it asks for."""
    asked = manager.should_checkpoint(step, tier)
    assert manager.should_checkpoint(step, tier) == asked, "until it is saved the answer stays"
    if asked and tier == CheckpointTier.MEMORY and manager.should_checkpoint(step, CheckpointTier.NVME):
        return False  # disk has memory too
    if asked:
        manager.save_checkpoint(state(step), tier)
    return asked


@pytest.mark.slow
def test_backends_are_one_tier_each(manager: CheckpointManager, tmp_path: Path) -> None:
    memory, disk, remote = MemorySnapshotBackend(manager), NVMeBackend(manager), S3Backend(manager)
    disk.save(state(1), wait=True)
    remote.save(state(2), wait=True)
    memory.save(state(3))
    assert [stored.version for stored in disk.list()] == [2, 1]
    loaded = [backend.load() for backend in (memory, disk)]
    assert [one.step for one in loaded if one] == [3, 2]
    give_up_at = time.monotonic() + 60
    while "step-00000002" not in transfer.names(f"s3://bucket/{tmp_path.name}") and time.monotonic() < give_up_at:
        time.sleep(0.01)
    from_there = remote.load()
    assert from_there and from_there.step == 2 and (from_there.model_state or {})["w"].tolist() == [2.0] * 4
    shutil.rmtree(manager.folder / "step-00000002")
    brought = remote.load()
    assert brought and brought.step == 2 and (manager.folder / "step-00000002").exists()
    with pytest.raises(ConfigError, match="leave step out"):
        remote.load(1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile has one of its own
def test_a_state_of_wrapped_models() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.compile(nn.parallel.DistributedDataParallel(model))
    finally:
        dist.destroy_process_group()
    saved = create_checkpoint_state(wrapped, optimizer, step=7, scheduler=scheduler, epoch=2, metrics={"loss": 1.0})
    assert list(saved.model_state or {}) == list(model.state_dict()) and (saved.epoch, saved.step) == (2, 7)
    drawn = torch.rand(3)
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    others = torch.optim.NAdam(other.parameters(), lr=0.5)
    assert load_checkpoint_to_model(saved, torch.compile(other), others) == 7
    assert torch.equal(torch.rand(3), drawn), "the random numbers go on from there"
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert others.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    with pytest.raises(ConfigError, match="has no state of: scaler"):
        load_checkpoint_to_model(saved, other, scaler=torch.amp.GradScaler("cpu"))


def test_both_scaling_managers_as_one() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaling = ScalingConfig(base_lr=0.1, base_batch_size=8, base_world_size=4, scaling_rule=ScalingRule.LINEAR)
    accumulation = GradAccumulationConfig(target_global_batch_size=32, local_batch_size=8, base_world_size=4)
    manager = ElasticScalingManager(scaling, accumulation, optimizer, rank=0)
    assert manager.on_topology_change(2, rank=0) == (0.1, 2), "twice the micro-batches, so the same batch and rate"
    assert [manager.should_step() for _ in range(4)] == [False, True, False, True]
    manager.rate.remove()
    again = ElasticScalingManager(scaling, accumulation, optimizer, rank=0)
    again.load_state_dict(manager.state_dict())
    assert again.state_dict()["accumulation"]["position"] == 64
