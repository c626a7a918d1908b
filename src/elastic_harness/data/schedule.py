"""Which positions a step consumes: arithmetic on (samples, global batch, step), with no state to save."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from elastic_harness.data.order import Order, sample_ids


@dataclass(frozen=True)
class StepPositions:
    """The positions of one step: ``count`` of them from ``first`` on, within epoch ``epoch``."""

    epoch: int
    first: int
    count: int
    position: int  # of ``first``, counted from the start of the run over all epochs

    def slot_range(self, slot: int, micro_batch: int) -> tuple[int, int]:
        """Return the half-open range of positions within the epoch that slot ``slot`` takes. It is empty beyond a short
        epoch's end."""
        end = self.first + self.count
        low = min(self.first + slot * micro_batch, end)
        return low, min(low + micro_batch, end)


@dataclass(frozen=True)
class Schedule:
    """Cuts every epoch into steps of ``global_batch`` samples. An epoch's last step may be shorter. A run that goes on
    from another begins at ``first_step`` with ``first_position``, which may lie within an epoch."""

    n_samples: int
    global_batch: int
    first_step: int = 0
    first_position: int = 0

    def __post_init__(self) -> None:
        for name in ("n_samples", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        for name in ("first_step", "first_position"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 0.")

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.n_samples // self.global_batch)

    def last_step_of(self, epoch: int) -> int:
        """Return the step that ends an epoch. The epoch must not end before the first step."""
        begun_in, begun = divmod(self.first_position, self.n_samples)
        left = -(-(self.n_samples - begun) // self.global_batch)
        return self.first_step + left - 1 + (epoch - begun_in) * self.steps_per_epoch

    def at(self, step: int) -> StepPositions:
        """Return the positions that step ``step`` (from 0) consumes."""
        if step < self.first_step:
            raise ValueError(f"step is {step}, but steps count from {self.first_step}.")
        epoch, begun = divmod(self.first_position, self.n_samples)
        index = step - self.first_step
        after = step - self.last_step_of(epoch) - 1  # steps since the epoch that the run began in
        if after >= 0:
            more, index = divmod(after, self.steps_per_epoch)
            epoch, begun = epoch + 1 + more, 0
        first = begun + index * self.global_batch
        count = min(self.global_batch, self.n_samples - first)
        return StepPositions(epoch, first, count, epoch * self.n_samples + first)


def slot_sample_ids(schedule: Schedule, order: Order, step: int, slot: int, micro_batch: int) -> npt.NDArray[np.int64]:
    """Return the sample ids that slot ``slot`` of step ``step`` reads, in order. They may be few or none."""
    positions = schedule.at(step)
    low, high = positions.slot_range(slot, micro_batch)
    return _step_sample_ids(schedule, order, step)[low - positions.first : high - positions.first]


@lru_cache(maxsize=2)
def _step_sample_ids(schedule: Schedule, order: Order, step: int) -> npt.NDArray[np.int64]:
    """Return all ids of a step at once. The order takes as long for one position as for a hundred."""
    positions = schedule.at(step)
    within_epoch = np.arange(positions.first, positions.first + positions.count, dtype=np.int64)
    ids = sample_ids(order, positions.epoch, within_epoch)
    ids.setflags(write=False)
    return ids
