"""A small network with a dropout layer, momentum and a schedule, under the settings that the command line gives.

    python settings.py [--run-dir DIR] [--steps N] [--lr LR] [--batch N] [--resume-from RUN] [--weights-only]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from features import Table
from torch import nn

import elastic_harness

parser = argparse.ArgumentParser()
parser.add_argument("--run-dir")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--every", type=int, default=3)
parser.add_argument("--no-schedule", action="store_true")
parser.add_argument("--resume-from")
parser.add_argument("--weights-only", action="store_true")
given = parser.parse_args()

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9)
config = elastic_harness.Config.from_dict(
    {
        "training": {
            "max_steps": given.steps,
            "global_batch_samples": given.batch,
            "micro_batch_samples": 2,
            "lanes": given.batch // 2,
        },
        "checkpoint": {"checkpoint_interval": given.every},
    }
)
run = elastic_harness.start(
    model,
    optimizer,
    Table(50, 8),
    config,
    scheduler=None if given.no_schedule else torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    run_dir=given.run_dir,
    resume_from=given.resume_from,
    weights_only=given.weights_only,
)
for step in run.steps():
    for batch in step.micro_batches():
        step.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
