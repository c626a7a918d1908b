"""Own model, own loop: one case per group of features. Prints the hash of the whole training state at the end.

    python features.py CASE [--run-dir DIR] [--steps N] [--rejoin-at STEP] [--checkpoint-every STEPS]

`--rejoin-at`: before this step, or a later one, wait until the coordinator has announced a generation with a member
that was not there at the start, so that a joiner takes over the state of a run in full swing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elastic_harness
from elastic_harness.checkpoint.tensors import content_of
from elastic_harness.contract import variables
from elastic_harness.runs.events import read_events
from elastic_harness.runs.origin import versions_in
from elastic_harness.train.state import Registry, weights_sha256

WAIT_S = 120.0


@dataclass
class Case:
    """What one training script would build. `loss(model, batch)` gives the mean loss, or it and a weight."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    loss: Callable[[nn.Module, Any], Any]
    training: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    after: Callable[[elastic_harness.train.run.Run, float], None] = lambda run, loss: None  # type: ignore[name-defined]


class Table:
    """A map-style dataset of (features, label) pairs."""

    def __init__(self, samples: int, *shape: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(samples, *shape, generator=generator)
        self.labels = torch.randint(0, 4, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.inputs[index], "y": self.labels[index], "index": index}


class Augmented(Table):
    """Draws random numbers when an item is read, as augmentations do."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        return {**item, "x": item["x"] + 0.1 * torch.randn(item["x"].shape)}


class Texts:
    """A map-style dataset of token sequences of different lengths."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(6)
        lengths = torch.randint(3, 9, (samples,), generator=generator).tolist()
        self.texts = [torch.randint(1, 17, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]


def classify(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


# ---- the cases


def plain() -> Case:
    """Dropout, a frozen layer, Nesterov, a step schedule, random augmentation, epochs with a short tail."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3)),
        nn.Linear(16, 128),
        nn.Sequential(nn.Linear(128, 128), nn.Tanh()),
        nn.Linear(128, 4),
    )
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return Case(
        model,
        optimizer,
        Augmented(21, 12),
        classify,
        {"global_batch_samples": 8, "micro_batch_samples": 2},
        {"scheduler": scheduler},
    )


class Counting(nn.Module):
    """Counts in a buffer by assignment, averages in another in place, and keeps a cache that is not state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.register_buffer("constant", torch.full((3,), 0.5))
        self.cache: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
            self.scale.mul_(0.9).add_(x.detach().std((0, 2, 3)), alpha=0.1)
            self.seen += 1
        return (x - self.mean[:, None, None] * self.constant[:, None, None]) / (0.5 + self.scale[:, None, None])


def convolution() -> Case:
    """Batch norm, declared buffers (assigned, in place, not persistent, integer), AdamW, one-cycle, EMA; 5 slots."""
    model = nn.Sequential(
        Counting(),
        nn.Conv2d(3, 32, 3),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.BatchNorm2d(64, momentum=None),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 4),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=40)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return Case(
        model,
        optimizer,
        Table(47, 3, 7, 7),
        classify,
        {"global_batch_samples": 20, "micro_batch_samples": 4, "clip_norm": None},
        {"scheduler": scheduler, "ema": ema, "buffers": ["0.mean", "0.seen", "0.scale"]},
    )


class Routed(nn.Module):
    """Tied embeddings; experts chosen by the batch, so that some have no gradient in a slot, and one never has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 64, padding_idx=0)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.unused = nn.Linear(64, 64)
        self.head = nn.Linear(64, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.experts[int(tokens.sum()) % 4](x))


def pad(texts: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)


def padded_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    targets = tokens[:, 1:]
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=0)
    return loss, int((targets != 0).sum()) / 16


def text() -> Case:
    """Tied weights, parameters without gradient in some or all slots, bf16 autocast, a collate function, weights by
    tokens, Adam; fewer slots than workers."""
    model = Routed()
    return Case(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.01),
        Texts(19),
        padded_loss,
        {"global_batch_samples": 4, "micro_batch_samples": 2},
        {"collate_fn": pad},
    )


class Tally:
    """Further state of the user's own, changed after every commit alike on all workers."""

    def __init__(self) -> None:
        self.smooth, self.history, self.total = float("inf"), [], torch.zeros(())

    def add(self, loss: float) -> None:
        self.smooth = min(self.smooth, 0.5 * loss + 0.5 * min(self.smooth, 9.0))
        self.history.append(("loss", loss))
        self.total += loss

    def state_dict(self) -> dict[str, Any]:
        return {"smooth": self.smooth, "history": self.history, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.smooth, self.history, self.total = state["smooth"], list(state["history"]), state["total"].clone()


def half(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        logits = model(batch["x"])
    return F.cross_entropy(logits.float(), batch["y"])


def scaled() -> Case:
    """A gradient scaler that overflows at first and grows later, fp16 autocast, RMSprop, several slots to a lane, a
    further object with state."""
    model = nn.Sequential(nn.Linear(12, 128), nn.GELU(), nn.Linear(128, 128), nn.Dropout(0.1), nn.Linear(128, 4))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, centered=True)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        ],
        [3],
    )
    tally = Tally()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    return Case(
        model,
        optimizer,
        Table(50, 12),
        half,
        {"global_batch_samples": 14, "micro_batch_samples": 2, "lanes": 3},
        {"scheduler": scheduler, "scaler": scaler, "extra": {"tally": tally}},
        lambda run, loss: tally.add(loss),
    )


class Described(nn.Linear):
    """Gives more than tensors to its state_dict."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"made_by": "features", "scales": [-0.0, torch.ones(2, dtype=torch.float16)]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert repr(state) == repr(self.get_extra_state())


def mixed() -> Case:
    """float64 and bfloat16 parameters in one model, NAdam, whose scalars are float32 all the same, extra state of a
    module, more slots than samples left in an epoch."""
    first, last = Described(12, 16, dtype=torch.bfloat16), nn.Linear(16, 4, dtype=torch.float64)
    model = nn.ModuleList([first, last])

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        hidden = torch.tanh(first(batch["x"].bfloat16()))
        return F.cross_entropy(last(hidden.double()), batch["y"])

    return Case(
        model,
        torch.optim.NAdam(model.parameters(), lr=0.05),
        Table(11, 12),
        loss,
        {"global_batch_samples": 8, "micro_batch_samples": 1},
    )


def unfreezing() -> Case:
    """Layers that start frozen and are trained from a step on, another that is frozen then, batch norm that stops."""
    model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    model[0].requires_grad_(False)

    def before_step(step: int) -> None:
        model[0].requires_grad_(step >= 3)
        model[4].requires_grad_(step < 7)
        model[1].train(step < 5)

    return Case(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
        Table(30, 12),
        classify,
        {"global_batch_samples": 8, "micro_batch_samples": 2},
        {"before_step": before_step},
    )


CASES = {c.__name__: c for c in (plain, convolution, text, scaled, mixed, unfreezing)}


# ---- the loop


def let_the_others_begin() -> None:
    """A spare waits until there is a generation: faults name members of the first one."""
    place, _, _ = os.environ.get(variables.MEMBER, "w0-1").removeprefix("w").partition("-")
    if int(place) >= int(os.environ.get("WORLD_SIZE", "1")):
        events = Path(os.environ[variables.RUN_DIR]) / "events.jsonl"
        while not any(event["event"] == "generation" for event in read_events(events)):
            threading.Event().wait(0.01)


def wait_for_a_joiner(run: Any) -> bool:
    """Until a newer generation with an as yet unknown member is announced: this step's end is where it joins. False if
    one without has been announced and not formed: who joins is decided after that, so this step must go on first."""
    for _ in range(int(WAIT_S / 0.01)):
        events = list(read_events(run.run_dir / "events.jsonl"))
        generations = [event for event in events if event["event"] == "generation"]
        first, newest = generations[0], generations[-1]
        if set(newest["members"]) - set(first["members"]):
            return True
        if not any(event["event"] == "recovery" and event["generation"] == newest["number"] for event in events):
            return False
        threading.Event().wait(0.01)
    raise TimeoutError(f"nobody joined within {WAIT_S} s")


def wait_for_a_checkpoint(run: Any) -> None:
    """Until one is on disk. On a loaded machine the first steps are done before that, and then a run that goes back has
    none from before."""
    for _ in range(int(WAIT_S / 0.01)):
        if versions_in(run.run_dir):
            return
        threading.Event().wait(0.01)
    raise TimeoutError(f"no checkpoint was saved within {WAIT_S} s")


def print_final_state(model: nn.Module, others: dict[str, Any]) -> dict[str, Tensor]:
    """Print a hash of the weights, and of the whole state one of all tensors and one of all other values; return the
    tensors."""
    skeleton, tensors = Registry(model, others).capture()
    values = hashlib.sha256(json.dumps(skeleton, sort_keys=True).encode()).hexdigest()
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(content_of(tensors[name]))
    print("final-weights", weights_sha256(model), flush=True)
    print("final-state", digest.hexdigest(), values, flush=True)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--run-dir")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rejoin-at", type=int)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    arguments = parser.parse_args()
    let_the_others_begin()
    torch.manual_seed(11)
    case = CASES[arguments.case]()
    config = elastic_harness.Config.from_dict(
        {
            "seed": 3,
            "training": {"max_steps": arguments.steps, **case.training},
            "checkpoint": {"checkpoint_interval": arguments.checkpoint_every},
        }
    )
    run = elastic_harness.start(
        case.model, case.optimizer, case.dataset, config, run_dir=arguments.run_dir, **case.more
    )
    rejoin_at = math.inf if arguments.rejoin_at is None else arguments.rejoin_at
    for step in run.steps():
        if step.index >= rejoin_at and wait_for_a_joiner(run):
            rejoin_at = math.inf
        for batch in step.micro_batches():
            result = case.loss(case.model, batch)
            step.backward(*(result if isinstance(result, tuple) else (result,)))
        case.after(run, step.loss)
    stateful = {k: v for k, v in case.more.items() if k in ("scheduler", "scaler", "ema")}
    print_final_state(case.model, {"optimizer": case.optimizer, **stateful, **case.more.get("extra", {})})


if __name__ == "__main__":
    main()
