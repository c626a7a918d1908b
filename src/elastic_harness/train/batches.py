"""The batch of each step and what follows from it: slots and lanes, the learning rate's factor, the run's end.

The batch is a function of the step (`training.batch_schedule`), or follows the workers (`scaling.batch: per_worker`).
In the second case the batches of the steps so far are training state, and a step keeps the batch that it was begun
with, whoever dies meanwhile.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from elastic_harness import batch_changes, omissions
from elastic_harness.comm.tree import Span
from elastic_harness.config import STEPS_UNASKED, Config, TrainingConfig
from elastic_harness.contract import variables
from elastic_harness.data.mapstyle import MapStyle
from elastic_harness.data.order import EpochOrder, Order
from elastic_harness.data.schedule import Schedule
from elastic_harness.errors import ConfigError
from elastic_harness.runs import origin as origins
from elastic_harness.runs.ledger import lane_of
from elastic_harness.scaling.rules import ScaledRate, ScalingRule
from elastic_harness.typed import setting_error

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

    def lane_of(self, slot: int) -> int:
        """The lane that a slot is in."""
        return lane_of(slot, self.slots, self.lanes)

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
        self,
        config: Config,
        schedule: Schedule,
        tokens_per_sample: int | None,
        *,
        pairs: bool = True,
        fixed: bool = False,
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
        self._rate: ScaledRate | None = None
        self._past = "", -1  # of the batches so far a hash, and how many they are
        self.schedule = schedule

    def shape(self, step: int) -> Shape:
        """The slots and lanes of a step."""
        slots = self.schedule.batch_at(step) // self.micro_batch
        return Shape(slots, min(slots, self._lanes_max), self.micro_batch, pairs=self._pairs)

    def is_short(self, step: int) -> bool:
        """Whether the end of an epoch leaves slots of this step without samples."""
        return self.schedule.at(step).count < self.schedule.batch_at(step)

    def epoch_began(self, version: int) -> int:
        """Return the version with which the epoch of this one began."""
        return self.schedule.reaching(self.schedule.at(version).epoch * self.schedule.n_samples)

    def workers(self, step: int) -> int:
        """For how many workers a step is; 0: it does not depend on them."""
        return self.schedule.batch_at(step) // self._per_worker if self._per_worker else 0

    def lr_scale(self, step: int) -> float:
        """By what the learning rate is multiplied in a step."""
        if self._rate is None:
            rule, base = ScalingRule(self._scaling.rule), self._training.global_batch_samples
            self._rate = ScaledRate(rule, self.schedule.batches, base, self._scaling.warmup_steps)
        return self._rate.factor(step)

    @property
    def schedule(self) -> Schedule:
        """The batches of the steps so far, and of those to come as far as they are known."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._schedule, self._rate, self._past = schedule, None, ("", -1)

    @property
    def last_version(self) -> int:
        """The version at which the run ends. With a budget of tokens it follows the batch."""
        return end_of(self._training, self.schedule, self._tokens_per_sample)

    def plan(self, version: int, workers: int, later: int) -> None:
        """Step `version` is for so many workers, and the steps after it for `later`, until this is called again."""
        if self._per_worker:
            begun = self.schedule.changed(version, self._per_worker * workers)
            self.schedule = begun.changed(version + 1, self._per_worker * later)

    def note_slots(self, step: int, slots: int) -> None:
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
        return {"version": self._version, "batches": [list(each) for each in self._batches_so_far()]}

    def _batches_so_far(self) -> Sequence[tuple[int, int]]:
        batches = self.schedule.batches
        return batches[: bisect_left(batches, (self._version, 0))]

    def word(self) -> str:
        """The state in a few words, the same for the same state."""
        past = self._batches_so_far()
        if self._past[1] != len(past):
            self._past = xxhash.xxh3_64_hexdigest(str(past).encode()), len(past)
        return f"{self._version} {self._past[0]}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken. What is planned stays, until `plan` is called."""
        self._version = int(state["version"])
        past = [(int(step), int(batch)) for step, batch in state["batches"]]
        planned = [each for each in self.schedule.changes if each[0] >= self._version]
        self.schedule = replace(self.schedule, changes=(*past, *planned))


