"""Says when a measured value has been above a limit for long, and when that is over. Pure.

One odd reading says nothing, so the median of a few is judged. A value that hovers at the limit must not come and go:
it begins at the limit, and is over only well below it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from statistics import median

BACK = 0.85  # of the limit: only below that it is over


class Turn(Enum):
    """What one more reading has changed."""

    ROSE = auto()  # the value is above the limit now; perhaps that passes
    FELL = auto()  # it has passed
    LASTS = auto()  # the value has been above the limit for long
    OVER = auto()  # it was above for long, and has been below for some readings in a row


class Lasting:
    """Follows one value. "For long": in so many readings in a row, and for so many seconds. smooth: of so many newest
    readings the median is judged. rest: it is over after so many readings in a row (default: as many as it takes to
    last)."""

    def __init__(
        self, limit: float, readings: int, seconds: float, *, smooth: int = 3, rest: int | None = None
    ) -> None:
        self._limit, self._readings, self._seconds = limit, readings, seconds
        self._rest = readings if rest is None else rest
        self._recent: deque[float] = deque(maxlen=smooth)
        self._judged: deque[float] = deque(maxlen=max(readings, smooth))
        self._above = 0  # readings of this rise
        self._below = 0  # in a row, since it was told that it lasts
        self._since = 0.0
        self.lasts = False

    @property
    def value(self) -> float:
        """The median of the newest readings, of as many as it takes until the value counts as lasting."""
        return median(self._judged)

    @property
    def readings(self) -> int:
        """How many readings this rise has."""
        return self._above

    def note(self, value: float, now_s: float) -> Turn | None:
        """Take one more reading. now_s: on any clock that only moves forward."""
        self._recent.append(value)
        self._judged.append(value)
        usual = median(self._recent)
        if usual >= self._limit:
            self._below = 0
            self._above += 1
            if self._above == 1:
                self._since = now_s
            if not self.lasts and self._above >= self._readings and now_s - self._since >= self._seconds:
                self.lasts = True
                return Turn.LASTS
            return Turn.ROSE if self._above == 1 else None
        if usual >= BACK * self._limit or not self._above:
            return None
        self._below += 1
        if self.lasts and self._below < self._rest:
            return None
        change = Turn.OVER if self.lasts else Turn.FELL
        self._above, self._below, self.lasts = 0, 0, False
        return change
