"""A small training in which one sample takes far more memory than all others.

python hungry.py KIND [--raises] [--run-dir DIR]

    roomy     there is enough of it
    garbage   all workers have enough, but hold too much that nobody needs any more
    one       rank 0 has too little
    killed    rank 0 has too little, and the first other worker to compute that sample is killed
    all       all workers have too little

`ulimit -d` limits the memory, so the allocator itself fails. With --raises the script computes the loss by itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import signal
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import elastic_harness
from elastic_harness.contract import variables

STEPS, BATCH, HUNGRY = 6, 8, 21
ROWS = 400_000  # some 110 MiB in forward, and as much in backward
ROOM = 64 << 20


class Held:
    """Memory that refers to itself: it is free only after Python has looked for such things."""

    def __init__(self) -> None:
        self.itself = self
        self.memory = torch.empty(6 * ROOM, dtype=torch.uint8)


def data_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (size, resource.RLIM_INFINITY))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("roomy", "garbage", "one", "killed", "all"))
    parser.add_argument("--raises", action="store_true")
    parser.add_argument("--run-dir")
    given = parser.parse_args()
    is_new = not os.environ.get(variables.MEMBER, "").endswith("-1")  # started again

    torch.manual_seed(0)
    vectors = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    config = elastic_harness.Config.from_dict(
        {
            "training": {"max_steps": STEPS, "global_batch_samples": BATCH, "micro_batch_samples": 1},
            # The sample is rank 0's, however slow that is; and it may take a thousand times as long as the others.
            "elastic": {"deal_by_speed": False, "progress_timeout_min_s": 60.0},
        }
    )

    def loss_of(batch: Tensor) -> Tensor:
        rows = ROWS if bool((batch == vectors[HUNGRY]).all()) else 1
        batch.mul_(0.5)  # a second try must not do this to the same batch
        return (model(batch.repeat(rows, 1)).sum(1) - batch.sum()).pow(2).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = elastic_harness.start(model, optimizer, vectors, config, run_dir=given.run_dir)
    gc.disable()
    most: int | None = None
    for step in run.steps():
        for batch in step.micro_batches():
            hungry = bool((batch == vectors[HUNGRY]).all())
            if hungry and given.kind == "killed" and run.rank > 0 and not is_new:
                os.kill(os.getpid(), signal.SIGKILL)
            if hungry and given.kind == "garbage" and most is None:
                Held()
            if hungry and (given.kind in ("garbage", "all") or (given.kind in ("one", "killed") and run.rank == 0)):
                most = most or data_bytes() + ROOM  # the same at the second try
                limit(most)
            elif not hungry:
                limit(resource.RLIM_INFINITY)
            if given.raises:
                step.backward(loss_of(batch))
            else:
                step.backward(partial(loss_of, batch))


if __name__ == "__main__":
    main()
