"""A fold over a run's events into the values of metrics. Pure: it reads no clock and no file.

Its memory does not grow with the run. The events of all launches of a run stand in one log, so counters go on where the
last launch left them, whoever folds and however often it begins anew. A counter never falls.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_harness.incidents import table as codes
from elastic_harness.incidents.naming import is_alarm, of_event, was_asked_for
from elastic_harness.metrics.table import AUDITS, SOURCES, STAGES, TABLE
from elastic_harness.runs.story import validation_loss

HEALTHY_STEPS = 32  # their median says how long a step takes
Labels = tuple[str, ...]
_TELL_AGAIN = {"incident", "hang"}  # of a failure that another event tells of
_INTERRUPTING = {
    "evicted", "exchange_broke", "failure_detected", "peers_lost", "rollback", "rollback_decided", "slot_declined",
}  # fmt: skip
_UNUSABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass
class Histogram:
    """Observations, counted by the buckets of a metric."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)  # of each bucket, the last one without a bound
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class LiveWorker:
    """A living worker process of the node."""

    place: int
    pid: int
    spare: bool
    host: str


def _known_labels(name: str) -> list[Labels]:
    """Return all labels that a counter can have."""
    if name in ("failures_total", "alarms_total"):
        told = [code for code in codes.TABLE.values() if not was_asked_for(code)]
        return [(code.id,) for code in told if is_alarm(code) == (name == "alarms_total")]
    return list(itertools.product(*TABLE[name].labels.values()))


