"""How a run is validated: a measure over held-out batches, whose mean is a value of one version's weights.

A batch's value is a function of (weights, batch), as a slot's gradient is. So the workers share the batches, and who
computes one cannot change a bit of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elastic_harness.config import STEP_METRICS
from elastic_harness.errors import ConfigError, UserCodeError
from elastic_harness.train.batch import own_memory
from elastic_harness.train.rng import seed_everything

Value = tuple[float, float]
"""The mean over one batch, and its weight."""


@dataclass(frozen=True)
class Validation:
    """What `start(validation=…)` takes: every so many steps the workers share `batches`, each is measured by one of
    them, and the mean is known to all with the next step (`Step.validation`), bit for bit the same on any number of
    workers, whoever dies meanwhile.

    measure: called with one batch, in evaluation mode and without gradients; returns the batch's mean (a number or a
    tensor of one element), or (mean, weight) where batches count differently, for example by their number of labels. It
    may read weights and the batch, and nothing that differs between workers. batches: a sequence (`len`, `[]`), equal
    on all workers, or a number: then `measure` is called with 0, 1, 2, … every: committed steps between two
    validations. name: under which checkpoints and events have the value, and `checkpoint.best_metric` may name it."""

    measure: Callable[[Any], Any]
    batches: Any
    every: int
    name: str = "val_loss"

    @property
    def count(self) -> int:
        """How many batches there are."""
        return self.batches if isinstance(self.batches, int) else len(self.batches)

    def is_due(self, version: int) -> bool:
        return version > 0 and version % self.every == 0

    def check(self) -> None:
        """Raise ConfigError if it cannot be carried out."""
        where = "start(validation=Validation(…))"
        if not callable(self.measure):
            raise ConfigError(f"{where}: measure is {self.measure!r}; give a function of one batch")
        if isinstance(self.batches, bool) or not (isinstance(self.batches, int) or _is_sequence(self.batches)):
            raise ConfigError(
                f"{where}: batches is a {type(self.batches).__name__}; give a sequence of batches (a list, or anything "
                "with len() and []), or their number. An iterator cannot be shared out: make a list of it."
            )
        if self.count < 1:
            raise ConfigError(f"{where}: there are {self.count} batches; give at least one")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"{where}: every is {self.every!r}; give a whole number of steps, at least 1")
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name in STEP_METRICS:
            raise ConfigError(
                f"{where}: name is {self.name!r}; give a plain name such as val_loss, none of {', '.join(STEP_METRICS)}"
            )

    def value_of(self, index: int, version: int, seed: int) -> Value:
        """Measure one batch. Local. The default generators are seeded for it, as for a slot."""
        seed_everything(seed, version, -2 - index)  # -1 is the optimizer's
        batch = index if isinstance(self.batches, int) else own_memory(self.batches[index])
        return self._checked(self.measure(batch), f"batch {index} of the validation of version {version}")

    def _checked(self, found: Any, what: str) -> Value:
        mean, weight = found if isinstance(found, tuple) and len(found) == 2 else (found, 1.0)
        numbers = []
        for given in (mean, weight):
            if isinstance(given, Tensor) and given.numel() == 1 and not given.is_complex():
                given = given.item()
            if isinstance(given, bool) or not hasattr(type(given), "__float__") or isinstance(given, Tensor):
                shown = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)[:80]
                raise UserCodeError(
                    f"measure() gave {shown} for {what}; return the batch's mean as a number or a tensor of one "
                    "element, or (mean, weight)"
                )
            numbers.append(float(given))
        if not (math.isfinite(numbers[1]) and numbers[1] >= 0):
            raise UserCodeError(f"measure() gave the weight {weight!r} for {what}; it must be finite and at least 0")
        return numbers[0], numbers[1]


def exact_mean(values: Mapping[int, Value]) -> float:
    """Return the weighted mean over the batches. Both sums are rounded once, so their order does not matter. A batch of
    weight 0 counts for nothing, whatever its value. NaN if a value that counts is not finite. Raises UserCodeError if
    nothing counts."""
    counting = [(value, weight) for value, weight in values.values() if weight > 0]
    if not counting:
        raise UserCodeError("measure() gave all batches of the validation the weight 0: there is nothing to average")
    if not all(math.isfinite(value * weight) for value, weight in counting):
        return math.nan
    return math.fsum(value * weight for value, weight in counting) / math.fsum(weight for _, weight in counting)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have the model in evaluation mode and without gradients, and then each module in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _is_sequence(batches: Any) -> bool:
    return hasattr(batches, "__len__") and hasattr(batches, "__getitem__") and not isinstance(batches, str | Mapping)
