"""A small training in which some work takes far longer than all other, whichever worker does it.

python slow.py KIND [--seconds S] [--longest-s S] [--run-dir DIR]

    forward   the forward of one sample (a long document)
    work      that, reading another sample, and the code after one step (an evaluation)
    compile   the last, shorter micro-batch of an epoch: torch.compile calls its (made-up) compiler for another shape
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

import elastic_harness

STEPS, BATCH = {"forward": 10, "work": 10, "compile": 150}, 8
SLOW_READ, SLOW_FORWARD, SLOW_STEP = 17, 21, 5


class Samples:
    """Random vectors, one of which takes its time to be read."""

    def __init__(self, samples: int, seconds: float) -> None:
        self.vectors = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds if index == SLOW_READ else 0)
        return self.vectors[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=tuple(STEPS))
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--longest-s", type=float, default=30.0)
    parser.add_argument("--run-dir")
    given = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    compiles, steps = given.kind == "compile", STEPS[given.kind]
    elsewhere_s = given.seconds if given.kind == "work" else 0.0
    dataset = Samples(BATCH * (steps - 1) + 2, elsewhere_s)  # the last step has 2 samples, one short micro-batch
    config = elastic_harness.Config.from_dict(
        {
            "training": {
                "max_steps": steps,
                "global_batch_samples": BATCH,
                "micro_batch_samples": 4 if compiles else 1,
            },
            "elastic": {
                "progress_timeout_min_s": 0.5,
                "progress_timeout_max_s": given.longest_s,
                "first_step_timeout_s": 10 * given.longest_s,
            },
        }
    )

    def compiler(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        time.sleep(given.seconds if any(len(tensor) == 2 for tensor in inputs) else 0)
        return module.forward

    forward = torch.compile(model, dynamic=False, backend=compiler) if compiles else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = elastic_harness.start(model, optimizer, dataset, config, run_dir=given.run_dir)
    for step in run.steps():
        for batch in step.micro_batches():
            if not compiles and bool((batch == dataset.vectors[SLOW_FORWARD]).all()):
                time.sleep(given.seconds)
            step.backward((forward(batch).sum(1) - batch.sum(1)).pow(2).mean())
        if step.index == SLOW_STEP:
            time.sleep(elsewhere_s)


if __name__ == "__main__":
    main()
