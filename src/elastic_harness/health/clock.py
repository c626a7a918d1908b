"""Says when the wall clock was set. Pure."""

from __future__ import annotations

STEP_MIN_S = 1.0  # an NTP daemon that only adjusts the clock's speed changes less than a millisecond between two looks


class ClockWatch:
    """Compares the wall clock with one that only counts."""

    def __init__(self) -> None:
        self._offset_s: float | None = None

    def note(self, wall_s: float, elapsed_s: float) -> float:
        """Return by how much the wall clock was set since the last look; 0: it was not. elapsed_s: of a clock that goes
        on while the machine sleeps."""
        before, self._offset_s = self._offset_s, wall_s - elapsed_s
        step_s = 0.0 if before is None else self._offset_s - before
        return step_s if abs(step_s) >= STEP_MIN_S else 0.0
