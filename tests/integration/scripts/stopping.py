"""Ends its run early: `--who` of the workers do so after step `--at`, by `--how`."""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
import torch.nn.functional as F
from torch import nn

import elastic_harness


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("stop", "die", "within", "break", "return", "raise", "never"), default="stop")
    parser.add_argument("--who", default="all", help="all, or a member, or a rank")
    parser.add_argument("--at", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--run-dir")
    given = parser.parse_args()
    torch.manual_seed(0)
    inputs = torch.rand(256, 2) * 2 - 1
    labels = ((inputs[:, 0] * inputs[:, 1]) > 0).long()
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    config = elastic_harness.Config.from_dict(
        {
            "training": {"max_steps": given.steps, "global_batch_samples": 64, "micro_batch_samples": 4},
            "checkpoint": {"checkpoint_interval": 5},
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = torch.utils.data.TensorDataset(inputs, labels)
    run = elastic_harness.start(model, optimizer, dataset, config, run_dir=given.run_dir)
    train(run, model, given)
    print(f"final-step {run.step}", flush=True)


def train(run: elastic_harness.train.run.Run, model: nn.Module, given: argparse.Namespace) -> None:
    for step in run.steps():
        names = ("all", str(run.rank), os.environ.get("ELASTIC_HARNESS_MEMBER"))
        mine = step.index == given.at and given.who in names
        for x, y in step.micro_batches():
            time.sleep(given.step_s / 16)
            step.backward(F.cross_entropy(model(x), y))
            if mine and given.how == "within":
                run.stop("enough")
        if mine and given.how in ("stop", "die"):
            run.stop("enough")
        if mine and given.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if mine and given.how == "break":
            break
        if mine and given.how == "return":
            return
        if mine and given.how == "raise":
            raise ArithmeticError("on purpose")


if __name__ == "__main__":
    main()
