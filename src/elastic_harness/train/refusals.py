"""What cannot be trained exactly is refused before the first step, with the reason and what to do instead."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic_harness.errors import ConfigError
from elastic_harness.train.nonfinite import NAME as NONFINITE
from elastic_harness.train.state import MODULE_STATE, is_extra_state


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


def check_state_dict(model: nn.Module) -> None:
    """Raise ConfigError for what a model saves beside its parameters, its buffers and its modules' extra state: it
    would get neither to checkpoints nor to joiners."""
    names = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    known = {name for each in names for name, _ in each}
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    state = model.state_dict(keep_vars=True)
    foreign = [n for n, v in state.items() if n not in known and id(v) not in own and not is_extra_state(n)]
    if foreign:
        raise ConfigError(
            f"The model's state_dict() has {foreign[:5]}, which are no parameters or buffers of it and would get "
            "neither to checkpoints nor to workers that join. Register them as buffers, give them with a module's "
            "get_extra_state(), or hold them in an object that is given as extra=."
        )


def check_model(model: nn.Module) -> None:
    """Raise ConfigError for modules whose slots would depend on the other slots or workers."""
    for name, module in model.named_modules():
        called = f"Module {name or '(the model)'} is a {type(module).__name__}"
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}:
            raise ConfigError(
                f"{called}, which adds up gradients between processes by itself; give start() the plain module, the "
                "harness does that."
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"{called}, which exchanges statistics between processes; use nn.BatchNorm, whose statistics the "
                "harness averages over all micro-batches of the step."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"{called} with max_norm={module.max_norm}, which rescales weights in forward, so they would depend on "
                "which micro-batches a worker computes. Leave max_norm out, and rescale in "
                "optimizer.register_step_post_hook(), which runs inside the commit on every worker."
            )
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
                raise ConfigError(
                    f"{called} with a generator of its own, {attribute}, whose numbers depend on what was drawn "
                    "before. Draw from the default generators of torch, numpy.random or random, which are seeded for "
                    "every micro-batch."
                )
    check_hooks(dict(model.named_parameters()))


def check_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for hooks that see the sum of several slots' gradients."""
    for name, parameter in parameters.items():
        if parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"Parameter {name} has a hook from register_post_accumulate_grad_hook(), which sees the sum of as many "
                "micro-batches as this worker happens to add up. Use register_hook() for each micro-batch's gradient, "
                "or optimizer.register_step_pre_hook() for the step's."
            )


def check_names(given: Mapping[str, Collection[str]], taken: Collection[str]) -> None:
    """Raise ConfigError for names of state, by the argument that gives them, which would hide other state."""
    taken = ["model", MODULE_STATE, NONFINITE, *taken]
    for argument, names in given.items():
        wrong = sorted(name for name in names if name in taken or "." in name or "$" in name or not name)
        if wrong:
            raise ConfigError(
                f"{argument}= has the names {wrong}, but {', '.join(map(repr, taken))} are taken and a name must not "
                "contain a dot or a dollar sign; give them other names."
            )
        taken += names


def check_extra(extra: Collection[str], exactness: str) -> None:
    """Raise ConfigError for extra objects where they cannot be kept alike."""
    if extra and exactness == "relaxed":
        raise ConfigError(
            "extra= cannot be combined with elastic.exactness=relaxed: a worker that falls behind takes a peer's state "
            "there, which may already contain what your code does to these objects after the step."
        )
