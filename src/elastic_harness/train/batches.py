"""The batch of each step and what follows from it: slots and lanes, the learning rate's factor, the run's end.

The batch is a function of the step (`training.batch_schedule`), or follows the workers (`scaling.batch: per_worker`).
In the second case the batches of the steps so far are training state, and a step keeps the batch that it was begun
with, whoever dies meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_harness import batch_changes
from elastic_harness.comm.tree import Span
from elastic_harness.config import Config, TrainingConfig
from elastic_harness.data.schedule import Schedule
from elastic_harness.errors import ConfigError
from elastic_harness.scaling.rules import ScalingRule

NAME = "batches"  # of its state


@dataclass(frozen=True)
class Shape:
    """What a step is made of: N slots of at most `micro_batch` samples, L lanes of consecutive slots.
    pairs: whether autograd may add up two lanes."""

    slots: int
    lanes: int
    micro_batch: int
    pairs: bool = True

    def unit_slots(self, unit: Span) -> range:
        """The slots of some consecutive lanes; lanes differ by at most one slot."""
        return range(unit[0] * self.slots // self.lanes, unit[1] * self.slots // self.lanes)

    def units(self, lanes: Sequence[int], alone: Collection[int] = ()) -> list[Span]:
        """How to compute `lanes`, ascending: one by one, except that two siblings of one slot each are accumulated
        by autograd in place, which is the very addition the tree asks for, and cheaper. Not so where a parameter is
        of a narrower type than the sums: autograd would round once more. Nor are lanes that are to be computed
        `alone`."""
        units: list[Span] = []
        for lane in lanes:
            pair = (lane - 1, lane + 1)
            pairs = self.pairs and lane % 2 and len(self.unit_slots(pair)) == 2 and not {lane - 1, lane} & set(alone)
            if pairs and units and units[-1] == (lane - 1, lane):
                units[-1] = pair
            else:
                units.append((lane, lane + 1))
        return units


class Batches:
    """What a step consists of. Every member comes to the same: from the settings, the steps so far and the digest."""

    def __init__(
        self, config: Config, schedule: Schedule, tokens_per_sample: int, *, pairs: bool = True, fixed: bool = False
    ) -> None:
        """schedule: as `scheduled` gives it. tokens_per_sample: for `training.max_tokens`. fixed: the batches follow
        the schedule, which somebody has recorded, and not the workers."""
        self._training, self._scaling = config.training, config.scaling
        self._lanes_max = config.lanes_max
        self._tokens_per_sample = tokens_per_sample
        self._pairs = pairs
        self.micro_batch = config.training.micro_batch_samples
        self._planned = schedule
        self._version = schedule.first_step
        self._per_worker = 0 if fixed else config.slots_per_worker * self.micro_batch
        self.are_state = config.slots_per_worker > 0
        self.schedule = schedule

    def shape(self, step: int) -> Shape:
        """The slots and lanes of a step."""
        slots = self.schedule.batch_at(step) // self.micro_batch
        return Shape(slots, min(slots, self._lanes_max), self.micro_batch, pairs=self._pairs)

    def workers(self, step: int) -> int:
        """For how many workers a step is; 0: it does not depend on them."""
        return self.schedule.batch_at(step) // self._per_worker if self._per_worker else 0

    def lr_scale(self, step: int) -> float:
        """By what the learning rate is multiplied in a step."""
        rule, base = ScalingRule(self._scaling.rule), self._training.global_batch_samples
        return rule.factor_at(step, self.schedule.batches(), base, self._scaling.warmup_steps)

    @property
    def last_version(self) -> int:
        """The version at which the run ends. With a budget of tokens it follows the batch."""
        return end_of(self._training, self.schedule, self._tokens_per_sample)

    def deal(self, version: int, workers: int, later: int) -> None:
        """Step `version` is for so many workers, and the steps after it for `later`, until this is called again."""
        if self._per_worker:
            begun = self.schedule.changed(version, self._per_worker * workers)
            self.schedule = begun.changed(version + 1, self._per_worker * later)

    def heed(self, step: int, slots: int) -> None:
        """Take notice of what a step consists of. A member that replays its record may not have begun it."""
        batch = slots * self.micro_batch
        if self._per_worker and self.schedule.batch_at(step) != batch:
            self.schedule = self.schedule.changed(step, batch)

    def committed(self, step: int) -> None:
        """The batch of this step is state from now on."""
        self._version = step + 1

    def described(self) -> dict[str, Any]:
        """Return what `verify` needs to know of them; nothing if the batch is constant."""
        if not self._planned.changes and not self.are_state:
            return {}
        return {
            "batch_changes": self._planned.changes,
            "slots_per_worker": self._per_worker // self.micro_batch,
            "lanes_max": self._lanes_max,
            "lr_rule": self._scaling.rule,
            "lr_warmup_steps": self._scaling.warmup_steps,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the batches of the steps so far. What is planned is no state."""
        past = [list(each) for each in self.schedule.batches() if each[0] < self._version]
        return {"version": self._version, "batches": past}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken."""
        self._version = int(state["version"])
        past = [(int(step), int(batch)) for step, batch in state["batches"]]
        planned = [each for each in self._planned.changes if each[0] >= self._version]
        self.schedule = replace(self._planned, changes=(*past, *planned))


def scheduled(config: Config, n_samples: int, tokens_per_sample: int, first: tuple[int, int] = (0, 0)) -> Schedule:
    """Return the schedule that the settings give. first: the run's first step, and its position in the data."""
    schedule = Schedule(n_samples, config.training.global_batch_samples, *first)
    for after, batch, in_tokens in batch_changes.parse(config.training.batch_schedule):
        step = schedule.reaching(-(-after // tokens_per_sample)) if in_tokens else after
        schedule = schedule.changed(step, batch)
    return schedule


def end_of(training: TrainingConfig, schedule: Schedule, tokens_per_sample: int) -> int:
    """Return the version at which a run ends: the first of the ends that `training` gives."""
    ends = [] if training.max_steps is None else [training.max_steps]
    if training.max_tokens is not None:
        ends.append(schedule.reaching(-(-training.max_tokens // tokens_per_sample)))
    if training.max_epochs is not None:
        ends.append(schedule.reaching(math.ceil(training.max_epochs * schedule.n_samples)))
    return max(schedule.first_step, min(ends))


def total_steps(config: Config, dataset: Any) -> int:
    """Return how many steps a run of this configuration on this dataset has, for a schedule of the learning rate. With
    `scaling.batch: per_worker` and a budget of tokens or epochs nobody can know that: then ConfigError is raised."""
    if config.slots_per_worker and config.training.max_steps is None:
        raise ConfigError(
            'scaling.batch is "per_worker", so the number of steps depends on the workers to come; set '
            "training.max_steps too, or use a learning rate that does not need the end"
        )
    order = getattr(dataset, "order", None)
    tokens = int(getattr(dataset, "seq_length", 1))
    n_samples = order.n_samples if order is not None else len(dataset)
    return end_of(config.training, scheduled(config, n_samples, tokens), tokens)
