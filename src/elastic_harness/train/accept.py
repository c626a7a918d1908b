"""What cannot be trained exactly is refused before the first step, with the reason and what to do instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic_harness.errors import ConfigError


def check_trainable(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Raise ConfigError for an optimizer or a scheduler that needs more than the summed gradient of the model."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the model several times per step, which cannot be replayed from one gradient; use a "
            "first-order optimizer."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "SparseAdam needs sparse gradients, which cannot be summed exactly; use Adam, and sparse=False in the "
            "embeddings."
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric at every step, but the schedule is a part of the commit, which knows "
            "gradients only; use a schedule over steps."
        )
    own = {id(p) for p in model.parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [tuple(p.shape) for p in given if id(p) not in own]
    if foreign:
        raise ConfigError(
            f"The optimizer has {len(foreign)} parameters that are not the model's (shapes {foreign[:5]}), whose "
            "gradients nobody would sum. Give one module that holds all of them, for example an nn.ModuleList."
        )
    if not any(p.requires_grad for p in given):
        raise ConfigError("The optimizer has no parameter with requires_grad=True, so there is nothing to train.")
