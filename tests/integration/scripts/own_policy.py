"""Training with an update policy of its own. Prints the hash of the whole training state at the end.

    python own_policy.py KIND [--run-dir DIR] [--steps N] [--rejoin-at STEP] [--times X]

spikes: the loss of one sample is large; the policy scales such updates, and skips the one of step 9. stop: it stops the
run at step 6. rank: it decides otherwise in another process. health: there is no policy but `health.on_spike`. none:
there is no policy.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from features import Table, let_the_others_begin, print_final_state, wait_for_a_joiner
from torch import nn

import elastic_harness
from elastic_harness.policies import Apply, Halt, Skip, State, StepFacts, Verdict

SPIKE = 17


@dataclass(frozen=True)
class TameSpikes:
    kind: str
    times: float = 1.5
    name: ClassVar[str] = "tame_spikes"

    def begin(self) -> State:
        return {"usual": None, "window": ()}

    def before_apply(self, state: State, facts: StepFacts) -> tuple[State, Verdict]:
        usual = state["usual"] or facts.grad_norm
        window = (*state["window"][-4:], facts.loss)
        if self.kind == "rank" and facts.step == 4:
            return {"usual": float(os.getpid()), "window": window}, Apply()
        if self.kind == "stop" and facts.step == 6:
            return state, Halt("enough is known", {"loss": facts.loss})
        if self.kind == "spikes" and facts.step == 9:
            return {"usual": usual, "window": window}, Skip("step 9 is never applied")
        if facts.grad_norm > self.times * usual:
            said = f"the norm is {facts.grad_norm:.3g}, usual is {usual:.3g}"
            return {"usual": usual, "window": window}, Apply(usual / facts.grad_norm, said, {"usual": usual})
        return {"usual": 0.5 * usual + 0.5 * facts.grad_norm, "window": window}, Apply()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("spikes", "stop", "rank", "health", "none"))
    parser.add_argument("--run-dir")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rejoin-at", type=int)
    parser.add_argument("--times", type=float, default=1.5)
    arguments = parser.parse_args()
    let_the_others_begin()
    torch.manual_seed(11)
    watched = arguments.kind == "health"
    dataset = Table(192 if watched else 48, 12)  # then each sample comes once
    dataset.inputs[SPIKE] *= 30
    if watched:
        dataset.inputs[[60, 100, 140]] *= 300
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = {"max_steps": arguments.steps, "global_batch_samples": 12, "micro_batch_samples": 2, "clip_norm": None}
    health = {"on_spike": "skip_step", "spike_sigmas": 3, "spike_norm_sigmas": 3, "spike_window": 8} if watched else {}
    config = elastic_harness.Config.from_dict(
        {"seed": 3, "training": training, "checkpoint": {"checkpoint_interval": 2}, "health": health}
    )
    policies = [] if arguments.kind in ("health", "none") else [TameSpikes(arguments.kind, arguments.times)]
    run = elastic_harness.start(model, optimizer, dataset, config, run_dir=arguments.run_dir, policies=policies)
    rejoin_at = math.inf if arguments.rejoin_at is None else arguments.rejoin_at
    for step in run.steps():
        if step.index >= rejoin_at and wait_for_a_joiner(run):
            rejoin_at = math.inf
        for batch in step.micro_batches():
            step.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
    print_final_state(model, {"optimizer": optimizer})


if __name__ == "__main__":
    main()
