"""Plain DDP under torchrun: restart of everybody on a failure, resumed from a checkpoint every few steps."""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workload import CommitLog, of_environment, state_folder


def main() -> None:
    """Train until killed or max_steps."""
    settings = json.loads(os.environ["BENCH_TORCHRUN"])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    work = of_environment()
    model, optimizer, config = work.model, work.optimizer, work.config
    log = CommitLog(os.environ["BENCH_COMMITS"])
    newest = state_folder() / "checkpoint.pt"
    step = 0
    if newest.exists():
        state = torch.load(newest, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    group = None
    if "gloo_timeout_s" in settings:  # not that of the first group: workers start seconds apart
        group = dist.new_group(timeout=timedelta(seconds=settings["gloo_timeout_s"]))
    ddp = DistributedDataParallel(model, process_group=group)
    while step < config.training.max_steps:
        started = time.time()
        optimizer.zero_grad(set_to_none=True)
        batches = list(work.micro_batches(work.share(step, rank, world_size)))
        for k, batch in enumerate(batches):
            with contextlib.nullcontext() if k == len(batches) - 1 else ddp.no_sync():
                loss = work.loss(ddp, batch)
                # DDP averages over the ranks: scale so that the mean over the global batch results
                (loss * (len(batch["labels"]) * world_size / work.global_batch)).backward()
        if config.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.training.clip_norm)
        optimizer.step()
        log.commit(step, world_size, rank=rank, step_s=time.time() - started)
        step += 1
        if rank == 0 and step % settings["checkpoint_interval_steps"] == 0:
            temporary = newest.with_suffix(".tmp")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
            os.replace(temporary, newest)
    os._exit(0)


if __name__ == "__main__":
    main()
