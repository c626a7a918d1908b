"""How long each phase may take before the agent takes the worker for hung: learned, within configured bounds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from elastic_harness.config import ElasticConfig
from elastic_harness.contract.board import Board, Phase
from elastic_harness.health.limits import TimeLimit, slowest


class Deadlines:
    """A multiple of the slowest recent duration of a phase; `first_step_timeout_s` until one was measured (compiling,
    warming up). Durations fade (health/limits.py), so one slow outlier does not stay for ever.

    A worker that was ended because it did not finish its work in a step within D seconds is a measurement as well: such
    work takes D at least. So in that step everybody has the same multiple of D, and each further try has longer."""

    def __init__(self, config: ElasticConfig, board: Board) -> None:
        self._limit = TimeLimit(
            config.progress_timeout_factor,
            config.progress_timeout_min_s,
            config.progress_timeout_max_s,
            config.first_step_timeout_s,
        )
        self._board = board
        self._slowest_s: dict[Phase, float] = {}
        self._overdue_s: dict[int, float] = {}

    def heed_overdue(self, overdue: Iterable[tuple[int, float]]) -> None:
        """Give the work of these steps longer: somebody did not finish it within so many seconds."""
        self._overdue_s = dict(overdue)

    def limit_s(self, phase: Phase, step: int) -> float:
        return self._limit.seconds(self._slowest_s.get(phase), self._overdue_s.get(step, 0.0))

    def enter_phase(self, phase: Phase, step: int = -1, slot: int = -1) -> None:
        """Show a phase on the board with its learned deadline."""
        self._board.show(phase, step, slot, self.limit_s(phase, step))

    @contextmanager
    def measured(self, phase: Phase, step: int = -1, slot: int = -1) -> Iterator[None]:
        """Show a phase on the board for the time of a block, and learn from it."""
        self.enter_phase(phase, step, slot)
        start = time.monotonic()
        yield
        self.observe(phase, time.monotonic() - start)

    def observe(self, phase: Phase, seconds: float) -> None:
        self._slowest_s[phase] = slowest(self._slowest_s.get(phase), seconds)
