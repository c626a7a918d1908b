"""How often to save: the cost of a checkpoint weighed against what a failure loses."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from elastic_harness.config import CheckpointConfig, seconds_of

PRIOR_S = 86_400.0  # before anything is known, one failure a day is assumed


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the time between checkpoints that loses least, for a checkpoint that costs `cost_s` and a mean time
    between failures of `mtbf_s`, both in seconds.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22 (2006), eq. 37; its first term is J. W. Young's √(2·C·M), Communications of the ACM 17 (1974).
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(cost_s / (2 * mtbf_s))
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - cost_s


def mtbf_s(elapsed_s: float, failures: int) -> float:
    """Return the mean time between failures as observed, with one failure in `PRIOR_S` assumed before: the posterior
    mean of a Gamma prior of shape 1."""
    return (PRIOR_S + elapsed_s) / (1 + failures)


class Costs:
    """The cost of saving, measured by the duration of steps. There is a mean for the steps in which a snapshot was
    copied, one for the steps beside which the writer was at work, and one for the others. Each mean forgets slowly."""

    _KEEP = 0.8

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._writing_s = 0.0
        self._drains = 0

    def step(self, seconds: float, *, copied: bool, writing: bool) -> None:
        """Take note of one step."""
        kind = "copied" if copied else "writing" if writing else "quiet"
        before = self._means.get(kind)
        self._means[kind] = seconds if before is None else self._KEEP * before + (1 - self._KEEP) * seconds
        if kind == "writing" and (quiet := self._means.get("quiet")) is not None:
            self._writing_s += max(0.0, seconds - quiet)

    def wrote(self) -> None:
        """Note that a write to disk has begun."""
        self._drains += 1

    @property
    def copy_s(self) -> float:
        """The cost of a snapshot in memory, at least a millisecond. A millisecond is also the guess before anything is
        known."""
        if {"copied", "quiet"} <= self._means.keys():
            return max(1e-3, self._means["copied"] - self._means["quiet"])
        return 1e-3

    @property
    def disk_s(self) -> float:
        """The cost of a checkpoint on disk: the snapshot, and the writer's share of the machine."""
        return self.copy_s + self._writing_s / max(1, self._drains)


class LastSaved(NamedTuple):
    """The state that need not be saved again: where training began or was restored, or what was last saved to a
    tier."""

    version: int = 0
    at: float = 0.0  # when that save was begun, by the monotonic clock


class Timing:
    """Says when a tier is due. `failures`: how many were seen since this object was made."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._since = time.monotonic()
        self._stepped_at: float | None = None
        self._copied = False
        self._wrote_beside = False
        self.costs = Costs()
        self.failures = 0

    @property
    def measures(self) -> bool:
        """Whether an interval follows what saving costs."""
        return "auto" in (self._config.checkpoint_interval, self._config.memory_snapshot_interval)

    @property
    def by_clock(self) -> bool:
        """Whether an interval is a time, on which processes must agree."""
        config = self._config
        return any(isinstance(each, str) for each in (config.checkpoint_interval, config.memory_snapshot_interval))

    def saved(self, *, to_disk: bool) -> None:
        """Note that a snapshot was begun in the step that runs."""
        self._copied = True
        if to_disk:
            self._wrote_beside = True
            self.costs.wrote()

    def stepped(self, *, writing: bool) -> None:
        """Note that a step has ended and another begins. `writing`: whether the writer is at work."""
        now = time.monotonic()
        if self._stepped_at is not None:
            self.costs.step(now - self._stepped_at, copied=self._copied, writing=self._wrote_beside)
        self._stepped_at, self._copied, self._wrote_beside = now, False, writing

    def is_due(self, version: int, last: LastSaved, *, to_disk: bool) -> bool:
        """Return whether the state after `version` steps is to be saved. With a number it is due when a multiple of the
        interval was passed since the last save, however many steps lie between two calls. With "auto" or a time it is
        due when the time is up. A last save ahead of `version` belongs to a history that was given up, and does not
        count."""
        config = self._config
        interval = config.checkpoint_interval if to_disk else config.memory_snapshot_interval
        last_version = last.version if last.version <= version else 0
        if not interval or version <= last_version:
            return False
        if isinstance(interval, int):
            return version // interval * interval > last_version
        due_s = self.interval_s(to_disk=to_disk) if interval == "auto" else seconds_of(interval) or 0.0
        return time.monotonic() - max(last.at, self._since) >= due_s

    def interval_s(self, *, to_disk: bool) -> float:
        """Return the best time between two snapshots, within the configured bounds."""
        config = self._config
        if config.mtbf_hours is not None:
            between_s = 3600 * config.mtbf_hours
        else:
            between_s = mtbf_s(time.monotonic() - self._since, self.failures)
        best_s = daly_interval_s(self.costs.disk_s if to_disk else self.costs.copy_s, between_s)
        return min(max(best_s, config.interval_min_s), config.interval_max_s)
