"""Says from readings of memory whether it is nearly full, and when it will be if it goes on growing. Pure.

A forecast needs a trend. Memory that grows in one jump (a cache, a second model) is no trend, nor is a sawtooth. So the
rule looks at the slopes between all pairs of readings: a tenth of them at most may be flat or fall. The forecast is
made with their median (Theil and Sen), which a few odd readings do not move.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, quantiles
from typing import Any

from elastic_harness.health.faults import Severity

WINDOW = 64  # readings that are kept
LEAST = 16  # readings before there is a forecast
REACH = 4.0  # a forecast reaches so many times as far as its readings go back
FREED = 0.1  # of the limit: with so much less than when it was told, the next alarm is news
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryReading:
    """What one pool of memory held at a moment."""

    at_s: float  # on any clock that only moves forward
    pool: str  # in words: "the machine's memory"
    used_bytes: int  # without what the kernel would give back by itself
    limit_bytes: int


@dataclass(frozen=True)
class MemoryVerdict:
    """Why a pool is worth an alarm."""

    severity: Severity
    message: str
    evidence: dict[str, Any]


class MemoryWatch:
    """Says of each pool what is worth an alarm: once, and again after a window of readings, when it has become worse,
    or when much was freed in between. fraction_max: of a limit; more is nearly full. forecast_s: a pool that will be
    full within so long is told."""

    def __init__(self, fraction_max: float, forecast_s: float) -> None:
        self._fraction_max, self._forecast_s = fraction_max, forecast_s
        self._readings: dict[str, deque[MemoryReading]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._told: dict[str, tuple[Severity, int, int]] = {}  # of a pool: what was told last, bytes, readings since

    def judge(self, newest: Iterable[MemoryReading]) -> Iterator[MemoryVerdict]:
        """Yield what is to be told after one more reading of each pool."""
        for reading in newest:
            readings = self._readings[reading.pool]
            readings.append(reading)
            verdict = judge(list(readings), self._fraction_max, self._forecast_s)
            self._forget_if_freed(reading)
            if verdict is not None and self._is_news(reading, verdict.severity):
                yield verdict

    def _is_news(self, reading: MemoryReading, severity: Severity) -> bool:
        told = self._told.get(reading.pool)
        news = told is None or told[2] >= WINDOW or (severity, told[0]) == (Severity.CRITICAL, Severity.WARNING)
        if told is None or news:
            told = (severity, reading.used_bytes, 0)
        self._told[reading.pool] = (*told[:2], told[2] + 1)
        return news

    def _forget_if_freed(self, reading: MemoryReading) -> None:
        told = self._told.get(reading.pool)
        if told is not None and reading.used_bytes < told[1] - FREED * reading.limit_bytes:
            del self._told[reading.pool]


def judge(readings: Sequence[MemoryReading], fraction_max: float, forecast_s: float) -> MemoryVerdict | None:
    """Return a verdict about one pool from its readings, the newest last; None if there is nothing to say."""
    newest = readings[-1]
    used, limit = newest.used_bytes, newest.limit_bytes
    held = f"{newest.pool} holds {used / GIB:.2f} of {limit / GIB:.2f} GiB"
    evidence = {"pool": newest.pool, "used_bytes": used, "limit_bytes": limit}
    if used >= fraction_max * limit:
        message = f"{held}, {used / limit:.1%}; use less, or raise the limit"
        return MemoryVerdict(Severity.CRITICAL, message, evidence)
    left_s = seconds_until_full(readings)
    if left_s is None or left_s > forecast_s:
        return None
    seen_s = newest.at_s - readings[0].at_s
    message = f"{held} and grows: full in {left_s:.0f} s, as the last {seen_s:.0f} s went; look for what is kept"
    return MemoryVerdict(Severity.WARNING, message, {**evidence, "full_in_s": round(left_s, 1)})


def seconds_until_full(readings: Sequence[MemoryReading]) -> float | None:
    """Return the seconds from the newest reading until the pool is full, by the trend. None: there is no trend, there
    are too few readings, or it is further away than they reach."""
    if len(readings) < LEAST:
        return None
    lately = _slope_lately(readings)
    if lately <= 0:  # so it is most of the time, and the slopes of all pairs take a hundred times as long
        return None
    pairs = [(a, b) for a, b in combinations(readings, 2) if b.at_s > a.at_s]
    if len(pairs) < 2:
        return None
    slopes = [(b.used_bytes - a.used_bytes) / (b.at_s - a.at_s) for a, b in pairs]
    low, slope = quantiles(slopes, n=10, method="inclusive")[0], median(slopes)
    if low <= 0 or lately < slope / 4:
        return None
    left_s = max(0.0, (readings[-1].limit_bytes - readings[-1].used_bytes) / slope)
    return left_s if left_s <= REACH * (readings[-1].at_s - readings[0].at_s) else None


def _slope_lately(readings: Sequence[MemoryReading]) -> float:
    """Return the growth from the third quarter of the readings to the last one, in bytes per second. Growth that has
    ended is no trend."""
    count = len(readings) // 4
    before, last = readings[-2 * count : -count], readings[-count:]
    rise = median(each.used_bytes for each in last) - median(each.used_bytes for each in before)
    return rise / max(1e-9, median(each.at_s for each in last) - median(each.at_s for each in before))
