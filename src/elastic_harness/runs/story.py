"""The story that a run's events tell, as values. It is built one event at a time, for the live view and for the
report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

RECENT_STEPS = 8


@dataclass(frozen=True)
class CommittedStep:
    """One committed step, at the time that the log gives."""

    t: float
    step: int
    loss: float
    tokens: int
    world_size: int
    generation: int
    step_s: float


@dataclass
class WorkerStory:
    """One member. `end` says how it left: 'killed', 'failed' or 'stopped', and None while it lives."""

    member: str
    pid: int
    started: float
    spare: bool = False
    rank: int | None = None
    placed: float | None = None
    ended: float | None = None
    end: str | None = None
    host: str = ""
    born_spare: bool = False  # it waited for a place before it was placed


@dataclass(frozen=True)
class Recovery:
    """One recovery as the slowest reporter saw it, from `noticed` on, with the durations of its stages in milliseconds,
    in order."""

    t: float
    noticed: float
    generation: int
    stages: Mapping[str, float]
    total_ms: float
    step: int | None


@dataclass(frozen=True)
class Kill:
    """One strike of the demo: which members were killed with SIGKILL, when, and which step was running."""

    t: float
    step: int
    members: tuple[str, ...]
    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    by: str = "plan"

    @property
    def label(self) -> str:
        return "rank " + " and rank ".join(str(rank) for rank in self.ranks)


@dataclass
class Crew:
    """Who was there: workers, generations, recoveries. It grows with what happens to workers, not with the steps.
    `apply` takes events in log order."""

    started: float | None = None
    configured: Mapping[str, Any] = field(default_factory=dict)
    lineage: int = 0
    generation: int = 0
    members: tuple[str, ...] = ()
    workers: dict[str, WorkerStory] = field(default_factory=dict)
    recoveries: dict[int, Recovery] = field(default_factory=dict)
    worlds: list[tuple[float, int]] = field(default_factory=list)
    noticed: dict[str, float] = field(default_factory=dict)
    incidents: list[Mapping[str, Any]] = field(default_factory=list)
    waiting: str | None = None
    finished: Mapping[str, Any] | None = None

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event. Unknown events are ignored. A step that is told again replaces what was known of it."""
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)

    def alive(self, member: str) -> bool:
        worker = self.workers.get(member)
        return worker is not None and worker.end is None

    def up(self) -> list[WorkerStory]:
        """Return the living members of the current generation, in rank order."""
        return [self.workers[member] for member in self.members if self.alive(member)]

    def spares(self) -> list[WorkerStory]:
        return [worker for worker in self.workers.values() if worker.end is None and worker.member not in self.members]

    def stages_after(self, t: float, until: float = math.inf) -> dict[str, float]:
        """Return milliseconds from a failure at `t` to a working group, by stages, detection first. Empty while there
        is none, or if there was none until that time."""
        later = [recovery for recovery in self.recoveries.values() if t < recovery.t <= until]
        if not later:
            return {}
        first = min(later, key=lambda recovery: recovery.t)
        return {"detect_ms": max(0.0, 1000 * (first.noticed - t)), **first.stages}

    def mark_killed(self, kill: Kill) -> None:
        """Note that the demo killed these members, before the log says so."""
        for member in kill.members:
            worker = self.workers.get(member)
            if worker is not None:
                worker.end, worker.ended = "killed", kill.t

    def _on_run_started(self, event: Mapping[str, Any]) -> None:
        self.started = self.started if self.started is not None else float(event["t"])
        self.lineage = int(event.get("lineage") or 0)
        self.finished = None

    def _on_run_configured(self, event: Mapping[str, Any]) -> None:
        self.configured = event

    def _on_worker_started(self, event: Mapping[str, Any]) -> None:
        member = str(event["member"])
        self.workers[member] = WorkerStory(
            member,
            int(event["pid"]),
            float(event["t"]),
            bool(event.get("spare")),
            event.get("rank"),
            host=str(event.get("host") or ""),
            born_spare=bool(event.get("spare")),
        )

    def _on_generation(self, event: Mapping[str, Any]) -> None:
        self.generation, self.waiting = int(event["number"]), None
        self.members = tuple(str(member) for member in event["members"])
        self.worlds.append((float(event["t"]), len(self.members)))
        for rank, member in enumerate(self.members):
            worker = self.workers.get(member)
            if worker is not None:
                worker.rank, worker.spare = rank, False
                if worker.placed is None:
                    worker.placed = float(event["t"])

    def _on_worker_joined(self, event: Mapping[str, Any]) -> None:
        worker = self.workers.get(str(event["member"]))
        if worker is not None and worker.placed is None:
            worker.placed = float(event["t"])

    def _on_step_committed(self, event: Mapping[str, Any]) -> None:
        self.waiting = None
        self.lineage = int(event.get("lineage") or self.lineage)

    def _on_failure_detected(self, event: Mapping[str, Any]) -> None:
        member, t = str(event.get("member")), float(event.get("t_detected") or event["t"])
        self.noticed.setdefault(member, t)
        worker = self.workers.get(member)
        if worker is not None and worker.end is None:
            worker.end, worker.ended = "failed", t

    def _on_worker_stopped(self, event: Mapping[str, Any]) -> None:
        worker = self.workers.get(str(event.get("member")))
        if worker is not None and worker.end is None:
            worker.end = "stopped" if event.get("expected", True) else "failed"
            worker.ended = float(event["t"])

    def _on_recovery(self, event: Mapping[str, Any]) -> None:
        if event.get("planned"):
            return  # a change of members that interrupted nobody
        number = int(event["generation"])
        stages = {str(name): float(value) for name, value in (event.get("stages") or {}).items() if value is not None}
        total = float(event.get("total_ms") or sum(stages.values()))
        known = self.recoveries.get(number)
        if known is None or total > known.total_ms:
            noticed = float(event.get("t_noticed") or float(event["t"]) - total / 1000)
            step = event.get("resumed_step")
            self.recoveries[number] = Recovery(float(event["t"]), noticed, number, stages, total, step)

    def _on_incident(self, event: Mapping[str, Any]) -> None:
        self.incidents.append(event)

    def _on_waiting(self, event: Mapping[str, Any]) -> None:
        self.waiting = str(event.get("reason")).removeprefix("waiting: ")

    def _on_run_finished(self, event: Mapping[str, Any]) -> None:
        self.finished = event
        for worker in self.workers.values():
            if worker.end is None:
                worker.end, worker.ended = "stopped", float(event["t"])


