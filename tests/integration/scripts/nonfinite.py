"""Training in which something is not finite. Prints the hash of the whole training state at the end.

    python nonfinite.py KIND [--run-dir DIR] [--steps N] [--rejoin-at STEP] [--max-in-a-row N] [--answer A]
        [--omit LIST]

sample: the inputs of one sample are NaN, so the loss of its slot is, and the statistics that forward makes of it.
gradient: at one step a gradient is NaN though its loss is finite; without clipping. scaled: as sample, with a
GradScaler whose scale is too large at first. ever: from one step on every loss is infinite. spike: at one step every
loss is 100 times as large.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from features import Table, let_the_others_begin, print_final_state, wait_for_a_checkpoint, wait_for_a_joiner
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elastic_harness
from elastic_harness.runs.origin import versions_in

BAD_STEP, BAD_SAMPLE, SPIKE_STEP, FIRST_SAVED = 5, 17, 8, 2


def loss_of(kind: str, model: nn.Module, step: int, batch: dict[str, Any]) -> Tensor:
    with torch.autocast("cpu", torch.float16, enabled=kind == "scaled"):
        logits = model(batch["x"]).float()
    loss = F.cross_entropy(logits, batch["y"])
    if kind == "gradient" and step == BAD_STEP:
        return loss + (logits * 0).square().sum().sqrt()  # 0, whose derivative is infinity times 0
    if kind == "spike" and step == SPIKE_STEP:
        return loss * 100
    return loss * float("inf") if kind == "ever" and step >= BAD_STEP else loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("sample", "gradient", "scaled", "ever", "spike"))
    parser.add_argument("--run-dir")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rejoin-at", type=int)
    parser.add_argument("--max-in-a-row", type=int, default=10)
    parser.add_argument("--answer", default="skip_step")
    parser.add_argument("--omit", default="", help="training.omit")
    arguments = parser.parse_args()
    let_the_others_begin()
    kind = arguments.kind
    torch.manual_seed(11)
    dataset = Table(48, 12)
    if kind in ("sample", "scaled"):
        dataset.inputs[BAD_SAMPLE] = float("nan")
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=40)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    parts: dict[str, Any] = {"scheduler": scheduler, "ema": ema}
    if kind == "scaled":
        parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    training = {
        "max_steps": arguments.steps,
        "global_batch_samples": 12,
        "micro_batch_samples": 2,
        "clip_norm": None if kind == "gradient" else 1.0,
        "nonfinite_steps_max": arguments.max_in_a_row,
        "omit": arguments.omit,
    }
    health: dict[str, Any] = {"on_nonfinite": arguments.answer, "rollback_steps": 2, "omit_steps": 4}
    if kind == "spike":
        health |= {"on_spike": arguments.answer, "spike_sigmas": 50, "spike_norm_sigmas": None, "spike_window": 8}
        health["on_nonfinite"] = "skip_step"
    config = elastic_harness.Config.from_dict(
        {
            "seed": 3,
            "training": training,
            "checkpoint": {"checkpoint_interval": FIRST_SAVED, "keep_last": 9 if arguments.answer == "rollback" else 1},
            "health": health,
        }
    )
    run = elastic_harness.start(model, optimizer, dataset, config, run_dir=arguments.run_dir, **parts)
    rejoin_at = math.inf if arguments.rejoin_at is None else arguments.rejoin_at
    for step in run.steps():
        if step.index >= rejoin_at and wait_for_a_joiner(run):
            rejoin_at = math.inf
        if arguments.answer == "rollback" and step.index == FIRST_SAVED + 1:
            wait_for_a_checkpoint(run)
        if kind == "ever" and step.index > BAD_STEP and max(versions_in(run.run_dir), default=0) <= BAD_STEP:
            time.sleep(1.0)  # for the writer; it is as a rule through long before
        for batch in step.micro_batches():
            step.backward(loss_of(kind, model, step.index, batch))
    tensors = print_final_state(model, {"optimizer": optimizer, **parts})
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


if __name__ == "__main__":
    main()
