"""A small network whose loss is another one in the last bits in one slot, if the environment says so.

    PLANTED="slot 3 of step 5" python one_bit.py [--lr LR] [--fail-at STEP] [--steps N] [--every N]
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from features import Table
from torch import nn

import elastic_harness

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--every", type=int, default=4)
given = parser.parse_args()

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9)
config = elastic_harness.Config.from_dict(
    {
        "training": {"max_steps": given.steps, "global_batch_samples": 24, "micro_batch_samples": 3},
        "checkpoint": {"checkpoint_interval": given.every},
    }
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
run = elastic_harness.start(model, optimizer, Table(60, 8), config, scheduler=scheduler)
for step in run.steps():
    for batch in step.micro_batches():
        if step.index == given.fail_at:
            raise RuntimeError("as the command line says")
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        planted = run._engine.slots.where() == os.environ.get("PLANTED")
        step.backward(loss * (1 + 2**-20) if planted else loss)
print("final-code-ran", flush=True)
