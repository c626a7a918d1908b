"""What a run measures beside training, and what one member knows of one version's measures."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash
from torch import Tensor

from elastic_harness.config import STEP_METRICS, CheckpointConfig
from elastic_harness.errors import UserCodeError
from elastic_harness.train.validation import Validation, Value


@dataclass(frozen=True)
class Measures:
    """What a run measures. best_metric, keeps_best: of the settings of its checkpoints."""

    validation: Validation | None
    best_metric: str
    keeps_best: bool

    @staticmethod
    def of(validation: Validation | None, config: CheckpointConfig) -> Measures:
        return Measures(validation, config.best_metric, config.keep_best > 0)

    @property
    def reported(self) -> str:
        """The metric that the script has to report; empty if none."""
        own = self.validation.name if self.validation is not None else ""
        return "" if self.best_metric in (*STEP_METRICS, own) else self.best_metric

    def validates(self, version: int) -> bool:
        return self.validation is not None and self.validation.is_due(version)

    def is_due(self, version: int) -> bool:
        """Whether members tell each other something of this version. Equal on all members."""
        return bool(self.reported) or self.validates(version)

    def keeps(self, measured: Measured) -> bool:
        """Whether this version is to be on disk because it may be among the best."""
        known = measured.metrics(self).get(self.best_metric)
        return self.keeps_best and known is not None and math.isfinite(known)

    @cached_property
    def in_words(self) -> str:
        """All that members must have in common."""
        v = self.validation
        return f"{f'{v.name} over {v.count} batches every {v.every} steps' if v else 'no validation'}; " + (
            f"reports of {self.reported}" if self.reported else "no reports"
        )

    @cached_property
    def word(self) -> int:
        """63 bits of the hash of that, never 0."""
        return xxhash.xxh3_64_intdigest(self.in_words.encode()) >> 1 | 1

    def check_report(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return what the script reports, as floats. Raises UserCodeError if that is of no use."""
        shown = ", ".join(values) or "nothing"
        if not self.reported:
            best = self.best_metric
            comes = "every step has that" if best in STEP_METRICS else "start(validation=…) measures that"
            raise UserCodeError(
                f"run.report() was given {shown}, but checkpoint.best_metric is {best!r}, and {comes}. Set "
                "checkpoint.best_metric to the name that you report; run.log() writes anything else into the events"
            )
        if self.reported not in values:
            raise UserCodeError(
                f"run.report() was given {shown}, but checkpoint.best_metric is {self.reported!r}: report that, alone "
                f"or with others, as in run.report({self.reported}=value)"
            )
        taken = sorted({*STEP_METRICS, *([self.validation.name] if self.validation else [])} & values.keys())
        if taken:
            raise UserCodeError(f"run.report() was given {taken[0]}, which checkpoints have already: use another name")
        return {name: _number(name, value) for name, value in values.items()}


@dataclass
class Measured:
    """What this member knows of one version's measures. values: of the validation's batches. reports: of the script."""

    values: dict[int, Value] = field(default_factory=dict)
    reports: dict[str, float] = field(default_factory=dict)
    validation: float | None = None  # the mean, once all members know it
    agreed_in: int = 0  # the generation in which all members have told each other; 0: they have not
    told: bool = False  # to the events, by this member
    saved_in: int = 0  # the generation in which it was saved, if that was due

    def metrics(self, measures: Measures) -> dict[str, float]:
        """What a checkpoint of this version says; nothing before all members know it."""
        if not self.agreed_in:
            return {}
        own = {measures.validation.name: self.validation} if measures.validation is not None else {}
        return {**{name: value for name, value in own.items() if value is not None}, **self.reports}


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        raise UserCodeError(f"run.report({name}=…) was given a tensor; give a number, as {name}=value.item()")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UserCodeError(f"run.report({name}=…) was given {value!r}; give a number")
    number = float(value)
    if not math.isfinite(number):
        raise UserCodeError(
            f"run.report({name}=…) was given {number}, which is neither better nor worse than anything; report finite "
            "values only"
        )
    return number
