"""One rank of a process group on gloo that compares its state with the others'."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic_harness.errors import HarnessError
from elastic_harness.health import (
    ConsistencyChecker,
    FaultDetector,
    FaultDetectorConfig,
    synchronize_state,
    verify_model_consistency,
)

if TYPE_CHECKING:
    from unit.ranks import Here

PARTS = 8


def join(folder: str, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)


@torch.enable_grad()
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    return model, optimizer


def told(checker: ConsistencyChecker, step: int | None = None) -> dict[str, Any]:
    try:
        report = checker.check() if step is None else checker.check_part(step)
    except HarnessError as error:
        return {"error": str(error)}
    names = [[each.name, each.ranks] for each in report.differences]
    return {**asdict(report), "ok": report.ok, "ranks": report.ranks, "names": names, "text": str(report)}


def make_equal(here: Here, rank: int, world: int, folder: str) -> None:
    """Train apart, on the last rank not at all; then all take what rank 1 has."""
    join(folder, rank, world)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    for _ in range(rank if rank < world - 1 else 0):
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
    before = verify_model_consistency(model, optimizer)
    weight = model[0].weight.tolist()
    synchronize_state(model, optimizer, source=1)
    after = verify_model_consistency(model, optimizer)
    here.say(before=before.ok, after=after.ok, kept=model[0].weight.tolist() == weight, text=str(after))


@torch.no_grad()
def compare(here: Here, rank: int, world: int, folder: str) -> None:
    """Compare a state after one thing after another was changed on some ranks, and put back."""
    join(folder, rank, world)
    model, optimizer = trained()
    weight, moment = model[2].weight, optimizer.state[model[0].bias]["exp_avg"]  # type: ignore[union-attr]
    checker = ConsistencyChecker({"model": model, "optimizer": optimizer, "more": {"note": "x" * 1000}}, parts=PARTS)
    said: dict[str, Any] = {"same": told(checker)}
    if rank == 2:
        _flip(weight[1, 3:4])
        _flip(moment[:1])
    said["bits"] = told(checker)
    said["parts"] = [told(checker, step)["names"] for step in range(40, 40 + PARTS)]
    if rank == 2:
        _flip(weight[1, 3:4])
        _flip(moment[:1])
    optimizer.param_groups[0]["lr"] = 0.01 + (rank % 2) * 0.5
    said["tie"] = told(checker)
    optimizer.param_groups[0]["lr"] = 0.01
    running = model[1].running_mean
    running += rank  # as in DDP, between two forwards
    said["batch norm"] = told(checker)
    said["ignored"] = told(ConsistencyChecker({"model": model}, ignore=["*.running_*"]))
    said["typo"] = told(ConsistencyChecker({"model": model}, ignore=["*.runing_*"]))
    if rank == 1:
        model[2] = nn.Linear(32, 5)
    said["layout"] = told(checker)
    said["steps"] = told(checker, step=rank // 3)
    said["unreadable"] = told(ConsistencyChecker({"s": {"v": object() if rank == 3 else 1}}))
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        said["pair"] = told(ConsistencyChecker({"state": {"t": torch.tensor([float(rank)])}}, pair))
    with FaultDetector(FaultDetectorConfig(on_hang="ignore")) as detector:
        said["stops"] = [detector.stops_anywhere()]
        if rank == 2:
            os.kill(os.getpid(), 15)
        said["stops"] += [detector.stops_anywhere()]
    here.say(**said)


def _flip(values: torch.Tensor) -> None:
    """Change the lowest bit, as memory that fails may do."""
    values.view(torch.int32).bitwise_xor_(1)


def looked_at(given: dict[str, Any]) -> str:
    with FaultDetector(FaultDetectorConfig(on_hang="ignore", on_signal="ignore")) as detector:
        try:
            detector.step(**given)
        except HarnessError as error:
            return str(error)
    return "fine"


def sharded(here: Here, rank: int, world: int, folder: str) -> None:
    """FSDP2, fully and in two replicas: there what the replicas hold can be compared."""
    join(folder, rank, world)
    said: dict[str, Any] = {}
    full = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    fully_shard(full)
    said["full"] = told(ConsistencyChecker({"model": full}))
    full(torch.ones(2, 16)).sum().backward()
    norm = nn.utils.get_total_norm([parameter.grad for parameter in full.parameters()])  # type: ignore[misc]
    for given in ({"model": full}, {"grad_norm": norm}):
        said[next(iter(given))] = looked_at(given)
    assert looked_at({"grad_norm": norm.full_tensor()}) == "fine"  # type: ignore[attr-defined]
    said["partly"] = told(ConsistencyChecker({"model": full, "step": {"count": torch.tensor(7)}}))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    hybrid = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    fully_shard(hybrid, mesh=mesh)
    checker = ConsistencyChecker({"model": hybrid}, mesh["replicate"].get_group())
    said["hybrid"] = told(checker)
    if rank == 3:
        _flip(hybrid[1].weight.to_local()[:1])  # type: ignore[union-attr,operator]
    said["flipped"] = told(checker)
    here.say(**said)
