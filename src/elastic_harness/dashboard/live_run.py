"""A run as its events tell it so far, in a state of bounded size. Pure: events go in, one by one."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_harness.dashboard.series import Series, number, point_of
from elastic_harness.runs.episodes import SECONDS_MAX, Tale, Teller
from elastic_harness.runs.story import Crew, WorkerStory, validation_loss

COMMITS_MAX = 4096  # whose times are kept
WORKERS_MAX = 2000  # that have ended, of which the newest are kept; the same for what else comes with each failure
CHANGES_MAX = 1000
RECENT_STEPS = 20  # whose median is the present speed
BEST_LEAST = 20  # steps that a best speed is told from
ELSEWHERE = 0  # in place of the process of a worker on another node
_ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
Event = Mapping[str, Any]


@dataclass(frozen=True)
class GenerationChange:
    """A new generation."""

    t: float
    number: int
    workers: int
    urgent: bool
    reason: str


@dataclass(frozen=True)
class SavedVersion:
    """The newest checkpoint of a tier."""

    t: float
    version: int
    seconds: float | None
    nbytes: int | None
    where: str


class LiveRun:
    """What is known of a run. `take` takes its events in the order of time."""

    def __init__(self) -> None:
        self.crew = Crew()
        self.series = Series()
        self.changes: deque[GenerationChange] = deque(maxlen=CHANGES_MAX)
        self.waits: deque[tuple[float, float | None]] = deque(maxlen=CHANGES_MAX)  # from, to; None: it goes on
        self.saved: dict[str, SavedVersion] = {}  # by tier
        self.not_saved: tuple[float, str, str] | None = None  # the newest failure: time, event, error
        self.alarms: deque[Event] = deque(maxlen=100)
        self.stacks: dict[str, str] = {}  # member -> the file with the stacks of its hang
        self.validation: deque[tuple[int, float]] = deque(maxlen=CHANGES_MAX)
        self.best_tokens_per_s: float | None = None
        self.damaged = 0  # lines and events that could not be used
        self.happened = 0  # events other than commits
        self.committed = -1, -1  # the newest: lineage, step
        self.newest_t = 0.0
        self._teller = Teller()
        self._speeds: deque[float] = deque(maxlen=RECENT_STEPS)

    def take(self, event: Event, begin: int = 0, node: str = "") -> None:
        """Take one event, whose line begins at an offset of its log. One that cannot be used is counted."""
        t = event.get("t")
        if not isinstance(t, int | float) or not 0 <= t < SECONDS_MAX:
            self._note_damage("")
            return
        self.newest_t = max(self.newest_t, t)
        name = event["event"]
        if name == "step_committed":
            commit = self._commit_of(event)
            if commit is None or commit <= self.committed:  # another node tells of it as well
                if commit is None:
                    self._note_damage("")
                return
            self.committed = commit
        else:
            self.happened += 1
        self._teller.take(float(t), node, event, self._note_damage)
        try:
            self.crew.apply(event)
            self._take(name, event, begin)
        except _ODD:
            self._note_damage("")
        if name == "run_started" or (name != "step_committed" and self.happened % 64 == 0):
            self._forget_old()

    def told(self) -> Tale:
        """Return what went wrong so far."""
        return self._teller.told()

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens in a second of the recent steps, without what failures cost."""
        return statistics.median(self._speeds) if self._speeds else None

    @staticmethod
    def _commit_of(event: Event) -> tuple[int, int] | None:
        lineage, step = event.get("lineage") or 0, event.get("step")
        return (lineage, step) if isinstance(lineage, int) and isinstance(step, int) else None

    def _note_damage(self, _damage: str) -> None:
        self.damaged += 1

    def _take(self, name: str, event: Event, begin: int) -> None:
        match name:
            case "step_committed":
                self._commit(event, begin)
            case "run_started" | "run_finished":
                self._end_wait(float(event["t"]))
                self._speeds.clear()
            case "generation":
                self._end_wait(float(event["t"]))
                reason, urgent = str(event.get("reason") or ""), bool(event.get("urgent"))
                members = event["members"]
                t, generation = float(event["t"]), int(event["number"])
                self._note_elsewhere(t, urgent=urgent)
                self.changes.append(GenerationChange(t, generation, len(members), urgent, reason))
            case "waiting":
                if not self.waits or self.waits[-1][1] is not None:
                    self.waits.append((float(event["t"]), None))
            case "checkpoint_saved" | "checkpoint_uploaded":
                tier = "disk" if name == "checkpoint_saved" else "object storage"
                nbytes = number(event.get("bytes"))
                where = str(event.get("path") or event.get("url") or "")
                self.saved[tier] = SavedVersion(
                    float(event["t"]),
                    int(event["step"]),
                    number(event.get("seconds")),
                    None if nbytes is None else int(nbytes),
                    where,
                )
            case "checkpoint_failed" | "upload_failed":
                self.not_saved = float(event["t"]), name, str(event.get("error") or "")
            case "alarm":
                self.alarms.append(event)
            case "hang":
                if event.get("stacks"):
                    about = [*event.get("members", ()), *(m for c in event.get("culprits", ()) for m in c["members"])]
                    self.stacks.update(dict.fromkeys(map(str, about), str(event["stacks"])))
            case "validation":
                loss = validation_loss(event)
                if loss is not None:
                    self.validation.append((int(event["step"]), loss))

    def _commit(self, event: Event, begin: int) -> None:
        point = point_of(event, begin)
        self._end_wait(point.t)
        if self.series.points and point.workers != self.series.points[-1].workers:
            self._speeds.clear()
        self.series.add(point)
        speed = point.tokens_per_s
        if speed is not None:
            self._speeds.append(speed)
            if len(self._speeds) >= BEST_LEAST:
                usual = statistics.median(self._speeds)
                self.best_tokens_per_s = max(usual, self.best_tokens_per_s or 0.0)
        self._teller.thin(COMMITS_MAX)

    def _note_elsewhere(self, t: float, *, urgent: bool) -> None:
        """Note the workers of nodes whose folders are not here: all that is known of them are the generations."""
        workers, members = self.crew.workers, self.crew.members
        for worker in workers.values():
            if worker.pid == ELSEWHERE and worker.end is None and worker.member not in members:
                worker.end, worker.ended = "failed" if urgent else "stopped", t
        for rank, member in enumerate(members):
            if member not in workers:
                workers[member] = WorkerStory(member, ELSEWHERE, t, rank=rank, placed=t)

    def _end_wait(self, t: float) -> None:
        if self.waits and self.waits[-1][1] is None:
            self.waits[-1] = self.waits[-1][0], t

    def _forget_old(self) -> None:
        """Drop the oldest of what comes with each failure, if it is very much."""
        crew = self.crew
        ended = [member for member, worker in crew.workers.items() if worker.end is not None]
        for member in ended[:-WORKERS_MAX]:
            del crew.workers[member]
            crew.noticed.pop(member, None)
            self.stacks.pop(member, None)
        for number_ in sorted(crew.recoveries)[:-WORKERS_MAX]:
            del crew.recoveries[number_]
        del crew.worlds[:-WORKERS_MAX], crew.incidents[:-WORKERS_MAX]