@dataclass
class Story(Crew):
    """Everything the demo shows about one run, each of its steps included."""

    max_steps: int = 0
    commits: dict[int, CommittedStep] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    committed_in: int = 0  # the lineage of the newest commit

    @property
    def last(self) -> CommittedStep | None:
        return self.commits[max(self.commits)] if self.commits else None

    @property
    def running_step(self) -> int:
        """The step that is being computed now, counted from 0."""
        return max(self.commits, default=-1) + 1

    @property
    def step_s(self) -> float:
        """Median duration of the recent steps, 0 before there are any."""
        recent = sorted(self.commits)[-4 * RECENT_STEPS :]
        return statistics.median(self.commits[step].step_s for step in recent) if recent else 0.0

    def tokens_per_s(self) -> float:
        """Return tokens per second over the recent steps, by the clock, recoveries included."""
        recent = sorted(self.commits)[-RECENT_STEPS - 1 :]
        if len(recent) < 2:
            return 0.0
        elapsed = self.commits[recent[-1]].t - self.commits[recent[0]].t
        return sum(self.commits[step].tokens for step in recent[1:]) / elapsed if elapsed > 0 else 0.0

    def after_ms(self, t: float) -> float | None:
        """Return milliseconds from a failure at `t` to the next commit that goes beyond every earlier step; None if
        none followed."""
        before = max((step for step, commit in self.commits.items() if commit.t <= t), default=-1)
        after = [commit.t for step, commit in self.commits.items() if step > before and commit.t > t]
        return (min(after) - t) * 1000 if after else None

    def _on_run_started(self, event: Mapping[str, Any]) -> None:
        super()._on_run_started(event)
        resumed = event.get("resumed_from_step")
        if resumed is not None and "lineage" not in event:  # with an agent a newer snapshot may be in memory
            self.commits = {step: commit for step, commit in self.commits.items() if step < int(resumed)}

    def _on_step_committed(self, event: Mapping[str, Any]) -> None:
        super()._on_step_committed(event)
        step, t = int(event["step"]), float(event["t"])
        if event.get("step_s") is not None:
            step_s = float(event["step_s"])
        else:
            step_s = t - self.commits[step - 1].t if step - 1 in self.commits else 0.0
        if self.lineage > self.committed_in:  # after a restore: what was done beyond counts no more
            self.commits = {known: commit for known, commit in self.commits.items() if known < step}
        self.committed_in = self.lineage
        loss = float("nan") if event["loss"] is None else float(event["loss"])
        tokens, world, generation = int(event["tokens"]), int(event["world_size"]), int(event["generation"])
        self.commits[step] = CommittedStep(t, step, loss, tokens, world, generation, step_s)

    def _on_validation(self, event: Mapping[str, Any]) -> None:
        loss = validation_loss(event)
        if loss is not None:
            self.validation[int(event["step"])] = loss


def validation_loss(event: Mapping[str, Any]) -> float | None:
    """Return the first loss among what a `validation` event tells of; None if there is none."""
    values = event.get("metrics") or {"loss": event.get("loss")}  # a script may have logged one of its own
    loss = next((value for name, value in values.items() if "loss" in name), None)
    return None if loss is None else float(loss)


def tell_story(events: Iterable[Mapping[str, Any]], kills: Iterable[Kill] = ()) -> Story:
    """Return the story of a whole log. Workers that `kills` names are shown as killed."""
    story = Story()
    for event in events:
        story.apply(event)
    for kill in kills:
        story.mark_killed(kill)
    return story
