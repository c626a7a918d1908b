"""The script of emulated.py, in which a worker hangs where its loss is computed, on command: as soon as a file
FOLDER/PID with the kind exists. The worker writes into FOLDER/PID.began when that began.

Between steps it does what takes long in real runs, if asked: the first step compiles for a while, all workers evaluate
now and then, and some slots take longer than others.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import elastic_harness
from benchmarks.common import ROOT
from benchmarks.emulated import Numbers, Waiting
from elastic_harness.config import Config, load_config

sys.path.append(str(ROOT / "tests" / "integration"))

from ways_to_hang import HANGS

KINDS = {"endless loop": "loop", "lock held in C": "lock", "blocked read": "read"}


class Hanging(Waiting):
    """A model that waits `slot_s`, or longer: some slots up to `uneven` times as long, the first one of a process by
    `compile_s`."""

    def __init__(self, slot_s: float, folder: Path, compile_s: float, uneven: float) -> None:
        super().__init__(slot_s)
        self.command = folder / str(os.getpid())
        self.compile_s, self.uneven = compile_s, uneven

    def forward(self, x: Tensor) -> Tensor:
        if self.command.exists():
            kind = self.command.read_text()
            self.command.with_suffix(".began").write_text(repr(time.time()))
            HANGS[KINDS[kind]]()
        time.sleep(self.compile_s + self.slot_s * (self.uneven - 1.0) * random.SystemRandom().random() ** 8)
        self.compile_s = 0.0
        out: Tensor = super().forward(x)
        return out


def main() -> None:
    """Train until max_steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--slot-s", type=float, default=0.06)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--compile-s", type=float, default=0.0)
    parser.add_argument("--uneven", type=float, default=1.0)
    parser.add_argument("--evaluate-every", type=int, default=0, help="steps; 0: never")
    parser.add_argument("--evaluate-s", type=float, default=0.0)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = load_config(Config, args.config, args.overrides)
    model = Hanging(args.slot_s, args.folder, args.compile_s, args.uneven)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = elastic_harness.start(model, optimizer, Numbers(), config)
    for step in run.steps():
        for batch in step.micro_batches():
            step.backward(model(batch))
        if args.evaluate_every and (step.index + 1) % args.evaluate_every == 0:
            time.sleep(args.evaluate_s)


if __name__ == "__main__":
    main()