class Fold:
    """Takes the events of one log in their order. Values are read from its attributes at any time."""

    def __init__(self) -> None:
        self.counters: dict[str, defaultdict[Labels, float]] = {
            name: defaultdict(float) for name, metric in TABLE.items() if metric.kind == "counter"
        }
        self.gauges: dict[str, dict[Labels, float]] = defaultdict(dict)
        self.step_s = Histogram(TABLE["step_duration_seconds"].buckets)
        self.recovery_s = {stage: Histogram(TABLE["recovery_seconds"].buckets) for stage in STAGES}
        self.saved_at: dict[str, float] = {}  # tier → when its newest checkpoint was safe
        self.workers: dict[str, LiveWorker] = {}
        self.lanes, self.slots = 0, 0  # of a step
        self.ended: str | None = None  # how the newest launch ended: finished, stopped or failed
        self.damaged = 0  # events that could not be used
        self._members: frozenset[str] = frozenset()
        self._newest, self._farthest = (-1, -1), -1  # (lineage, step) of the newest commit; the highest step
        self._recovered = -1  # the newest generation whose recovery was counted
        self._noticed_at: float | None = None  # the newest failure of a worker
        self._recent_s: deque[float] = deque(maxlen=HEALTHY_STEPS)
        self._state: str | None = None  # what time is spent on until something else is told; None: nothing runs
        self._since: float | None = None  # up to when it is counted
        self._in_order = True  # whether the last launch ended as it was meant to
        self._handlers: dict[str, Callable[[float, Mapping[str, Any]], None]] = {
            name.removeprefix("_on_"): getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }
        for name, counter in self.counters.items():  # from the beginning, so that the first increase is seen
            counter.update(dict.fromkeys(_known_labels(name), 0.0))

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event. One that has other fields than its kind should have is counted in `damaged`."""
        name, t = event["event"], event.get("t")
        if not isinstance(t, int | float) or not math.isfinite(t):
            self.damaged += 1
            return
        try:
            if name not in _TELL_AGAIN and (name != "step_committed" or "code" in event or "decisions" in event):
                self._count_failure(name, event)
            handler = self._handlers.get(name)
            if handler is not None:
                handler(float(t), event)
        except _UNUSABLE:
            self.damaged += 1
        self.gauges["last_event_timestamp_seconds"][()] = float(t)

    def worker_states(self) -> dict[str, int]:
        """Return how many workers of the node are in each state."""
        states = [
            "training" if member in self._members else "spare" if worker.spare else "starting"
            for member, worker in self.workers.items()
        ]
        return {state: states.count(state) for state in ("training", "starting", "spare")}

    # ---- time

    def _pass(self, t: float, state: str | None) -> None:
        """Count the time until now as spent on a state. If the clock was set back, nothing passed."""
        if state is not None and self._since is not None:
            self.counters["time_seconds_total"][(state,)] += max(0.0, t - self._since)
        self._since = t

    def _commit_passed(self, t: float, step_s: float | None, worked: str) -> None:
        """Count the time until a commit: a step's as worked, and the rest as spent on what held it up."""
        if self._since is not None and self._state is not None:
            elapsed = max(0.0, t - self._since)
            healthy = step_s if step_s is not None else statistics.median(self._recent_s) if self._recent_s else 0.0
            working = elapsed if self._state == "productive" and step_s is not None else min(elapsed, healthy)
            held_up = "recovery" if self._state == "productive" else self._state
            self.counters["time_seconds_total"][(worked,)] += working
            self.counters["time_seconds_total"][(held_up,)] += elapsed - working
        self._since, self._state = t, "productive"

    # ---- events

    def _count_failure(self, name: str, event: Mapping[str, Any]) -> None:
        code = of_event(event)
        if name in _INTERRUPTING and self._state == "productive":
            self._state = "recovery"
        if code is None or was_asked_for(code):
            return
        self.counters["alarms_total" if is_alarm(code) else "failures_total"][(code.id,)] += 1
        if name in ("evicted", "run_finished") and code.family == "C" and code is not codes.IN_DOUBT:
            self.counters["replica_mismatch_total"][()] += 1

    def _on_run_started(self, t: float, event: Mapping[str, Any]) -> None:
        self._pass(t, None if self._in_order else "down")
        self._state, self._in_order, self.ended = "startup", False, None
        self.counters["launches_total"][()] += 1
        self.workers.clear()
        self._members = frozenset()

    def _on_run_finished(self, t: float, event: Mapping[str, Any]) -> None:
        self.ended = str(event.get("status"))
        self._in_order = self.ended != "failed"
        ends = "checkpoint" if self._state == "productive" and self._in_order else self._state
        self._pass(t, "recovery" if ends == "productive" else ends)
        self._state = None
        self.workers.clear()
        self._members = frozenset()

    def _on_run_configured(self, t: float, event: Mapping[str, Any]) -> None:
        self.slots, self.lanes = int(event["slots"]), int(event["lanes"])

    def _on_waiting(self, t: float, event: Mapping[str, Any]) -> None:
        self._pass(t, "recovery" if self._state == "productive" else self._state)
        self._state = "waiting"

    def _on_generation(self, t: float, event: Mapping[str, Any]) -> None:
        if self._state == "waiting":
            self._pass(t, "waiting")
            self._state = "recovery" if self._recent_s else "startup"
        self._members = frozenset(map(str, event["members"]))
        self.gauges["generation"][()] = float(event["number"])
        self.gauges["world_size"][()] = float(len(self._members))

    def _on_step_committed(self, t: float, event: Mapping[str, Any]) -> None:
        step, lineage = int(event["step"]), int(event.get("lineage") or 0)
        if (lineage, step) <= self._newest:  # told again
            return
        new = step > self._farthest
        step_s = event.get("step_s")
        counters, gauges = self.counters, self.gauges
        if event.get("tokens") is not None:  # else an agent writes again what its predecessor had committed
            self._commit_passed(t, step_s, "productive" if new else "replay")
        if step_s is not None:
            if self._noticed_at is not None and self._noticed_at < t - step_s:
                self._noticed_at = None  # a whole step since: nobody had to recover from it
            self.step_s.observe(step_s)
            self._recent_s.append(step_s)
        if new:
            counters["steps_committed_total"][()] += 1
            counters["samples_total"][()] += event.get("samples") or 0
            counters["tokens_total"][()] += event.get("tokens") or 0
        else:
            counters["steps_recommitted_total"][()] += 1
            counters["slots_recomputed_total"][("restored",)] += self.slots
        if event.get("skipped"):
            counters["updates_skipped_total"][()] += 1
        for field_name, gauge in (("loss", "loss"), ("grad_norm", "grad_norm"), ("lr", "learning_rate")):
            value = event.get(field_name)
            if value is not None:
                gauges[gauge][()] = float(value)
            elif field_name == "loss":
                gauges[gauge][()] = math.nan
        gauges["step"][()], gauges["lineage"][()] = step, lineage
        gauges["last_commit_timestamp_seconds"][()] = t
        self._newest, self._farthest = (lineage, step), max(self._farthest, step)

    def _on_validation(self, t: float, event: Mapping[str, Any]) -> None:
        loss = validation_loss(event)
        if loss is not None:
            self.gauges["validation_loss"][()] = loss

    def _on_worker_started(self, t: float, event: Mapping[str, Any]) -> None:
        place, pid = int(event.get("local_index") or 0), int(event["pid"])
        self.workers[str(event["member"])] = LiveWorker(place, pid, bool(event.get("spare")), str(event.get("host")))

    def _on_worker_stopped(self, t: float, event: Mapping[str, Any]) -> None:
        self.workers.pop(str(event.get("member")), None)

    def _on_failure_detected(self, t: float, event: Mapping[str, Any]) -> None:
        self.workers.pop(str(event.get("member")), None)
        self._noticed_at = float(event.get("t_detected") or t)

    def _on_recovery(self, t: float, event: Mapping[str, Any]) -> None:
        number = int(event["generation"])
        if event.get("planned") or number <= self._recovered:
            return
        self._recovered = number
        told = (event.get("stages") or {}).items()
        stages = {name.removesuffix("_ms"): ms / 1000 for name, ms in told if ms is not None}
        if self._noticed_at is not None and event.get("t_noticed") is not None:
            stages["detect"] = max(0.0, float(event["t_noticed"]) - self._noticed_at)
        self._noticed_at = None
        if event.get("total_ms") is not None:
            stages["total"] = event["total_ms"] / 1000 + stages.get("detect", 0.0)
        for stage, seconds in stages.items():
            if stage in self.recovery_s:
                self.recovery_s[stage].observe(seconds)

    def _on_slot_retried(self, t: float, event: Mapping[str, Any]) -> None:
        self.counters["slots_recomputed_total"][("retried",)] += 1

    def _on_slot_declined(self, t: float, event: Mapping[str, Any]) -> None:
        self.counters["slots_recomputed_total"][("declined",)] += 1

    def _on_audited(self, t: float, event: Mapping[str, Any]) -> None:
        self.counters["audits_total"][("agreed",)] += 1

    def _on_recheck(self, t: float, event: Mapping[str, Any]) -> None:
        if event.get("outcome") in AUDITS:
            self.counters["audits_total"][(event["outcome"],)] += 1

    def _on_drain(self, t: float, event: Mapping[str, Any]) -> None:
        source = event.get("source")
        self.counters["preemption_notices_total"][(source if source in SOURCES else "other",)] += 1

    def _on_checkpoint_saved(self, t: float, event: Mapping[str, Any]) -> None:
        self._saved(t, "disk", event)

    def _on_checkpoint_uploaded(self, t: float, event: Mapping[str, Any]) -> None:
        self._saved(t, "remote", event)

    def _saved(self, t: float, tier: str, event: Mapping[str, Any]) -> None:
        self.counters["checkpoints_saved_total"][(tier,)] += 1
        self.saved_at[tier] = t
        for name, gauge in (("seconds", "checkpoint_duration_seconds"), ("bytes", "checkpoint_size_bytes")):
            if event.get(name) is not None:
                self.gauges[gauge][(tier,)] = float(event[name])
