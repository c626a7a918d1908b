"""Says when a run's steps take longer than they used to. Pure.

The measure is the run's own best hour with the same number of members and of slots in a step. Until the first hour is
over, the first steps are the measure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from elastic_harness.health.lasting import Lasting, Turn

TIMES_MAX = 1.5  # so many times as long as in the best hour is slow
RECENT = 20  # steps whose median counts as the present time of a step
LEAST = 100  # steps that a measure needs
HOUR_S = 3600.0
LASTING_S = 60.0
KEPT = 4096  # steps of an hour that are looked at, the newest


@dataclass(frozen=True)
class Slowdown:
    """Steps that have been slow for long."""

    step_s: float
    best_s: float
    members: int


class ThroughputWatch:
    """Follows the time of a run's steps."""

    def __init__(self) -> None:
        self._best_s: dict[tuple[int, int], float] = {}  # by members and slots, the median of the best hour
        self._begin((0, 0), 0.0)

    def _begin(self, size: tuple[int, int], now_s: float) -> None:
        self._size = size
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._slow = Lasting(TIMES_MAX, RECENT, LASTING_S, smooth=1)
        self._begin_hour(now_s)

    def _begin_hour(self, now_s: float) -> None:
        self._hour: deque[float] = deque(maxlen=KEPT)
        self._hour_began_s = now_s

    def note(self, members: int, slots: int, step_s: float, now_s: float) -> Slowdown | None:
        """Take one more step. Return what is to be told: once, and again only if steps were as quick as usual
        meanwhile. slots: of the step; 0: not known."""
        size = members, slots
        if size != self._size:
            self._begin(size, now_s)
        self._recent.append(step_s)
        self._hour.append(step_s)
        best_s = self._best_s.get(size)
        if len(self._hour) >= LEAST and (best_s is None or now_s - self._hour_began_s >= HOUR_S):
            hour_s = median(self._hour)
            self._best_s[size] = hour_s if best_s is None else min(best_s, hour_s)
            self._begin_hour(now_s)
        if best_s is None or len(self._recent) < RECENT:
            return None
        usual_s = median(self._recent)
        change = self._slow.note(usual_s / max(1e-9, best_s), now_s)
        return Slowdown(usual_s, best_s, members) if change is Turn.LASTS else None
