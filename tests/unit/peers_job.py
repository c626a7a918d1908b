"""One rank of a job on several nodes, which here are names: `peers_job.py save|load FOLDER RANK NODES DISK [TIERS]`.

`save`: train, save to each of TIERS ("memory,memory"), and say so. `load`: in a new world, load into a state of this
world, and say which step it is and its hash. Both then wait until their standard input ends, or they are killed. DISK:
the folder of checkpoints, in which NODE stands for the node.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from sharded_job import digest, model_of, state_of, train

from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier


def main(what: str, folder: str, rank: str, nodes: str, disk: str, tiers: str = "") -> None:
    names = nodes.split(",")
    node = names[int(rank)]
    dist.init_process_group("gloo", f"file://{folder}/{what}-store", rank=int(rank), world_size=len(names))
    told: list[tuple[str, Any]] = []
    config = CheckpointConfig(nvme_path=disk.replace("NODE", node), node_name=node)
    model, optimizer = model_of("fsdp")

    def say(**said: Any) -> None:
        print(json.dumps(said | {"told": told}), flush=True)

    with CheckpointManager(config, lambda *event: told.append(event)) as manager:
        if what == "save":
            for turn, tier in enumerate(tiers.split(",")):
                train(model, optimizer, "fsdp")
                state = state_of(model, optimizer, "fsdp", 3 + 3 * turn)
                hashed = digest(state)
                manager.save_checkpoint(state, CheckpointTier(tier))
                process = manager._writer._process
                say(begun=state.step, writer=process.pid if process else 0)
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
        sys.stdin.read()
    dist.destroy_process_group()


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(exist_ok=True)
    main(*sys.argv[1:])
