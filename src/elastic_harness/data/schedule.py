"""Which positions a step consumes: arithmetic on (samples, batches, step)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

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
    from another begins at ``first_step`` with ``first_position``, which may lie within an epoch.

    ``changes``: (step, batch), ascending: from that step on, steps have so many samples. The newest one up to the first
    step counts there. The arithmetic goes from change to change."""

    n_samples: int
    global_batch: int
    first_step: int = 0
    first_position: int = 0
    changes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("n_samples", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        for name in ("first_step", "first_position"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 0.")
        steps = [step for step, _ in self.changes]
        if steps != sorted(set(steps)) or any(step < 0 or batch < 1 for step, batch in self.changes):
            raise ValueError(f"changes are {self.changes}, but must have ascending steps and batches of 1 or more.")

    @cached_property
    def _stages(self) -> list[_Stage]:
        """The run cut where its batch changes."""
        batch = next((batch for step, batch in reversed(self.changes) if step <= self.first_step), self.global_batch)
        stages = [_Stage(self.n_samples, batch, self.first_step, self.first_position)]
        for step, batch in self.changes:
            if step > self.first_step and batch != stages[-1].batch:
                stages.append(_Stage(self.n_samples, batch, step, stages[-1].at(step).position))
        return stages

    def _stage_of(self, step: int) -> _Stage:
        if step < self.first_step:
            raise ValueError(f"step is {step}, but steps count from {self.first_step}.")
        return self._stages[bisect_right(self._stages, step, key=lambda stage: stage.first_step) - 1]

    def at(self, step: int) -> StepPositions:
        """Return the positions that step ``step`` (from 0) consumes."""
        return self._stage_of(step).at(step)

    def batch_at(self, step: int) -> int:
        """Return the samples of a step that no epoch's end cuts short."""
        return self._stage_of(step).batch

    @cached_property
    def batches(self) -> tuple[tuple[int, int], ...]:
        """Return (step, batch) of the first step and of each after which the batch is another one."""
        return tuple((stage.first_step, stage.batch) for stage in self._stages)

    def last_step_of(self, epoch: int) -> int:
        """Return the step that ends an epoch. The epoch must not end before the first step."""
        return self.reaching((epoch + 1) * self.n_samples) - 1

    def reaching(self, position: int) -> int:
        """Return the first step that begins at this position or after it: so many steps consume all before."""
        begun = bisect_left(self._stages, position, key=lambda stage: stage.first_position)
        return self._stages[begun - 1].reaching(position) if begun else self.first_step

    def changed(self, step: int, batch: int) -> Schedule:
        """Return the schedule with another batch from `step` on, whatever was to come after."""
        return replace(self, changes=(*(each for each in self.changes if each[0] < step), (step, batch)))


@dataclass(frozen=True)
class _Stage:
    """Steps of one batch, without an end."""

    n_samples: int
    batch: int
    first_step: int
    first_position: int

    def at(self, step: int) -> StepPositions:
        epoch, begun = divmod(self.first_position, self.n_samples)
        index = step - self.first_step
        after = index - self._left_in_epoch()
        if after >= 0:
            more, index = divmod(after, self._steps_per_epoch())
            epoch, begun = epoch + 1 + more, 0
        first = begun + index * self.batch
        count = min(self.batch, self.n_samples - first)
        return StepPositions(epoch, first, count, epoch * self.n_samples + first)

    def reaching(self, position: int) -> int:
        """Return the first step from `first_step` on that begins at this position or after it."""
        epoch, within = divmod(position, self.n_samples)
        begun_in, begun = divmod(self.first_position, self.n_samples)
        if epoch == begun_in:
            return self.first_step + -(-max(0, within - begun) // self.batch)
        whole = self.first_step + self._left_in_epoch() + (epoch - begun_in - 1) * self._steps_per_epoch()
        return whole + -(-within // self.batch)

    def _steps_per_epoch(self) -> int:
        return -(-self.n_samples // self.batch)

    def _left_in_epoch(self) -> int:
        """Return the number of steps until the end of the epoch in which the stage begins."""
        return -(-(self.n_samples - self.first_position % self.n_samples) // self.batch)


def slot_sample_ids(schedule: Schedule, order: Order, step: int, slot: int, micro_batch: int) -> npt.NDArray[np.int64]:
    """Return the sample ids that slot ``slot`` of step ``step`` reads, in order. They may be few or none."""
    positions = schedule.at(step)
    low, high = positions.slot_range(slot, micro_batch)
    return _step_sample_ids(order, positions)[low - positions.first : high - positions.first]


@lru_cache(maxsize=2)
def _step_sample_ids(order: Order, positions: StepPositions) -> npt.NDArray[np.int64]:
    """Return all ids of a step at once. The order takes as long for one position as for a hundred."""
    within_epoch = np.arange(positions.first, positions.first + positions.count, dtype=np.int64)
    ids = sample_ids(order, positions.epoch, within_epoch)
    ids.setflags(write=False)
    return ids
