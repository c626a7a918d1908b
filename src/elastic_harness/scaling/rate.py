"""Scales the learning rate of any optimizer with the batch, beside any scheduler.

    config = ScalingConfig(base_lr=1e-4, base_batch_size=8, base_world_size=4, warmup_steps=100)
    manager = LRScalingManager(config, optimizer)
    manager.on_topology_change(new_world_size=2)    # on all ranks alike
    for batch in loader:
        …
        optimizer.step()                            # with the scaled rate
        scheduler.step()                            # sees the unscaled one
        manager.step_warmup()

`param_groups[…]["lr"]` is scaled only while `optimizer.step()` runs. Schedulers such as CosineAnnealingLR compute the
next rate from the last one. They would compound a factor that stays there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.scaling.rules import ScalingConfig, WarmUp

_BASE = ("base_lr", "base_batch_size", "base_world_size")


class LRScalingManager:
    """Multiplies the rate of every parameter group by one factor, which follows from the batch. It begins at the base:
    factor 1. Make it before `optimizer.load_state_dict()`, before or after schedulers. Everything in it is local, and
    must be called alike on all ranks."""

    def __init__(self, config: ScalingConfig, optimizer: Optimizer) -> None:
        self.config = config
        self._optimizer = optimizer
        self._batch = config.base_global_batch_size
        self._told = False  # whether the script has said what the topology is
        self._warm_up = WarmUp()
        self._steps_unannounced = 0  # of the optimizer, in a warm-up, since the last step_warmup
        self._held: list[tuple[Any, Any]] | None = None  # in a step: the unscaled and the scaled rate of each group
        self._check()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def on_topology_change(self, new_world_size: int, *, global_batch_size: int | None = None) -> float:
        """Let the rate go, over `warmup_steps`, from what it is now to that of the new batch. Return the base rate
        scaled by the new factor. The batch is base_batch_size * new_world_size, unless it is given: the samples of all
        workers in one optimizer step. Call it again with the same batch and nothing changes."""
        if not _is_count(new_world_size):
            raise ConfigError(f"new_world_size is {new_world_size!r}, but must be a number of workers, at least 1.")
        if global_batch_size is not None and not _is_count(global_batch_size):
            raise ConfigError(
                f"global_batch_size is {global_batch_size!r}, but must be a number of samples, at least 1; leave it "
                "out if each worker has scaling.base_batch_size samples in a step."
            )
        batch = global_batch_size or self.config.base_batch_size * new_world_size
        self._warm_up = self._warm_up.aimed(self.config.factor(batch), self.config.warmup_steps)
        self._batch, self._told, self._steps_unannounced = batch, True, 0
        return self.config.base_lr * self._warm_up.end

    def step_warmup(self) -> float:
        """Count one optimizer step of the warm-up, if there is one. Return the base rate scaled by the factor of the
        next step. Call it once after each `optimizer.step()`."""
        self._warm_up, self._steps_unannounced = self._warm_up.stepped(), 0
        return self.config.base_lr * self.factor

    @property
    def factor(self) -> float:
        """What the next step's rates are multiplied by."""
        return self._warm_up.factor

    def get_last_lr(self) -> list[float]:
        """Return the scaled rate of each parameter group in the next step. A scheduler's method of this name gives the
        unscaled ones."""
        self.restore()
        return [float(group["lr"]) * self.factor for group in self._optimizer.param_groups]

    def restore(self) -> None:
        """Take the scaling away that an `optimizer.step()` left because it raised. Call it where you catch that, before
        the scheduler's step. The manager does it by itself before the next step and before a state_dict of the
        optimizer. Raises UserCodeError if a rate was changed meanwhile."""
        held, self._held = self._held or [], None
        for number, (group, (rate, scaled)) in enumerate(zip(self._optimizer.param_groups, held, strict=False)):
            if _was_changed(group["lr"], scaled):
                raise UserCodeError(
                    f"The learning rate of parameter group {number} was changed to {float(group['lr'])!r} while it was "
                    f"scaled by {self.factor!r} for a step. If a scheduler did it after an optimizer.step() that "
                    "raised, call restore() of the LRScalingManager first. If the optimizer does it in step(), its "
                    "rate cannot be scaled from outside."
                )
            group["lr"] = rate

    def remove(self) -> None:
        """Let go of the optimizer. Its next step has the unscaled rates."""
        self.restore()
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return how far the rate is, as plain values."""
        w = self._warm_up
        base = {name: getattr(self.config, name) for name in _BASE}
        return {"base": base, "global_batch_size": self._batch, "warm_up": [w.start, w.end, w.steps, w.done]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken. If `on_topology_change` was called on this manager before, its batch holds,
        and the rate goes there from the saved one. If not, the saved batch holds. So both orders are right."""
        try:
            base, batch, warm_up = dict(state["base"]), state["global_batch_size"], WarmUp(*state["warm_up"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"This is no state of an LRScalingManager: {error!r}.") from None
        own = {name: getattr(self.config, name) for name in _BASE}
        if base != own:
            raise ConfigError(
                f"The saved learning rate belongs to the base {base}, but this manager has the base {own}; give it the "
                "saved base, or leave load_state_dict out to begin from the new one."
            )
        self._batch = self._batch if self._told else batch
        self._warm_up = warm_up.aimed(self.config.factor(self._batch), self.config.warmup_steps)
        self._steps_unannounced = 0

    def _check(self) -> None:
        """Refuse an optimizer whose rates cannot be scaled, or that has another base rate."""
        hooks = getattr(self._optimizer, "_optimizer_step_pre_hooks", None)
        if not isinstance(self._optimizer, Optimizer) or hooks is None:
            raise ConfigError(
                f"optimizer is a {type(self._optimizer).__name__}, but must be a torch.optim.Optimizer with hooks; "
                "give the optimizer that it wraps."
            )
        if any(isinstance(getattr(hook, "__self__", None), LRScalingManager) for hook in hooks.values()):
            raise ConfigError("This optimizer has an LRScalingManager; call its remove() before you make another one.")
        groups = self._optimizer.param_groups
        for number, group in enumerate(groups):
            if not isinstance(group.get("lr"), (int, float, Tensor)):
                raise ConfigError(
                    f"Parameter group {number} of {type(self._optimizer).__name__} has lr={group.get('lr')!r}, but "
                    "must have a number or a tensor; an optimizer that chooses its own rate cannot be scaled."
                )
        base_lr = self.config.base_lr
        rates = [float(group.get(key, group["lr"])) for group in groups for key in ("initial_lr", "max_lr")]
        if not any(math.isclose(rate, base_lr, rel_tol=1e-6) for rate in rates):
            raise ConfigError(
                f"scaling.base_lr is {base_lr!r}, but the optimizer's rates are {sorted(set(rates))}; one group must "
                "begin with base_lr. Make the manager before you load the optimizer's state."
            )

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UserCodeError(
                "optimizer.step() is captured in a CUDA graph, which would keep today's learning rate for ever; "
                "capture forward and backward only, or do without the LRScalingManager."
            )
        self.restore()
        factor = self.factor
        if factor == 1:
            return
        # New objects, not in place: groups may share one tensor, and the old object comes back to the bit.
        self._held = [(group["lr"], group["lr"] * factor) for group in optimizer.param_groups]
        for group, (_rate, scaled) in zip(optimizer.param_groups, self._held, strict=True):
            group["lr"] = scaled

    def _after_step(self, *_: object) -> None:
        self.restore()
        if not self._warm_up.is_over:
            self._steps_unannounced += 1
            if self._steps_unannounced == 2:
                warnings.warn(
                    "The learning rate is in a warm-up, but step_warmup() of the LRScalingManager was not called "
                    "between two optimizer steps; without it the rate stays as it is.",
                    stacklevel=4,
                )

    def _before_state_dict(self, _optimizer: Optimizer) -> None:
        self.restore()

    def _after_load(self, _optimizer: Optimizer) -> None:
        self._held = None  # the groups are new ones


def _was_changed(lr: Any, scaled: Any) -> bool:
    """Return whether a rate is another than that which the manager has put there."""
    return bool(lr is not scaled or lr._version) if isinstance(scaled, Tensor) else bool(lr != scaled)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
