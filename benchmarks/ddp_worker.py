"""The baseline: plain DistributedDataParallel on gloo with gradient accumulation, one thread a process.

Started by throughput.py and memory.py (at the gate) and by exactness.py (some steps, then the hash).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gate import Gate
from benchmarks.weights import weights_sha256
from benchmarks.workload import Workload, loss_of


def main() -> None:
    """Train at the gate, or `--steps` steps and print the weights' hash."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=0, help="0: run as the gate says")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    work = Workload(args.config, args.overrides)
    model, optimizer, config = work.model, work.optimizer, work.config
    ddp = DistributedDataParallel(model)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def one_step(step: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        share = work.share(step, rank, world_size)
        for k, batch in enumerate(work.micro_batches(share)):
            last = (k + 1) * work.micro_batch >= len(share)
            with contextlib.nullcontext() if last else ddp.no_sync():
                # DDP averages over the ranks: scale so that the mean over the global batch results
                (loss_of(ddp, batch) * (len(batch["labels"]) * world_size / work.global_batch)).backward()
        if config.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, config.training.clip_norm)
        optimizer.step()

    if args.steps:
        for step in range(args.steps):
            one_step(step)
        if rank == 0:
            print(json.dumps({"weights_sha256": weights_sha256(model)}), flush=True)
        dist.barrier()
        os._exit(0)
    gate = Gate("ddp", work.parameters, work.global_batch * config.data.seq_length)
    step = 0
    while True:
        for _ in range(gate.wait()):
            one_step(step)
            step += 1


if __name__ == "__main__":
    main()
