"""One rank of a job with FSDP2 or DTensors on gloo.

It trains a few steps and saves, or builds the same model in this world, loads, and says the hash of the whole state.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager, CheckpointState

if TYPE_CHECKING:
    from unit.ranks import Here


def model_of(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 70), nn.ReLU(), nn.Linear(70, 5))
    world = dist.get_world_size()
    if kind == "fsdp":
        fully_shard(model)
    elif kind == "hybrid":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "columns":
        mesh = init_device_mesh("cpu", (world,))
        for layer in (model[0], model[2]):
            for name, parameter in list(layer.named_parameters()):
                placement = Shard(1) if name == "weight" else Replicate()
                layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, step: int) -> CheckpointState:
    big = torch.arange(700_000, dtype=torch.float32).reshape(700, 1000)  # everybody has it, and it is cut
    if kind in ("fsdp", "hybrid"):
        states: tuple[Any, Any] = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    else:
        states = model.state_dict(), optimizer.state_dict()
    return CheckpointState(step, *states, extra={"everywhere": big * step})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
    for step in range(3):
        if kind == "columns":
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.ones_like(parameter) * (index + step)
        else:
            torch.manual_seed(step)
            model(torch.randn(4, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(value: Any, path: str = "") -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {path: value.full_tensor() if isinstance(value, DTensor) else value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: t for key, item in items for name, t in tensors(item, f"{path}.{key}").items()}


def digest(state: CheckpointState) -> str:
    found = hashlib.sha256()
    everything = {"model": state.model_state, "optimizer": state.optimizer_state, "extra": state.extra}
    for name, tensor in sorted(tensors(everything).items()):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(here: Here, rank: int, world: int, folder: str, what: str, kind: str, dies: int | None = None) -> None:
    """`what`: save or load. `dies`: the rank that ends instead of writing its part of the second checkpoint."""
    dist.init_process_group("gloo", f"file://{folder}.{what}", rank=rank, world_size=world)
    model, optimizer = model_of(kind)
    with CheckpointManager(CheckpointConfig(nvme_path=folder), lambda event, told: None) as manager:
        if what == "save":
            for turn in range(2):
                train(model, optimizer, kind)
                state = state_of(model, optimizer, kind, 3 + 3 * turn)
                if rank == dies and turn == 1:
                    os._exit(9)
                manager.save_checkpoint(state, wait=dies is None or turn == 0)
            here.say(step=state.step, digest=digest(state))
        else:
            train(model, optimizer, kind)
            loaded = manager.load_checkpoint(into=state_of(model, optimizer, kind, 0))
            assert loaded is not None
            here.say(step=loaded.step, digest=digest(loaded))
    dist.destroy_process_group()


def fetch(here: Here, rank: int, world: int, folder: str, bucket: str) -> None:
    """Load from object storage alone, and say what that raises."""
    dist.init_process_group("gloo", f"file://{folder}.fetch", rank=rank, world_size=world)
    with CheckpointManager(CheckpointConfig(nvme_path=folder, s3_bucket=bucket), lambda event, told: None) as manager:
        try:
            manager.load_checkpoint()
        except Exception as error:
            here.say(kind=type(error).__name__, text=str(error))
        here.stay()
    dist.destroy_process_group()
