"""A script's objects as a `CheckpointState`, and back: what DDP and torch.compile wrap is taken out first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic_harness.checkpoint.state import CheckpointState, capture_rng, load_optimizer, restore_rng
from elastic_harness.errors import ConfigError

_OTHERS = ("scheduler", "scaler", "ema", "dataset")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model within DistributedDataParallel and torch.compile, so that a checkpoint has the same names with
    them and without. `fully_shard` wraps nothing. Raises ConfigError for FullyShardedDataParallel,
    whose parameters are not the model's."""
    while True:
        if type(model).__name__ == "FullyShardedDataParallel":
            raise ConfigError(
                "The model is wrapped in FullyShardedDataParallel, which has other parameters than the model; shard it "
                "with torch.distributed.fsdp.fully_shard instead."
            )
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def create_checkpoint_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    dataset: Any = None,
    rng: bool = True,
    **more: Any,
) -> CheckpointState:
    """Return the state of a script's objects after `step` steps; each has a `state_dict()`. rng: with the state of the
    random generators. more: further fields of `CheckpointState`, such as epoch, tokens, metrics, extra. Nothing is
    copied: save it before the objects change. Raises ConfigError for FullyShardedDataParallel."""
    given = dict(zip(_OTHERS, (scheduler, scaler, ema, dataset), strict=True))
    states = {f"{name}_state": part.state_dict() for name, part in given.items() if part is not None}
    return CheckpointState(
        step,
        unwrapped(model).state_dict(),
        optimizer.state_dict() if optimizer is not None else None,
        rng_state=capture_rng() if rng else None,
        **states,
        **more,
    )


def load_checkpoint_to_model(
    state: CheckpointState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    dataset: Any = None,
    rng: bool = True,
) -> int:
    """Load a state into a script's objects, to the bit, and return how many steps are done. Raises ConfigError if the
    state lacks one of them; nothing is loaded then."""
    given = dict(zip(_OTHERS, (scheduler, scaler, ema, dataset), strict=True))
    wanted = {"model": model, "optimizer": optimizer, **given}
    missing = [n for n, part in wanted.items() if part is not None and getattr(state, f"{n}_state") is None]
    if missing:
        raise ConfigError(f"The checkpoint of step {state.step} has no state of: {', '.join(missing)}; leave that out.")
    unwrapped(model).load_state_dict(state.model_state or {})
    if optimizer is not None:
        load_optimizer(optimizer, state.optimizer_state or {})
    for name, part in given.items():
        if part is not None:
            part.load_state_dict(getattr(state, f"{name}_state"))
    if rng and state.rng_state is not None:
        restore_rng(state.rng_state)
    return state.step
