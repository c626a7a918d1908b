"""Training whose batch changes: with the step, or with the number of workers. Prints the hash of model and optimizer at
the end.

    python batches.py [--run-dir DIR] [--slot-s SECONDS] [section.key=value ...]

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir")
    parser.add_argument("--slot-s", type=float, default=0.02)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    let_the_others_begin()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = elastic_harness.load_config(
        elastic_harness.Config, None, ["training.global_batch_samples=12", "health.audit_interval=2", *given.overrides]
    )
    dataset = Table(50, 12)
    dataset.seq_length = 1  # for budgets and schedules in tokens
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.9)
    run = elastic_harness.start(model, optimizer, dataset, config, scheduler=scheduler, run_dir=given.run_dir)
    for step in run.steps():
        for batch in step.micro_batches():
            time.sleep(given.slot_s if variables.MEMBER in os.environ else 0.0)
            step.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
    print_final_state(model, {"optimizer": optimizer})


if __name__ == "__main__":
    main()
