"""Training in which one worker is slower than the others. Prints the hash of the whole training state at the end.

    python uneven.py [--run-dir DIR] [--times T] [--from-step S] [--how HOW[,HOW]] [--unasked] [--steps N] [KEY=VALUE]

Its micro-batches take T times as long from step S on. --how: computing, reading or processor. Of several each lasts
for SPELL steps, and then for as long nothing is slow. --unasked: that worker does not want lanes to be dealt by speed.
Under plain python nothing waits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from features import Table, let_the_others_begin, print_final_state
from torch import nn

import elastic_harness
from elastic_harness.contract import variables

SLOW = "w1-1"
SLOT_S = 0.03
SPELL = 7


class SlowTable(Table):
    """Its samples take `wait_s` to read."""

    wait_s = 0.0

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.wait_s)
        return super().__getitem__(index)


class Hogs:
    """Programs that want the one processor which this process then has."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._before = os.sched_getaffinity(0)

    def run(self, wanted: bool) -> None:
        if wanted and not self._running:
            os.sched_setaffinity(0, {min(self._before)})
            self._running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        elif self._running and not wanted:
            for hog in self._running:
                hog.kill()
                hog.wait()
            self._running = []
            os.sched_setaffinity(0, self._before)


def compute_for(seconds: float) -> None:
    """Run on the processor for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def hindrance(hows: list[str], since: int) -> str | None:
    """What hinders the slow worker, so many steps after the first hindrance."""
    if len(hows) == 1:
        return hows[0] if since >= 0 else None
    spells = [each for how in hows for each in (how, None)]
    return spells[since // SPELL] if 0 <= since < SPELL * len(spells) else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir")
    parser.add_argument("--times", type=float, default=1.0)
    parser.add_argument("--from-step", type=int, default=3)
    parser.add_argument("--how", default="computing")
    parser.add_argument("--unasked", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--slot-s", type=float, default=SLOT_S)
    parser.add_argument("overrides", nargs="*")
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
        *given.overrides,
    ]
    config = elastic_harness.load_config(elastic_harness.Config, None, overrides)
    data, hows = SlowTable(48, 12), given.how.split(",")
    run = elastic_harness.start(model, optimizer, data, config, run_dir=given.run_dir)
    hogs = Hogs()
    for step in run.steps():
        how = hindrance(hows, step.index - given.from_step) if slow else None
        hogs.run(how == "processor")
        data.wait_s = (given.times - 1) * given.slot_s if how == "reading" else 0.0
        for batch in step.micro_batches():
            if how == "processor":
                compute_for(given.slot_s)
            elif waits:
                time.sleep(given.slot_s * (given.times if how == "computing" else 1.0))
            step.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
    hogs.run(False)
    print_final_state(model, {"optimizer": optimizer})


if __name__ == "__main__":
    main()
