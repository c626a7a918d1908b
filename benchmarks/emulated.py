"""A script with its own model and loop whose slots wait instead of computing.

On one small machine survivors inherit the dead worker's share of the CPU; slots that only wait do not.
So this shows what a cluster would see: after a loss each survivor has W/(W-1) times the work.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elastic_harness
from elastic_harness.config import Config, load_config
from elastic_harness.contract import variables

PARAMETERS = 2_700_000
TENSORS = 36


class Waiting(nn.Module):
    """About as many parameters as the real workload; forward waits `slot_s` and touches all of them once."""

    def __init__(self, slot_s: float) -> None:
        super().__init__()
        self.slot_s = slot_s
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(PARAMETERS // TENSORS, generator=generator)) for _ in range(TENSORS)
        )

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.slot_s)
        return torch.stack([(w * x.mean()).mean() for w in self.weights]).mean()


class Numbers(Dataset[Tensor]):
    """Sample i is a number that depends on i alone."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([1.0 + index % 97])


def main() -> None:
    """Train until max_steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--slot-s", type=float, default=0.06)
    parser.add_argument("--slow-member", help="a worker whose slots take --slow-times as long from step --slow-from on")
    parser.add_argument("--slow-times", type=float, default=2.0)
    parser.add_argument("--slow-from", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = load_config(Config, args.config, args.overrides)
    model = Waiting(args.slot_s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = elastic_harness.start(model, optimizer, Numbers(), config)
    slow = args.slow_member is not None and os.environ.get(variables.MEMBER) == args.slow_member
    for step in run.steps():
        if slow and step.index >= args.slow_from:
            model.slot_s = args.slow_times * args.slot_s
        for batch in step.micro_batches():
            step.backward(model(batch))


if __name__ == "__main__":
    main()
