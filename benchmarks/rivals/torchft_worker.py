"""One torchft replica: flat Manager.allreduce, synchronous quorum, samples split over its participants.

The environment names the lighthouse, the worker's index, the log of commits, the config and the settings; and where
there are several hosts, this one's address.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import ReduceOp, TCPStore
from torchft import Manager, ProcessGroupGloo

from benchmarks.workload import CommitLog, of_environment


def main() -> None:
    """Train until killed or max_steps."""
    settings = json.loads(os.environ["BENCH_TORCHFT"])
    work = of_environment()
    model, optimizer, config = work.model, work.optimizer, work.config
    log = CommitLog(os.environ["BENCH_COMMITS"])
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.zeros(sum(p.numel() for p in parameters))
    offset = 0
    for p in parameters:  # gradients accumulate straight into the buffer that goes on the wire
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    host = os.environ.get("BENCH_HOST", "localhost")
    if (
        "BENCH_HOST" in os.environ
    ):  # those who take the state are sent to this name, which here is the same on all hosts
        socket.gethostname = lambda: host
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=settings["gloo_timeout_s"])),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=settings["min_replica_size"],
        use_async_quorum=settings["use_async_quorum"],
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        replica_id=f"worker_{os.environ['BENCH_WORKER']}",
        hostname=host,
        heartbeat_interval=timedelta(milliseconds=settings["heartbeat_interval_ms"]),
        init_sync=False,
    )
    while manager.current_step() < config.training.max_steps:
        manager.start_quorum()
        step, started = manager.current_step(), time.time()
        rank, world_size = manager.participating_rank(), manager.num_participants()
        flat.zero_()
        if rank is not None:
            for batch in work.micro_batches(work.share(step, rank, world_size)):
                loss = work.loss(model, batch)
                (loss * (len(batch["labels"]) / work.global_batch)).backward()
        manager.allreduce(flat, reduce_op=ReduceOp.SUM).wait()
        if manager.should_commit():
            if config.training.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, config.training.clip_norm)
            optimizer.step()
            log.commit(step, world_size, worker=int(os.environ["BENCH_WORKER"]), step_s=time.time() - started)
    os._exit(0)


if __name__ == "__main__":
    main()
