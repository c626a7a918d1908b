"""The figures of a run: where its time went, what each failure cost, what was kept after a loss. Pure."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_harness.runs.episodes import HEALTHY_STEPS, Episode, NewStep, Tale

STEPS_MIN = 3  # of which a speed is told


@dataclass(frozen=True)
class KeptThroughput:
    """What of the throughput was kept between a loss and the full size."""

    workers_before: int
    workers_after: int
    steps: int  # that were measured
    share: float  # of the tokens in a second before; of the steps, where there are no tokens


@dataclass(frozen=True)
class Account:
    """Where the time of a run went. The parts add up to `wall_s`."""

    wall_s: float  # since the first launch, to the newest event
    start_s: float  # until the first step began
    trained_s: float  # in which steps were computed that count
    held_up_s: float  # by failures: so much later came the next new steps
    down_s: float  # between a launch that failed, or was cut off, and the next one
    paused_s: float  # between a launch that was stopped or finished, and the next one
    after_s: float  # since the newest step

    @property
    def effective(self) -> float | None:
        """The share of the time that was trained. Time in which the run was not meant to train does not count."""
        meant_s = self.wall_s - self.paused_s
        return self.trained_s / meant_s if meant_s > 0 else None


def account(tale: Tale) -> Account:
    """Return where the time of a run went."""
    began, newest = tale.started_at, tale.newest_at
    if newest is None:
        return Account(0, 0, 0, 0, 0, 0, 0)
    began = newest if began is None else began
    wall_s = max(0.0, newest - began)
    if not tale.commits:
        return Account(wall_s, wall_s, 0, 0, 0, 0, 0)
    first, last = tale.commits[0], tale.commits[-1]
    start_s = max(0.0, first.t - began - (tale.healthy_s or 0.0))
    held_up_s = sum(episode.cost_s or 0.0 for episode in tale.episodes)
    after_s = max(0.0, newest - last.t)
    trained_s = max(0.0, wall_s - start_s - held_up_s - tale.down_s - tale.paused_s - after_s)
    return Account(wall_s, start_s, trained_s, held_up_s, tale.down_s, tale.paused_s, after_s)


def kept(tale: Tale, episode: Episode) -> KeptThroughput | None:
    """Return what of the throughput was kept after an episode, until all workers were there again; None if they were at
    once, or if too few steps are known."""
    if episode.over_step is None or not episode.interrupted:
        return None
    at = bisect.bisect_left(tale.commits, episode.over_step, key=lambda commit: commit.step)
    before = tale.commits[max(0, at - HEALTHY_STEPS) : at]
    after = list(_until_full(tale.commits, at, episode.world_before))
    speed_before, speed_after = _speeds(before), _speeds(after)
    if min(len(speed_before), len(speed_after)) < STEPS_MIN:
        return None
    share = statistics.median(speed_after) / statistics.median(speed_before)
    return KeptThroughput(episode.world_before, min(commit.world_size for commit in after), len(speed_after), share)


def _until_full(commits: Sequence[NewStep], at: int, workers: int) -> Iterator[NewStep]:
    for commit in itertools.islice(commits, at, None):
        if commit.world_size >= workers:
            return
        yield commit


def _speeds(commits: Sequence[NewStep]) -> list[float]:
    """Return tokens in a second, or steps where there are no tokens. The first step after a recovery has no time."""
    return [(commit.tokens or 1) / commit.step_s for commit in commits if commit.step_s]


def held_up(tale: Tale) -> list[float]:
    """Return by how much each failure that interrupted training held it up, as far as that is known."""
    return [episode.cost_s for episode in tale.episodes if episode.cost_s is not None]


def as_object(tale: Tale, target_s: float | None) -> dict[str, Any]:
    """Return all figures for --json."""
    parts, costs = account(tale), held_up(tale)
    return {
        **vars(parts),
        "effective": parts.effective,
        "steps": len(tale.commits),
        "healthy_step_s": tale.healthy_s,
        "target_recovery_s": target_s,
        "within_target": None if target_s is None else sum(cost <= target_s for cost in costs),
        "recoveries": len(costs),
        "held_up_s_median": statistics.median(costs) if costs else None,
        "held_up_s_worst": max(costs, default=None),
        "kept": [vars(each) if (each := kept(tale, episode)) else None for episode in tale.episodes],
    }
