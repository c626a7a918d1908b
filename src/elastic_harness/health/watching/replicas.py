"""One call to compare the replicas of a script without the harness, and one to make them equal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_harness.checkpoint.ranks import Ranks
from elastic_harness.checkpoint.sharding import is_distributed
from elastic_harness.checkpoint.state import load_optimizer
from elastic_harness.checkpoint.structure import decode, encode
from elastic_harness.errors import ConfigError
from elastic_harness.health.consistency import ConsistencyReport
from elastic_harness.health.watching.checker import ConsistencyChecker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def verify_model_consistency(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, group: ProcessGroup | None = None
) -> ConsistencyReport:
    """Compare the model, and the optimizer, of all ranks bit for bit; the report names what differs and where. As
    `ConsistencyChecker.check`, which compares more, and parts of it in each step. Collective."""
    states: dict[str, Any] = {"model": model, **({"optimizer": optimizer} if optimizer is not None else {})}
    return ConsistencyChecker(states, group).check()


def synchronize_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    source: int = 0,
    group: ProcessGroup | None = None,
) -> None:
    """Give all ranks the model's state, and the optimizer's, of the rank `source` of the group, to the bit. Collective;
    without a process group nothing happens. No pickle travels. Raises ConfigError for sharded state, which has no
    replicas. A run of the harness needs none of this."""
    ranks = Ranks(group)
    if not 0 <= source < ranks.world:
        raise ConfigError(f"source is {source}, but must be one of the {ranks.world} ranks.")
    if ranks.world == 1:
        return
    mine: dict[str, Tensor] = {}
    objects: dict[str, Any] = {"model": model, **({"optimizer": optimizer} if optimizer is not None else {})}
    skeletons = {name: encode(part.state_dict(), name, mine) for name, part in objects.items()}
    if any(is_distributed(tensor) for tensor in mine.values()):
        raise ConfigError("The state is sharded: ranks hold other parts of it, so there is nothing to make equal.")
    shapes = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in mine.items()]
    said = json.dumps([skeletons, shapes]).encode() if ranks.rank == source else b""
    skeletons, shapes = json.loads(ranks.gather(said)[source])
    device = next(model.parameters()).device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    received: dict[str, Tensor] = {}
    for name, dtype, shape in shapes:
        if ranks.rank == source:
            tensor = mine[name].detach().to(device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), group=group, group_src=source)
        received[name] = tensor
    if ranks.rank == source:
        return
    model.load_state_dict(decode(skeletons["model"], received))
    if optimizer is not None:
        load_optimizer(optimizer, decode(skeletons["optimizer"], received))