def scheduled(
    config: Config, n_samples: int, tokens_per_sample: int | None, first: tuple[int, int] = (0, 0)
) -> Schedule:
    """Return the schedule that the settings give. first: the run's first step, and its position in the data."""
    listed = batch_changes.parse(config.training.batch_schedule)
    changes = [(change.after, change.batch) for change in listed if not change.in_tokens]
    stage = Schedule(n_samples, config.training.global_batch_samples, *first)
    for after, batch, in_tokens in listed:
        if in_tokens:
            step = stage.reaching(-(-after // _known(tokens_per_sample, "training.batch_schedule")))
            stage = Schedule(n_samples, batch, step, stage.at(step).position)
            changes = [*(changes[:-1] if changes and changes[-1][0] == step else changes), (step, batch)]
    return Schedule(n_samples, config.training.global_batch_samples, *first, tuple(changes))


def end_of(training: TrainingConfig, schedule: Schedule, tokens_per_sample: int | None) -> int:
    """Return the version at which a run ends: the first of the ends that `training` gives."""
    ends = [] if training.max_steps is None else [training.max_steps]
    if training.max_tokens is not None:
        ends.append(schedule.reaching(-(-training.max_tokens // _known(tokens_per_sample, "training.max_tokens"))))
    if training.max_epochs is not None:
        ends.append(schedule.reaching(math.ceil(training.max_epochs * schedule.n_samples)))
    return max(schedule.first_step, min(ends, default=STEPS_UNASKED))


def tokens_per_sample_of(dataset: Any) -> int | None:
    """Return how many tokens each sample has, if the dataset says so."""
    length = getattr(dataset, "seq_length", None)
    return length if isinstance(length, int) else None


def _known(tokens_per_sample: int | None, setting: str) -> int:
    if tokens_per_sample is None:
        raise ConfigError(
            f"{setting} counts tokens, but the dataset does not say how many a sample has; give it an attribute "
            "seq_length, or count in steps or epochs."
        )
    return tokens_per_sample


def data_of(source: Any, seed: int) -> tuple[Order, dict[str, Any]]:
    """Return the order in which a dataset is read, and what the data is made of."""
    order = getattr(source, "order", None) or EpochOrder(len(source), seed)
    return order, {"order": order.describe(), "dataset": source.fingerprint()}


def total_steps(config: Config, dataset: Any, *, run_dir: str | Path | None = None) -> int:
    """Return at which version a run of this configuration on this dataset ends, for a schedule of the learning rate.
    run_dir: of a run that begins from another one; under `elastic-harness launch` that is known. With `scaling.batch:
    per_worker` and a budget of tokens or epochs nobody can know the end: then ConfigError is raised."""
    training = config.training
    if config.slots_per_worker and (training.max_tokens, training.max_epochs) != (None, None):
        raise ConfigError(
            'scaling.batch is "per_worker", so training.max_tokens and training.max_epochs are used up after a number '
            "of steps that depends on the workers to come; give training.max_steps alone, or use a learning rate that "
            "does not need the end"
        )
    source = dataset if hasattr(dataset, "read") else MapStyle(dataset)
    order, data = data_of(source, config.seed)
    folder = run_dir or os.environ.get(variables.RUN_DIR)
    origin = origins.read(Path(folder)) if folder is not None else None
    first = origin.first(data) if origin is not None else (0, 0)
    tokens = tokens_per_sample_of(dataset)
    return end_of(training, scheduled(config, order.n_samples, tokens, first), tokens)


def check_omissions(config: Config, batches: Batches) -> None:
    """Raise ConfigError if `training.omit` names a slot that one of its steps does not have."""
    for entry in omissions.parse(config.training.omit):
        changes = [step for step, _ in batches.schedule.batches if entry.first < step < entry.end]
        for step in (max(entry.first, batches.schedule.first_step), *changes) if entry.slots else ():
            slots = batches.shape(step).slots
            if max(entry.slots) >= slots:
                raise setting_error("training.omit", config.training.omit, f"step {step} has the slots 0 … {slots - 1}")
