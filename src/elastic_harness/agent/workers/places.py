"""The places of an elastic run: which local indexes have a worker, get a new one, or were given up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_harness.agent.workers.restarts import Cause, Ending, RestartLimits, restart_delay

REPLACEMENT_DELAY_S = 0.1  # so long a replacement that has to import waits after a loss: the recovery comes first
SPARE_DELAY_MAX_S = 2.0  # so long it waits at most for the next commit, if a spare can take the place
UNBORN_ERROR_DELAY_S = 3.0  # after an error before the first step: all other workers may be about to fail alike


@dataclass(frozen=True)
class Planned:
    """A start that is due at a time. With `after_commit` it is due earlier, once a step after that one is committed."""

    at: float
    after_commit: int | None = None


class Places:
    """Keeps `target` + `spares` workers alive. It holds the history of every place, and the starts that are due."""

    def __init__(self, target: int, spares: int, max_restarts: int) -> None:
        self.target = target
        self.spares = spares
        self.planned: dict[int, Planned] = {}
        self.given_up: dict[int, Cause] = {}
        self.endings: dict[int, list[Ending]] = {}
        self._limits = RestartLimits(max_restarts)

    @property
    def capacity(self) -> int:
        """The number of workers, spares included, that the places which were not given up can have."""
        return self.target + self.spares - len(self.given_up)

    def ended(self, index: int, ending: Ending, *, born: bool) -> tuple[float | None, str]:
        """Note how a worker ended. Return the delay until its place is filled again (None: never), and why."""
        history = self.endings.setdefault(index, [])
        history.append(ending)
        delay_s, why = restart_delay(history, self._limits)
        if delay_s is None:
            self.given_up[index] = ending.cause
        elif ending.cause == "user_error" and not born:
            delay_s = max(delay_s, UNBORN_ERROR_DELAY_S)
            why = "starts again unless every worker fails"
        return delay_s, why

    def refill(
        self,
        living: int,
        running: Iterable[int],
        committed: int,
        *,
        delay_s: float,
        after_loss: bool,
        imported: bool = False,
    ) -> None:
        """Plan as many starts as workers are missing, and drop those that are too many.

        While others train, a replacement waits a moment, so that its imports do not compete with the recovery. If a
        spare can take the place, it waits until the next commit, at most SPARE_DELAY_MAX_S. Without a spare it does not
        wait if everything will be `imported` already.
        """
        taken = set(running) | self.planned.keys() | self.given_up.keys()
        missing = self.capacity - living - len(self.planned)
        while missing < 0 and self.planned:
            del self.planned[max(self.planned)]
            missing += 1
        spare_ready = living >= self.target
        wait_s = delay_s
        if after_loss and living:
            replacement_s = 0.0 if imported else REPLACEMENT_DELAY_S
            wait_s = max(delay_s, SPARE_DELAY_MAX_S if spare_ready else replacement_s)
        at_commit = committed if after_loss and spare_ready and not delay_s else None
        free = (i for i in itertools.count() if i not in taken)
        for _ in range(missing):
            self.planned[next(free)] = Planned(time.monotonic() + wait_s, at_commit)

    def next_due(self, committed: int) -> int | None:
        """Return a place to fill now, or None. The place is then no longer planned."""
        now = time.monotonic()
        for index, start in sorted(self.planned.items()):
            if start.at <= now or (start.after_commit is not None and committed > start.after_commit):
                del self.planned[index]
                return index
        return None

    def newest_causes(self) -> list[Cause]:
        """Return how the last worker at each place ended."""
        return [history[-1].cause for history in self.endings.values()]
