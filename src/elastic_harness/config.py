"""The settings that the harness itself reads. They are typed and checked when they are built; each default stands here
once.

A file or a ``section.key=value`` override may only name keys that exist here. Everything else, and every wrong value,
raises a ``ConfigError`` that names the key, its value, what is required and what to do. Units come last in names. This
module imports neither torch nor numpy, because the command line and the agent use it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import yaml

from elastic_harness import batch_changes, omissions
from elastic_harness.config_file import apply_override, build, check_keys, read_yaml
from elastic_harness.errors import ConfigError
from elastic_harness.setting_aliases import canonical
from elastic_harness.typed import Section, nearest_multiple, plain, setting_error

ConfigT = TypeVar("ConfigT", bound="Config")

STEPS_UNASKED = 200
"""The end of a run of which nobody says where it ends."""
STEP_METRICS = ("loss", "grad_norm", "lr")
"""What a checkpoint says of the step before it."""


_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|min|h)")


def seconds_of(text: str) -> float | None:
    """Return the seconds of a time such as "90s", "10min" or "2h"; None if it is no time."""
    match = _TIME.fullmatch(text)
    return None if match is None else float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


@dataclass(frozen=True)
class TrainingConfig(Section):
    """The size of one optimizer step, and how many steps there are."""

    section: ClassVar[str] = "training"

    max_steps: int | None = None  # the run's end; null: 200, or none if one of the next two is given
    max_tokens: int | None = None  # … with the step that uses up so many tokens
    max_epochs: float | None = None  # … with the step that uses up the data so many times
    global_batch_samples: int = 32  # in one step, on all workers together
    batch_schedule: str = ""  # "100: 64, 2000: 128": from step 100 on 64 samples …; "20M tokens: 64": after so many
    micro_batch_samples: int = 1  # samples in one slot
    clip_norm: float | None = 1.0  # of the global gradient; null: no clipping
    nonfinite_steps_max: int = 10  # so many updates in a row are skipped for being non-finite before the job stops
    omit: str = ""  # steps and slots that are not computed: "7" a step, "7/2" its slot 2, "90-109" a range
    lanes: int | None = None  # leaves of the gradient tree; null: min(slots, 8 * elastic.max_workers)
    threads: int = 1  # compute threads per worker: part of what exactness depends on
    backend: Literal["tcp", "nccl"] = "tcp"  # of the exchange; nccl needs a GPU for each worker

    def check(self) -> None:
        self._at_least(1, "max_steps", "max_tokens", "global_batch_samples", "micro_batch_samples", "threads")
        self._at_least(1, "nonfinite_steps_max", "lanes")
        self._positive("clip_norm", "max_epochs")
        self._require(
            self.global_batch_samples % self.micro_batch_samples == 0,
            "global_batch_samples",
            f"must be a multiple of training.micro_batch_samples={self.micro_batch_samples}",
            f"use for example {nearest_multiple(self.global_batch_samples, self.micro_batch_samples)}",
        )
        slots = self.global_batch_samples // self.micro_batch_samples
        self._require(
            self.lanes is None or self.lanes <= slots,
            "lanes",
            f"must be at most the number of slots, {slots} (global_batch_samples / micro_batch_samples)",
            "leave it out to have it chosen",
        )
        self._check_schedule()
        self._check_omissions(max(self.batches) // self.micro_batch_samples)

    @property
    def steps_known(self) -> int | None:
        """The number of steps, if it does not depend on the data."""
        budgets = (self.max_tokens, self.max_epochs) != (None, None)
        return self.max_steps if budgets or self.max_steps is not None else STEPS_UNASKED

    @property
    def batches(self) -> list[int]:
        """The samples of a step, in the order in which the schedule has them."""
        return [self.global_batch_samples, *(change.batch for change in batch_changes.parse(self.batch_schedule))]

    def _check_schedule(self) -> None:
        """Raise ConfigError if the schedule of batches cannot be followed."""
        try:
            batches = self.batches
        except ValueError as error:
            raise setting_error(
                "training.batch_schedule", self.batch_schedule, f"{error}", batch_changes.FORM
            ) from None
        micro = self.micro_batch_samples
        odd = [batch for batch in batches if batch < 1 or batch % micro]
        self._require(
            not odd,
            "batch_schedule",
            f"each number of samples must be a multiple of training.micro_batch_samples={micro}",
            f"use for example {nearest_multiple(odd[0], micro)} in place of {odd[0]}" if odd else "",
        )

    def _check_omissions(self, slots: int) -> None:
        """Raise ConfigError if the steps and slots to be omitted cannot be."""
        try:
            found = omissions.parse(self.omit)
        except ValueError as error:
            raise setting_error("training.omit", self.omit, f"{error}", 'write for example "7, 9/2, 90-109"') from None
        beyond = max((slot for each in found for slot in each.slots), default=0)
        self._require(beyond < slots, "omit", f"a step has the slots 0 … {slots - 1}")


@dataclass(frozen=True)
class BatchConfig(Section):
    """Whether the batch follows the number of workers, and the learning rate the batch. By default neither does."""

    section: ClassVar[str] = "scaling"

    batch: Literal["constant", "per_worker"] = "constant"  # per_worker: a step has as many slots for each worker
    base_workers: int | None = None  # per_worker: with so many a step has training.global_batch_samples
    rule: Literal["none", "linear", "sqrt"] = "none"  # the rate is that of global_batch_samples times batch ratio, or √
    warmup_steps: int = 0  # from one rate to the next; 0: at once

    def check(self) -> None:
        self._at_least(1, "base_workers")
        self._at_least(0, "warmup_steps")
        self._require(
            self.batch == "constant" or self.base_workers is not None,
            "base_workers",
            'must be given with scaling.batch="per_worker"',
            "say for how many workers training.global_batch_samples is",
        )
        self._require(
            self.batch == "per_worker" or self.base_workers is None,
            "base_workers",
            'belongs to scaling.batch="per_worker"',
            "leave it out, or set that too",
        )
        self._require(
            self.warmup_steps == 0 or self.rule != "none",
            "warmup_steps",
            "needs a scaling.rule by which the learning rate changes",
            "leave it out, or set that too",
        )


@dataclass(frozen=True)
class ElasticConfig(Section):
    """How strictly results must agree, and how long anything may take before it counts as a failure."""

    section: ClassVar[str] = "elastic"

    exactness: Literal["strict", "relaxed"] = "strict"  # relaxed: hardware may differ, and so may bits
    min_workers: int = 1  # with fewer the job waits: for `launch --config`; elsewhere give launch --min-workers
    max_workers: int = 8  # the number of lanes follows from it
    canary: bool = True  # a joiner proves with one micro-batch that it computes the same bits
    deal_by_speed: bool = True  # a slow worker is dealt fewer lanes; off on one worker: lanes are dealt evenly
    progress_timeout_factor: float = 8.0  # hang deadline = factor * measured time of the phase, in the bounds below
    progress_timeout_min_s: float = 2.0  # the shortest deadline …
    progress_timeout_max_s: float = 300.0  # … and the longest
    first_step_timeout_s: float = 300.0  # the deadline while nothing is measured yet: compiling, warming up
    exchange_timeout_s: float = 600.0  # the longest wait for another worker

    def check(self) -> None:
        self._at_least(1, "min_workers", "max_workers")
        self._require(
            self.progress_timeout_factor > 1,
            "progress_timeout_factor",
            "must be greater than 1",
            "a deadline shorter than the measured time would kill healthy workers",
        )
        self._positive("progress_timeout_min_s", "first_step_timeout_s", "exchange_timeout_s")
        self._require(
            self.progress_timeout_min_s < self.progress_timeout_max_s,
            "progress_timeout_min_s",
            f"must be smaller than elastic.progress_timeout_max_s={self.progress_timeout_max_s}",
        )
        self._require(
            self.progress_timeout_max_s <= self.exchange_timeout_s,
            "progress_timeout_max_s",
            f"must not exceed elastic.exchange_timeout_s={self.exchange_timeout_s}",
            "a hang must be noticed before the transport gives up by itself",
        )


@dataclass(frozen=True)
class HealthConfig(Section):
    """What is done about failures that are no deaths."""

    section: ClassVar[str] = "health"

    # What is done if a loss, or else the gradient, is not finite …
    on_nonfinite: Literal["skip_step", "skip_slot", "rollback", "fail"] = "skip_step"
    # … and if a loss or a norm is far above those before
    on_spike: Literal["off", "warn", "skip_step", "lower_lr", "rollback"] = "off"
    rollback_steps: int = 10  # a rollback goes back at least so many steps before its cause …
    omit_steps: int = 20  # … and omits so many steps of data from there on
    spike_sigmas: float = 6.0  # of the loss: so many robust deviations above the median of the window
    spike_norm_sigmas: float | None = 12.0  # of the logarithm of the gradient's norm; null: the norm does not count
    spike_window: int = 128  # steps; half of them must be there before anything stands out
    spike_lr_scale: float = 0.1  # lower_lr: the factor of the learning rate in the step that stands out …
    spike_lr_steps: int = 32  # … from which it comes back in a straight line
    slow_factor: float = 1.5  # a worker whose slots take so many times as long as those of the others is slow …
    on_slow: Literal["warn", "replace"] = "warn"  # replace: a spare takes its place
    lasting_steps: int = 20  # … if that lasts for so many steps in a row …
    lasting_s: float = 60.0  # … and so many seconds; so must waits for data before they are told
    audit_interval: int | Literal["auto"] = "auto"  # steps after which workers compute lanes of others again; 0: never

    def check(self) -> None:
        value = self.audit_interval
        self._require(value == "auto" or value >= 0, "audit_interval", 'must be "auto" or at least 0')
        self._require(self.slow_factor > 1, "slow_factor", "must be greater than 1", "use 1.2 at least: paces vary")
        self._at_least(3, "lasting_steps")
        self._at_least(0, "lasting_s")
        self._positive("spike_sigmas", "spike_norm_sigmas")
        self._at_least(4, "spike_window")
        self._at_least(0, "rollback_steps")
        self._at_least(1, "spike_lr_steps")
        self._require(0 < self.spike_lr_scale < 1, "spike_lr_scale", "must lie between 0 and 1")
        self._require(
            self.omit_steps > self.rollback_steps,
            "omit_steps",
            f"must be greater than health.rollback_steps={self.rollback_steps}",
            "or the step that was the cause would be done again",
        )


@dataclass(frozen=True)
class ChaosConfig(Section):
    """Failures on purpose, to see a run of your own recover from them. `elastic-harness chaos` carries out plans with
    many more kinds, and judges them."""

    section: ClassVar[str] = "chaos"

    probability: float = 0.0  # with which a worker fails in a step, drawn for each worker and step; 0: nobody does
    after_step: int = 0  # nobody fails in a step before this one
    action: Literal["kill", "stop", "raise", "crash", "loop"] = "kill"  # what a worker does then: SIGKILL, SIGSTOP, …

    def check(self) -> None:
        self._require(0 <= self.probability < 1, "probability", "must lie between 0 and 1", "0 turns chaos off")
        self._at_least(0, "after_step")


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """When state is copied to shared memory, written to disk and uploaded, how much of it stays, and what a failure
    means.

    Intervals are in steps, or a time; 0: never, except at the end. With "auto" a tier saves as often as is worth its
    cost. The interval follows from the measured cost and the time between failures, within `interval_min_s` and
    `interval_max_s`.

    `peer_copies` and `node_name` are for `CheckpointManager` in a process group on several nodes. There each rank's
    snapshots in memory are copied to so many other nodes. Each copy costs as much memory again: docs/checkpoints.md.
    """

    section: ClassVar[str] = "checkpoint"

    checkpoint_interval: int | str = 50  # to local disk: steps, "auto", or a time such as "10min"
    memory_snapshot_interval: int | str = 10  # to shared memory only: the same
    each_epoch: bool = False  # to local disk at the end of each epoch as well
    upload_interval: int = 1  # to object storage: a checkpoint on disk that is at least so many steps past the last
    nvme_path: str | None = None  # the folder on local disk; null: "checkpoints" in the run's folder
    s3_bucket: str | None = None  # a bucket, or s3://bucket/prefix, gs://…, az://…; null: nothing is uploaded
    s3_prefix: str = ""  # a folder in it
    keep_last: int = 3  # on disk, the newest
    keep_every: int = 0  # and every one whose step is a multiple of this
    keep_best: int = 0  # and so many with the best `best_metric`
    best_metric: str = "loss"  # loss, grad_norm, lr, or a name that the script reports or validates
    best_mode: Literal["min", "max"] = "min"  # whether the smallest or the largest value is best
    s3_keep_last: int = 0  # in object storage; 0: all
    async_save_policy: Literal["warn", "retry", "fail"] = "warn"  # when a write or an upload fails
    upload_mbps_max: float = 0.0  # megabits per second; 0: no limit
    full_every: int = 0  # of so many uploads one is whole, the others only differences; 0: all are whole
    mtbf_hours: float | None = None  # mean time between failures, for "auto"; null: as observed
    interval_min_s: float = 1.0  # auto: at least so long between two saves …
    interval_max_s: float = 3600.0  # … and at most
    peer_copies: int = 1  # of a process group's snapshots in memory, on so many other nodes; 0: none
    node_name: str | None = None  # what tells this rank's machine from the others'; null: its host name and boot id

    def check(self) -> None:
        for name in ("checkpoint_interval", "memory_snapshot_interval"):
            value = getattr(self, name)
            fits = value >= 0 if isinstance(value, int) else value == "auto" or bool(seconds_of(value))
            self._require(fits, name, 'must be a number of steps, "auto", or a time such as "90s", "10min" or "2h"')
        self._at_least(1, "keep_last", "upload_interval")
        self._at_least(0, "keep_every", "keep_best", "s3_keep_last", "full_every", "upload_mbps_max")
        self._at_least(0, "peer_copies")
        self._require(self.node_name != "", "node_name", "must name this machine", "or leave it out")
        self._positive("mtbf_hours", "interval_min_s")
        self._require(self.nvme_path != "", "nvme_path", "must name a folder", "or leave it out")
        self._require(self.s3_bucket != "", "s3_bucket", "must name a bucket", "or leave it out")
        self._require(not self.s3_prefix or self.s3_bucket is not None, "s3_prefix", "needs checkpoint.s3_bucket")
        self._require(
            self.interval_min_s <= self.interval_max_s,
            "interval_min_s",
            f"must not exceed checkpoint.interval_max_s={self.interval_max_s}",
        )

    @property
    def upload_url(self) -> str | None:
        """The URL that checkpoints are uploaded to. A bare name is a bucket in S3."""
        if self.s3_bucket is None:
            return None
        url = self.s3_bucket if "://" in self.s3_bucket else f"s3://{self.s3_bucket}"
        return f"{url.rstrip('/')}/{self.s3_prefix.strip('/')}" if self.s3_prefix else url


@dataclass(frozen=True)
class Config(Section):
    """All settings of the harness itself. They are enough for a script with its own model and data.

    A program with settings of its own may hold them in sections of a subclass; `config.yaml` records them too.
    """

    seed: int = 1337  # of data order, initial weights and dropout
    training: TrainingConfig = field(default_factory=TrainingConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    scaling: BatchConfig = field(default_factory=BatchConfig)

    def check(self) -> None:
        self._require(0 <= self.seed < 2**63, "seed", "must lie in 0 … 2^63 - 1")
        health, kept = self.health, self.checkpoint
        goes_back = "rollback" in (health.on_nonfinite, health.on_spike)
        if goes_back and isinstance(kept.checkpoint_interval, int):
            reach = (kept.keep_last - 1) * kept.checkpoint_interval
            if reach < health.rollback_steps and kept.checkpoint_interval > 0:
                raise ConfigError(
                    f"checkpoint.keep_last is {kept.keep_last} and checkpoint.checkpoint_interval "
                    f"{kept.checkpoint_interval}, so the oldest checkpoint that is kept may be only {reach} steps old, "
                    f"but health.rollback_steps={health.rollback_steps} needs an older one; raise checkpoint.keep_last."
                )
        workers = self.scaling.base_workers
        if workers is not None:
            self._check_per_worker(workers)
        elif self.scaling.rule != "none" and not self.training.batch_schedule:
            raise setting_error(
                "scaling.rule",
                self.scaling.rule,
                "the batch never changes",
                'leave it out, or give training.batch_schedule or scaling.batch="per_worker"',
            )

    def _check_per_worker(self, workers: int) -> None:
        """Raise ConfigError if a step cannot have so many slots for each worker."""
        if self.training.batch_schedule:
            raise ConfigError(
                'scaling.batch is "per_worker", so the batch follows the workers; leave training.batch_schedule out.'
            )
        if self.training.omit or "rollback" in (self.health.on_nonfinite, self.health.on_spike):
            raise ConfigError(
                'scaling.batch is "per_worker", so nobody knows which samples a slot of a later step will have; leave '
                "training.omit out, and let health.on_nonfinite and health.on_spike do something else than rollback."
            )
        if self.slots % workers:
            raise setting_error(
                "scaling.base_workers",
                workers,
                f"a step has {self.slots} slots (global_batch_samples / micro_batch_samples), which must be as many "
                "for each worker",
                f"use training.global_batch_samples={nearest_multiple(self.slots, workers) * self._micro}",
            )

    @property
    def _micro(self) -> int:
        return self.training.micro_batch_samples

    @property
    def slots(self) -> int:
        """N: the number of micro-batches in one step, as long as the batch does not change."""
        return self.training.global_batch_samples // self._micro

    @property
    def slots_per_worker(self) -> int:
        """The micro-batches that a step has for each worker; 0: their number does not follow the workers."""
        return self.slots // self.scaling.base_workers if self.scaling.base_workers else 0

    @property
    def lanes_max(self) -> int:
        """The number of leaves of the gradient tree, if there are as many slots."""
        return self.training.lanes or 8 * self.elastic.max_workers

    @property
    def lanes_resolved(self) -> int:
        """The number of leaves of the gradient tree, as long as the batch does not change."""
        return min(self.slots, self.lanes_max)

    def unread(self) -> list[str]:
        """Return the settings that have no effect in a loop of one's own, each with what to do there instead."""
        least = self.elastic.min_workers
        said = f"elastic.min_workers is {least}, but it is for the built-in trainer; give launch --min-workers {least}."
        return [said] if least > 1 else []

    def fingerprint(self) -> dict[str, Any]:
        """Return entries of the run's fingerprint, as plain values: what the bits of a step depend on, but `start`
        cannot see."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Return the whole configuration as plain values that YAML and JSON can hold."""
        return plain(dataclasses.asdict(self))

    def to_yaml(self) -> str:
        """Return the whole configuration as YAML. ``load_config`` reads back an equal one."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_dict(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
        """Return the configuration that these plain values describe. A setting that they leave out has its default."""
        return build(cls, canonical(values), "")


def load_config(cls: type[ConfigT], path: str | Path | None, overrides: Sequence[str] = ()) -> ConfigT:
    """Return the configuration of class ``cls`` from a YAML file (or none) and ``section.key=value`` overrides.

    Later overrides win over earlier ones and over the file. Raises ConfigError for anything that is wrong.
    """
    values: dict[str, Any] = {} if path is None else canonical(read_yaml(Path(path)))
    check_keys(cls, values, "")
    for override in overrides:
        apply_override(cls, values, override)
    return build(cls, values, "")
