"""How the learning rate follows the batch. Pure.

With ratio = global batch / base batch, the rate is multiplied by

    linear  ratio        Goyal et al. 2017 (arXiv:1706.02677), for SGD
    sqrt    √ratio       Malladi et al. 2022 (arXiv:2205.10287), for Adam and RMSprop
    none    1

The factor is a function of the present batch alone, never of the way there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from elastic_harness.errors import ConfigError
from elastic_harness.typed import Section


class ScalingRule(Enum):
    """A rule by its name."""

    LINEAR = "linear"
    SQRT = "sqrt"
    NONE = "none"

    def factor(self, ratio: float) -> float:
        """Return by what the rate is multiplied. ratio: batch / base batch."""
        return {ScalingRule.LINEAR: ratio, ScalingRule.SQRT: math.sqrt(ratio), ScalingRule.NONE: 1.0}[self]


@dataclass(frozen=True)
class ScalingConfig(Section):
    """The batch for which a learning rate was found, and how it follows another batch."""

    section: ClassVar[str] = "scaling"

    base_lr: float  # for the base batch: the rate with which the optimizer is made
    base_batch_size: int  # samples of one worker in one optimizer step, all its micro-batches together
    base_world_size: int  # workers; the base batch is base_batch_size * base_world_size
    scaling_rule: ScalingRule | Callable[[float], float] = ScalingRule.LINEAR  # a function: of batch / base batch
    warmup_steps: int = 0  # optimizer steps from one rate to another; 0: at once

    def check(self) -> None:
        self._positive("base_lr")
        self._at_least(1, "base_batch_size", "base_world_size")
        self._at_least(0, "warmup_steps")
        at_base = self.factor(self.base_global_batch_size)
        if at_base != 1:
            raise ConfigError(
                f"scaling.scaling_rule gives {at_base!r} for the ratio 1.0, but must give exactly 1: with the base "
                "batch the rate is the base rate."
            )

    @property
    def base_global_batch_size(self) -> int:
        """The samples of all workers in one step of the base."""
        return self.base_batch_size * self.base_world_size

    def factor(self, global_batch_size: int) -> float:
        """Return by what the rule multiplies the learning rate for this batch. Raises ConfigError if a rule of the
        user's gives no positive number."""
        ratio = global_batch_size / self.base_global_batch_size
        rule = self.scaling_rule
        factor = rule.factor(ratio) if isinstance(rule, ScalingRule) else rule(ratio)
        try:
            usable = math.isfinite(factor) and factor > 0
        except TypeError:
            usable = False
        if not usable:
            raise ConfigError(
                f"scaling.scaling_rule gives {factor!r} for the ratio {ratio!r}, but must give a positive number."
            )
        return float(factor)


@dataclass(frozen=True)
class WarmUp:
    """The factor's way from one value to another, linear in steps (the gradual warm-up of Goyal et al. 2017; for both
    directions Lin et al. 2019, arXiv:1904.12043)."""

    start: float = 1.0
    end: float = 1.0
    steps: int = 0
    done: int = 0

    @property
    def is_over(self) -> bool:
        return self.done >= self.steps

    @property
    def factor(self) -> float:
        """The factor of the next step. At the end it is exactly `end`."""
        return self.end if self.is_over else self.start + (self.end - self.start) * (self.done / self.steps)

    def aimed(self, end: float, steps: int) -> WarmUp:
        """Return the way from where the factor is now to another end. To the same end it goes on as it was."""
        return self if end == self.end else WarmUp(self.factor, end, steps)

    def stepped(self, steps: int = 1) -> WarmUp:
        """Return the way so many steps later."""
        return WarmUp(self.start, self.end, self.steps, min(self.steps, self.done + steps))


class ScaledRate:
    """By what the rate is multiplied in each step of a run whose batch changes."""

    def __init__(
        self, rule: ScalingRule, batches: Sequence[tuple[int, int]], base_batch: int, warmup_steps: int
    ) -> None:
        """batches: (first step, samples per step), ascending, from the run's first step on. base_batch: that for which
        the rate was found. The first batch has its rate from the beginning."""
        self._steps, self._ways = [step for step, _ in batches], list[WarmUp]()
        for step, batch in batches:
            end = rule.factor(batch / base_batch)
            self._ways.append(self._way_at(step).aimed(end, warmup_steps) if self._ways else WarmUp(end, end))

    def factor(self, step: int) -> float:
        """Return the factor of a step."""
        return self._way_at(step).factor

    def _way_at(self, step: int) -> WarmUp:
        at = min(bisect_right(self._steps, step), len(self._ways)) - 1
        return self._ways[at].stepped(step - self._steps[at])
