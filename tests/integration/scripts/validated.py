"""Validates on the way, and stops early by what that gives. Prints each value, and the state at the end.

    python validated.py [--run-dir DIR] [--steps N] [--every N] [--patience N] [--report WHO] [--wrong WHAT]

--report: in place of a shared validation these workers (all, or a member) report a value. --wrong: what the script does
wrong: raises, hangs, differs-MEMBER, conflict.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from features import Table, print_final_state, wait_for_a_joiner
from torch import nn

import elastic_harness


class Patience:
    """How often the validation was no better than the best: state, changed alike on all workers."""

    def __init__(self) -> None:
        self.best, self.worse, self.seen = math.inf, 0, []

    def note(self, step: int, value: float) -> None:
        self.seen.append([step, value.hex()])
        self.worse = 0 if value < self.best else self.worse + 1
        self.best = min(self.best, value)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "worse": self.worse, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.worse, self.seen = state["best"], state["worse"], list(state["seen"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--batches", type=int, default=7)
    parser.add_argument("--batch-s", type=float, default=0.0)
    parser.add_argument("--patience", type=int, default=99)
    parser.add_argument("--keep-best", type=int, default=0)
    parser.add_argument("--rejoin-at", type=int)
    parser.add_argument("--report")
    parser.add_argument("--wrong", default="")
    given = parser.parse_args()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    held_out = Table(8 * given.batches, 12)
    held_out.inputs += 0.1
    batches = [(held_out.inputs[i::given.batches], held_out.labels[i::given.batches]) for i in range(given.batches)]
    member = os.environ.get("ELASTIC_HARNESS_MEMBER", "w0-1")

    def measure(batch: Any) -> Any:
        if given.wrong == "raises":
            raise ArithmeticError("measured on purpose")
        if given.wrong == "hangs" and member.endswith("-1") and not member.startswith("w0"):
            time.sleep(600)
        time.sleep(given.batch_s)
        assert not model.training and not torch.is_grad_enabled()
        x, y = batch
        noise = 0.01 * torch.randn(x.shape)  # from the default generator: seeded for the batch
        loss = F.cross_entropy(model(x + noise), y)
        return loss, len(y) - int(y[0])

    every = given.every + (1 if given.wrong == f"differs-{member}" else 0)
    shared = elastic_harness.Validation(measure, batches, every) if given.report is None else None
    config = elastic_harness.Config.from_dict(
        {
            "seed": 3,
            "training": {"max_steps": given.steps, "global_batch_samples": 12, "micro_batch_samples": 2},
            "checkpoint": {
                "checkpoint_interval": 2 if not given.keep_best else 1000,
                "best_metric": "val_loss",
                "keep_best": given.keep_best,
                "keep_last": 1 if given.keep_best else 99,
            },
            "elastic": {"progress_timeout_min_s": 2.0, "first_step_timeout_s": 6.0} if given.wrong == "hangs" else {},
        }
    )
    patience = Patience()
    run = elastic_harness.start(
        model, optimizer, Table(48, 12), config, run_dir=given.run_dir, extra={"patience": patience}, validation=shared
    )
    rejoin_at = math.inf if given.rejoin_at is None else given.rejoin_at
    for step in run.steps():
        if step.index >= rejoin_at and wait_for_a_joiner(run):
            rejoin_at = math.inf
        for batch in step.micro_batches():
            step.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
        if step.validation is not None:
            patience.note(step.index, step.validation)
            if patience.worse > given.patience:
                run.stop("the validation gets no better")
        if given.report is not None and run.step % given.every == 0 and given.report in ("all", member):
            value = 1.0 + 0.25 * ((run.step // given.every) % 3)
            run.report(val_loss=value + (0.5 if given.wrong == "conflict" and run.rank == 1 else 0.0), accuracy=0.5)
    print(f"final-validation {run.validation!r}", flush=True)
    print_final_state(model, {"optimizer": optimizer, "patience": patience})


if __name__ == "__main__":
    main()
