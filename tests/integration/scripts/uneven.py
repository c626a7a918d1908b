"""Training in which one worker is slower than the others. Prints the hash of the whole training state at the end.

    python uneven.py [--run-dir DIR] [--times T] [--from-step S] [--unasked] [--steps N]

Its micro-batches take T times as long from step S on. --unasked: that worker does not want lanes to be dealt by speed.
Under plain python nothing waits.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn.functional as F
from features import Table, let_the_others_begin, print_final_state
from torch import nn

import elastic_harness
from elastic_harness.contract import variables

SLOW = "w1-1"
SLOT_S = 0.03


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir")
    parser.add_argument("--times", type=float, default=1.0)
    parser.add_argument("--from-step", type=int, default=3)
    parser.add_argument("--unasked", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    let_the_others_begin()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    member = os.environ.get(variables.MEMBER)
    slow, waits = member == SLOW, member is not None
    overrides = [
        f"training.max_steps={given.steps}",
        "training.global_batch_samples=16",
        "elastic.progress_timeout_min_s=0.5",
        f"elastic.deal_by_speed={not (given.unasked and slow)}".lower(),
        "health.audit_interval=0",
    ]
    config = elastic_harness.load_config(elastic_harness.Config, None, overrides)
    run = elastic_harness.start(model, optimizer, Table(48, 12), config, run_dir=given.run_dir)
    for step in run.steps():
        slot_s = SLOT_S * (given.times if slow and step.index >= given.from_step else 1.0)
        for batch in step.micro_batches():
            time.sleep(slot_s if waits else 0.0)
            step.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
    print_final_state(model, {"optimizer": optimizer})


if __name__ == "__main__":
    main()
