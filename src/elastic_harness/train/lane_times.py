"""How long a worker takes for its lanes, and what it spends that time on. Waiting for others does not count."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic_harness.processes import queued_s
from elastic_harness.train.batches import Shape


class Times(NamedTuple):
    """Seconds of the thread that computes: moments of its clocks, or what passed between two of them."""

    total_s: float = 0.0
    reading_s: float = 0.0  # in reading samples
    running_s: float = 0.0  # on a processor
    queued_s: float = 0.0  # ready to run, but without a processor

    @staticmethod
    def now(reading_s: float) -> Times:
        """Return the clocks now. Takes about 2 µs."""
        return Times(time.perf_counter(), reading_s, time.thread_time(), queued_s())

    def since(self, before: Times) -> Times:
        return Times(*(now - then for now, then in zip(self, before, strict=True)))

    def and_also(self, other: Times) -> Times:
        return Times(*map(sum, zip(self, other, strict=True)))


@dataclass
class LaneTimes:
    """The times of the slots in the lanes that this member computed whole in an attempt."""

    slots: int = 0
    spent: Times = field(default_factory=Times)

    def add(self, slots: int, spent: Times) -> None:
        self.slots += slots
        self.spent = self.spent.and_also(spent)

    def per_lane_us(self, shape: Shape) -> dict[str, int]:
        """Return the words of the header about them: microseconds for a lane of usual length, as lanes may differ by a
        slot. All are 0 if none was computed."""
        if not self.slots:
            return {}
        total, *parts = (round(1e6 * seconds / self.slots * shape.slots / shape.lanes) for seconds in self.spent)
        return dict(zip(("lane_us", "reading_us", "running_us", "queued_us"), (max(1, total), *parts), strict=True))
