"""What everybody writes: DistributedDataParallel over the same model, samples and global batch, `plain_ddp.py OUT`.
For comparison only: its weights depend on the number of workers, because the order of its additions does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic_harness.gpt.config import ModelConfig
from elastic_harness.gpt.model import GPT
from elastic_harness.train.state import weights_sha256

SAMPLES, STEPS = 12, 6


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=1, n_head=2, d_model=64, context_length=16), seed=0)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens_SNT = torch.randint(0, 256, (STEPS, SAMPLES, 17), generator=torch.Generator().manual_seed(1))
    for tokens_NT in tokens_SNT:
        own_NT = tokens_NT.chunk(world)[rank]
        logits_NTV = wrapped(own_NT[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits_NTV.flatten(0, 1), own_NT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        Path(sys.argv[1]).write_text(weights_sha256(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
