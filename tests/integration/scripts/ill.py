"""Training in which one worker's machine computes wrong. Prints the hash of the whole training state at the end.

    python ill.py FAULT [--run-dir DIR] [--member M] [--from-step S] [--times N] [--steps N] [--audit-interval K]

nan: losses are NaN. gradient: gradients are infinite. spike: losses and gradients are 1000 times as large. bit: the lowest
bit of one element of a gradient is flipped. In the member's next N micro-batches after step S began.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from features import Table, let_the_others_begin, print_final_state
from torch import Tensor, nn

import elastic_harness
from elastic_harness.contract import variables


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=("none", "nan", "gradient", "spike", "bit"))
    parser.add_argument("--run-dir")
    parser.add_argument("--member", default="w1-1")
    parser.add_argument("--from-step", type=int, default=5)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--health", default="{}")
    arguments = parser.parse_args()
    let_the_others_begin()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = {"max_steps": arguments.steps, "global_batch_samples": 12, "micro_batch_samples": 2, "clip_norm": 1.0}
    health = {"on_spike": "skip_step", "spike_window": 4, "spike_sigmas": 30, "spike_norm_sigmas": 30}
    config: dict[str, Any] = {"seed": 3, "training": training, "health": health | eval(arguments.health)}
    dataset = Table(48, 12)
    ill, left = os.environ.get(variables.MEMBER) == arguments.member, arguments.times
    now = False

    def changed(gradient: Tensor) -> Tensor:
        if now and arguments.fault == "gradient":
            return gradient * float("inf")
        if now and arguments.fault == "bit":
            gradient = gradient.clone()
            gradient.view(torch.int32).view(-1)[3] ^= 1
        return gradient

    model[0].weight.register_hook(changed)
    run = elastic_harness.start(model, optimizer, dataset, elastic_harness.Config.from_dict(config), run_dir=arguments.run_dir)
    for step in run.steps():
        for batch in step.micro_batches():
            now = ill and step.index >= arguments.from_step and left > 0
            left -= now
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            if now and arguments.fault in ("nan", "spike"):
                loss = loss * (float("nan") if arguments.fault == "nan" else 1000.0)
            step.backward(loss)
    print_final_state(model, {"optimizer": optimizer})


if __name__ == "__main__":
    main()
