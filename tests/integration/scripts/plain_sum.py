"""A plain PyTorch script that knows nothing of this package: adds ones up over all workers, step after step.

python plain_sum.py STEPS STEP_S
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    steps, step_s = int(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    for step in range(steps):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"step {step} world {dist.get_world_size()}", flush=True)
        time.sleep(step_s)
    print(f"finished with {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
