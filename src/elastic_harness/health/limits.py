"""How long work may take before it counts as hung: learned from how long it took before. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FADES_TO = 0.9  # with every measurement, so that one slow outlier does not stay for ever


@dataclass(frozen=True)
class TimeLimit:
    """A multiple of the slowest recent duration, within bounds; `first_s` at least until one was measured (compiling,
    warming up)."""

    factor: float
    min_s: float
    max_s: float
    first_s: float

    def seconds(self, slowest_s: float | None, known_s: float = 0.0) -> float:
        """Return the limit. slowest_s: as `slowest` returns it. known_s: the work takes so long at least, from another
        source."""
        learned_s = self.factor * max(slowest_s or 0.0, known_s)
        bounded_s = min(max(learned_s, self.min_s), self.max_s)
        return bounded_s if slowest_s is not None else max(bounded_s, self.first_s)


def slowest(before_s: float | None, measured_s: float) -> float:
    """Return the slowest recent duration after one more was measured."""
    return max(measured_s, FADES_TO * (before_s or 0.0))
