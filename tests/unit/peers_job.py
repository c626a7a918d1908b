"""One rank of a job on several nodes, which here are names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier
from unit.sharded_job import digest, model_of, state_of, train

if TYPE_CHECKING:
    from unit.ranks import Here


def main(here: Here, rank: int, what: str, folder: Path, nodes: list[str], disk: str, tiers: str = "") -> None:
    """`what`: "save" trains, saves to each of `tiers` ("memory,memory"), and says so; "load" loads into a state of this
    world, and says which step it is and its hash. Both then stay until they are let go or killed. `disk`: the folder of
    checkpoints, in which NODE stands for the node."""
    node = nodes[rank]
    dist.init_process_group("gloo", f"file://{folder}/{what}-store", rank=rank, world_size=len(nodes))
    told: list[tuple[str, Any]] = []
    config = CheckpointConfig(nvme_path=disk.replace("NODE", node), node_name=node)
    model, optimizer = model_of("fsdp")

    def say(**said: Any) -> None:
        here.say(**said, told=told)

    with CheckpointManager(config, lambda *event: told.append(event)) as manager:
        if what == "save":
            for turn, tier in enumerate(tiers.split(",")):
                train(model, optimizer, "fsdp")
                state = state_of(model, optimizer, "fsdp", 3 + 3 * turn)
                hashed = digest(state)
                manager.save_checkpoint(state, CheckpointTier(tier))
                say(begun=state.step, writer=next(iter(manager._writer.pids), 0))
                try:
                    manager.wait()
                except RuntimeError as error:
                    say(failed=str(error))
                    raise
                say(step=state.step, digest=hashed, copies=len(manager._writer.copies))
        else:
            train(model, optimizer, "fsdp")
            loaded = manager.load_checkpoint(into=state_of(model, optimizer, "fsdp", 0))
            tier = loaded.tier.value if loaded and loaded.tier else None
            say(step=loaded and loaded.step, digest=loaded and digest(loaded), tier=tier)
        here.stay()
    dist.destroy_process_group()
