"""What people do in training loops, one habit each, to be run on one worker and on two.

A habit changes one thing of an ordinary script: how the model is built, what happens before the first step, before a
step, in a slot, or after a step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import elastic_harness
from elastic_harness.errors import HarnessError
from elastic_harness.train.state import weights_sha256
from unit.ranks import Here

STEPS, SLOTS = 3, 6
EVERY = range(STEPS)


class Net(nn.Module):
    """Embedding, batch norm, dropout, and a head."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, **embedding)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.25))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)))


class OwnGenerator(nn.Module):
    """Dropout from a generator of its own, which goes on from slot to slot."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        generator = torch.Generator().manual_seed(0)
        self.draw = lambda shape: torch.rand(shape, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden * (self.draw(hidden.shape) > 0.2))


class Script:
    """The script of a habit while it runs."""

    def __init__(self, habit: Habit) -> None:
        torch.manual_seed(7)
        self.model = habit.model()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.ema = AveragedModel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.data = torch.randint(0, 16, (20, 3), generator=torch.Generator().manual_seed(3))
        self.run: Any = None

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.model(batch.flatten()), batch.flatten().roll(1))


Act = Callable[[Script], None]
InSlot = Callable[[Script, Any, Tensor], None]


def ordinary(script: Script, step: Any, batch: Tensor) -> None:
    step.backward(script.loss(batch))


@dataclass(frozen=True)
class Habit:
    """says: what the error tells, or None: both numbers of workers end with the same weights."""

    says: str | None
    slot: InSlot = ordinary
    model: Callable[[], nn.Module] = Net
    build: Act = lambda script: None  # before start
    after_start: Act = lambda script: None
    before_step: Act = lambda script: None
    after_step: Act = lambda script: None
    more: Callable[[Script], dict[str, Any]] = lambda script: {}
    training: dict[str, Any] | None = None


def when(step: int, act: Act) -> Act:
    """Do it once, after or before this step."""
    return lambda script: act(script) if script.run.step == step else None


def on_rank_0(act: Act) -> Act:
    return lambda script: act(script) if script.run.rank == 0 else None


def before(act: Act) -> InSlot:
    """In every slot, before the forward."""

    def slot(script: Script, step: Any, batch: Tensor) -> None:
        act(script)
        ordinary(script, step, batch)

    return slot


def after(act: Act) -> InSlot:
    """In every slot, after the backward."""

    def slot(script: Script, step: Any, batch: Tensor) -> None:
        ordinary(script, step, batch)
        act(script)

    return slot


def own_backward(script: Script, step: Any, batch: Tensor) -> None:
    script.loss(batch).backward()


def both_backwards(script: Script, step: Any, batch: Tensor) -> None:
    loss = script.loss(batch)
    loss.backward(retain_graph=True)
    step.backward(loss)


def scaled_by_hand(script: Script, step: Any, batch: Tensor) -> None:
    step.backward(script.loss(batch) * 8.0)


def fails_once(error: Exception) -> type[torch.autograd.Function]:
    """Identity whose backward fails the first time."""

    class Fails(torch.autograd.Function):
        failed = False

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            if not Fails.failed:
                Fails.failed = True
                raise error
            return gradient

    return Fails


Fails, RunsOut = fails_once(ArithmeticError("planted")), fails_once(MemoryError("planted"))


def loss_through(kind: type[torch.autograd.Function], script: Script, batch: Tensor) -> Tensor:
    hidden = kind.apply(script.model.embedding(batch.flatten()))  # type: ignore[no-untyped-call]
    return F.cross_entropy(script.model.head(script.model.body(hidden)), batch.flatten())


def retried_backward(script: Script, step: Any, batch: Tensor) -> None:
    try:
        step.backward(loss_through(Fails, script, batch))
    except ArithmeticError:
        step.backward(loss_through(Fails, script, batch))


def backward_without_memory(script: Script, step: Any, batch: Tensor) -> None:
    step.backward(loss_through(RunsOut, script, batch))


def without_gradients(script: Script, step: Any, batch: Tensor) -> None:
    with torch.no_grad():
        loss = script.loss(batch)
    step.backward(loss)


def skipped(script: Script, step: Any, batch: Tensor) -> None:
    if int(batch.sum()) % 5 == 0:
        return
    ordinary(script, step, batch)


def batch_in_place(script: Script, step: Any, batch: Tensor) -> None:
    batch.add_(1).remainder_(16)
    ordinary(script, step, batch)


class Shared:
    """A dataset that hands out its own memory: views of it, or whole tensors."""

    def __init__(self, data: Tensor, views: bool) -> None:
        self.data = data if views else [row[None].clone() for row in data]
        self.views = views

    def __len__(self) -> int:
        return len(self.data)

    def read(self, ids: Any) -> Tensor:
        at = int(ids[0])
        return self.data[at : at + 1] if self.views else self.data[at]  # type: ignore[return-value]

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "shared"}


def views(script: Script) -> None:
    script.data = Shared(script.data, views=True)  # type: ignore[assignment]


def whole_tensors(script: Script) -> None:
    script.data = Shared(script.data, views=False)  # type: ignore[assignment]


def parameters(script: Script) -> list[nn.Parameter]:
    return list(script.model.parameters())


def scale_weights(script: Script) -> None:
    with torch.no_grad():
        torch._foreach_mul_(parameters(script), 0.99)


def scale_data(script: Script) -> None:
    for parameter in parameters(script):
        parameter.data.mul_(0.99)


def clip_data(script: Script) -> None:
    for parameter in parameters(script):
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-4, 1e-4)


def evaluate(script: Script) -> None:
    script.model.eval()
    with torch.no_grad():
        script.model(torch.arange(16))


def evaluate_and_back(script: Script) -> None:
    evaluate(script)
    script.model.train()


def evaluate_in_training_mode(script: Script) -> None:
    with torch.no_grad():
        script.model(torch.arange(16))


def freeze(script: Script) -> None:
    script.model.embedding.requires_grad_(False)


def frozen_embedding(script: Script) -> None:
    script.model.embedding.requires_grad_(False)
    script.optimizer = torch.optim.AdamW([p for p in parameters(script) if p.requires_grad], lr=0.02)


def new_head(script: Script) -> None:
    script.model.head = nn.Linear(8, 16)


def tie(script: Script) -> None:
    script.model.head.weight = script.model.embedding.weight


def halve_lr(script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] *= 0.5


def reload(script: Script) -> None:
    script.model.load_state_dict({k: v * 0.99 for k, v in script.model.state_dict().items() if v.is_floating_point()},
                                 strict=False)


def reload_optimizer(script: Script) -> None:
    if script.optimizer.state:
        script.optimizer.load_state_dict(script.optimizer.state_dict())


def add_group(script: Script) -> None:
    script.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def doubling_hook(script: Script) -> None:
    for parameter in parameters(script):
        parameter.register_hook(lambda gradient: gradient * 2)


def accumulated_hook(script: Script) -> None:
    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-4, 1e-4)

    for parameter in parameters(script):
        parameter.register_post_accumulate_grad_hook(clamp)


def clamp_after_updates(script: Script) -> None:
    def clamp(optimizer: Any, arguments: Any, keywords: Any) -> None:
        with torch.no_grad():
            for parameter in parameters(script):
                parameter.clamp_(-0.3, 0.3)

    script.optimizer.register_step_post_hook(clamp)


def own_scaler(script: Script, step: Any, batch: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step.backward(scaler.scale(script.loss(batch)))
    scaler.unscale_(script.optimizer)


def sync_norm() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(Net())


def distributed() -> nn.Module:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(Net())


def clip(script: Script) -> None:
    nn.utils.clip_grad_norm_(script.model.parameters(), 0.1)


HABITS = {
    "ordinary": Habit(None),
    # gradients
    "zero_grad before backward": Habit(None, before(lambda s: s.optimizer.zero_grad())),
    "zero_grad before backward, to zeros": Habit(None, before(lambda s: s.optimizer.zero_grad(set_to_none=False))),
    "zero_grad before a step": Habit(None, before_step=lambda s: s.optimizer.zero_grad()),
    "zero_grad after a step": Habit(None, after_step=lambda s: s.optimizer.zero_grad()),
    "zero_grad after backward": Habit("gradient", after(lambda s: s.optimizer.zero_grad())),
    "zero_grad after backward, to zeros": Habit("gradient", after(lambda s: s.optimizer.zero_grad(set_to_none=False))),
    "clip_grad_norm_": Habit("training.clip_norm", after(clip)),
    "clamp of grad.data": Habit("gradient", after(clip_data)),
    "loss.backward()": Habit("step.backward", own_backward),
    "loss.backward(retain_graph=True) as well": Habit("step.backward", both_backwards),
    "a backward that failed is repeated": Habit("failed", retried_backward),
    "a backward that runs out of memory": Habit(None, backward_without_memory),
    "loss scaled by hand": Habit(None, scaled_by_hand),
    "own GradScaler": Habit("gradient", own_scaler),
    "hook on gradients": Habit(None, build=doubling_hook),
    "hook on accumulated gradients": Habit("register_post_accumulate_grad_hook", build=accumulated_hook),
    "hook on accumulated gradients, later": Habit("register_post_accumulate_grad_hook", after_start=accumulated_hook),
    "no_grad": Habit("no_grad", without_gradients),
    "continue": Habit("was not called", skipped),
    # weights and state
    "optimizer.step in a slot": Habit("optimizer.step", after(lambda s: s.optimizer.step())),
    "optimizer.step after a step": Habit("optimizer.step", after_step=lambda s: s.optimizer.step()),
    "scheduler.step, registered": Habit(
        "scheduler", after_step=lambda s: s.scheduler.step(), more=lambda s: {"scheduler": s.scheduler}
    ),
    "scheduler.step, not registered": Habit("scheduler", after_step=lambda s: s.scheduler.step()),
    "lr by hand": Habit("param_groups.0.lr", after_step=halve_lr),
    "lr by hand in a slot": Habit("param_groups.0.lr", before(halve_lr)),
    "weights in a slot, no_grad": Habit("was changed", before(scale_weights)),
    "weights in a slot, .data": Habit("computed twice", before(scale_data)),
    "weights after a step, .data": Habit("was changed", after_step=scale_data),
    "weights after a step by rank 0": Habit("was changed", after_step=when(2, on_rank_0(scale_weights))),
    "weights in a hook of the optimizer": Habit(None, build=clamp_after_updates),
    "weights between start and the first step": Habit("was changed", after_start=scale_weights),
    "load_state_dict": Habit("was changed", after_step=when(2, reload)),
    "optimizer.load_state_dict": Habit("optimizer", after_step=when(2, reload_optimizer)),
    "optimizer.state.clear": Habit("optimizer", after_step=when(2, lambda s: s.optimizer.state.clear())),
    "add_param_group": Habit("param_groups", after_step=when(2, add_group)),
    "max_norm": Habit("max_norm", model=lambda: Net(max_norm=0.5)),
    "max_norm in forward": Habit(
        "was changed", before(lambda s: F.embedding(torch.arange(4), s.model.embedding.weight, max_norm=0.5))
    ),
    "weights after the last step": Habit("was changed", after_step=when(STEPS, scale_weights)),
    "an average updated by hand": Habit(
        "ema", after_step=lambda s: s.ema.update_parameters(s.model), more=lambda s: {"ema": s.ema}
    ),
    "scaler.update": Habit("scaler", after_step=lambda s: s.scaler.update(2.0), more=lambda s: {"scaler": s.scaler}),
    # the model itself
    "requires_grad_ off": Habit("requires_grad", after_step=when(2, freeze)),
    "requires_grad_ on": Habit(
        "requires_grad",
        build=frozen_embedding,
        after_step=when(2, lambda s: s.model.embedding.requires_grad_(True)),
    ),
    "new layer": Habit("replaced", after_step=when(2, new_head)),
    "weights tied after start": Habit("replaced", after_start=tie),
    "half()": Habit("was changed", after_step=when(2, lambda s: s.model.half())),
    "eval() left on": Habit("model.train()", after_step=when(2, evaluate)),
    "eval() left on by rank 0": Habit("model.train()", after_step=when(2, on_rank_0(evaluate))),
    "eval() and train()": Habit(None, after_step=evaluate_and_back),
    "evaluation in training mode": Habit(
        "Buffer body.1.num_batches_tracked", after_step=when(2, evaluate_in_training_mode)
    ),
    "train() in every slot": Habit(None, before(lambda s: s.model.train())),
    "frozen batch norm": Habit(None, after_start=lambda s: s.model.body[1].eval()),
    "SyncBatchNorm": Habit("SyncBatchNorm", model=sync_norm),
    "DistributedDataParallel": Habit("DistributedDataParallel", model=distributed),
    # randomness and data
    "manual_seed in a slot": Habit(None, before(lambda s: torch.manual_seed(0))),
    "manual_seed before a step": Habit(None, before_step=lambda s: torch.manual_seed(s.run.rank)),
    "own generator": Habit("two different", model=OwnGenerator),
    "batch in place": Habit(None, batch_in_place),
    "batch in place, a view of the dataset": Habit(
        None, batch_in_place, build=views, training={"micro_batch_samples": 1}
    ),
    "batch in place, the dataset's own tensor": Habit(
        "two different", batch_in_place, build=whole_tensors, training={"micro_batch_samples": 1}
    ),
    "set_num_threads": Habit("set_num_threads", after_step=when(2, lambda s: torch.set_num_threads(2))),
}  # fmt: skip


def perform(here: Here, names: list[str], folder: str, world: int, rank: int, ports: list[int]) -> None:
    """Train with these habits in turn as one of `world` workers, and say what came of each."""
    os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), MASTER_ADDR="127.0.0.1")
    warnings.simplefilter("ignore")
    for number, (name, port) in enumerate(zip(names, ports, strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        try:
            here.say(weights=train(HABITS[name], Path(folder) / str(number)))
        except HarnessError as error:
            here.say(error=str(error))
            break  # the other workers cannot go on
    here.stay()
    os._exit(0)


def train(habit: Habit, folder: Path) -> str:
    script = Script(habit)
    habit.build(script)
    training = {"max_steps": STEPS, "global_batch_samples": 2 * SLOTS, "micro_batch_samples": 2}
    training |= habit.training or {}
    config = elastic_harness.Config.from_dict({"training": training})
    script.run = elastic_harness.start(
        script.model, script.optimizer, script.data, config, run_dir=folder, **habit.more(script)
    )
    habit.after_start(script)
    with script.run:
        for step in script.run.steps():
            habit.before_step(script)
            for batch in step.micro_batches():
                habit.slot(script, step, batch)
            habit.after_step(script)
    return weights_sha256(script.model)
