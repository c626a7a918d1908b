"""Workers that make no progress. The worker sets its deadlines; this module only enforces them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_harness.agent.workers.worker import Worker
from elastic_harness.contract.board import Phase, Reading
from elastic_harness.incidents import table
from elastic_harness.incidents.code import Code

STOPPED_CHECK_S = 0.1
STOPPED_DEADLINE_MS = 5000
OWN_PAUSE_S = 1.0  # after a longer gap between two checks the agent itself did not run
LEARNED = (Phase.DATA, Phase.SLOT, Phase.APPLY, Phase.VALIDATION)
"""Phases whose deadline comes from measured times. It may be too short for the work that comes next."""


@dataclass(frozen=True)
class Hang:
    """A worker that makes no progress, with the evidence in words. overdue: the work that it did not finish in time, if
    it may only be slow."""

    worker: Worker
    kind: Code  # what was seen of it
    evidence: str
    overdue: Reading | None = None


class HangWatch:
    """Finds workers whose beat has stood still beyond their deadline, or that are stopped (SIGSTOP).

    The time in which the agent itself did not run (a suspended machine) counts for no worker's deadline. A stopped
    worker cannot be working. It has the newest deadline that it had for computing a slot, else the longest such one of
    the node's workers, but at most STOPPED_DEADLINE_MS.
    """

    def __init__(self) -> None:
        self._checked_at: float | None = None
        self._stopped_at = 0.0
        self._stopped_since: dict[str, float] = {}

    def check(self, workers: Iterable[Worker], now: float) -> list[Hang]:
        """Return every worker that hangs."""
        living = [w for w in workers if w.running and w.hello and not w.lost and is_needed(w)]
        if self._checked_at is not None and now - self._checked_at > OWN_PAUSE_S:
            for worker in living:
                worker.beat_seen_at += now - self._checked_at
            self._stopped_since.clear()
        self._checked_at = now
        hung: list[Hang] = []
        for worker in living:
            reading = worker.board.read()
            if worker.last_reading is None or reading.beat != worker.last_reading.beat:
                worker.beat_seen_at = now
                if reading.phase == Phase.SLOT and reading.deadline_ms:
                    worker.compute_deadline_ms = reading.deadline_ms
            worker.last_reading = reading
            idle_s = now - worker.beat_seen_at
            if reading.deadline_ms and idle_s > reading.deadline_ms / 1000:
                hung.append(_beyond_deadline(worker, reading, idle_s))
        if now - self._stopped_at >= STOPPED_CHECK_S:
            self._stopped_at = now
            hung += self._stopped([w for w in living if w not in [hang.worker for hang in hung]], now)
        return hung

    def _stopped(self, living: list[Worker], now: float) -> list[Hang]:
        stopped = {w.member for w in living if w.stopped()}
        self._stopped_since = {m: self._stopped_since.get(m, now) for m in stopped}
        common_ms = max((w.compute_deadline_ms for w in living), default=0)
        found = []
        for worker in living:
            if worker.member not in stopped:
                continue
            deadline_s = min(worker.compute_deadline_ms or common_ms or STOPPED_DEADLINE_MS, STOPPED_DEADLINE_MS) / 1000
            stopped_s = now - self._stopped_since[worker.member]
            if stopped_s > deadline_s:
                evidence = f"the process was stopped (SIGSTOP) for {stopped_s:.1f} s (deadline {deadline_s:g} s)"
                found.append(Hang(worker, table.STOPPED, evidence))
        return found


def _beyond_deadline(worker: Worker, reading: Reading, idle_s: float) -> Hang:
    deadline_s, stopped = reading.deadline_ms / 1000, worker.stopped()
    if reading.phase in LEARNED and not stopped:
        return Hang(worker, table.OVERDUE, f"{reading.where} did not finish within {deadline_s:g} s", reading)
    why = "; the process is stopped (SIGSTOP)" if stopped else ""
    evidence = f"no progress for {idle_s:.1f} s while {reading.where} (deadline {deadline_s:g} s){why}"
    return Hang(worker, table.STOPPED if stopped else table.STANDS_STILL, evidence)


def is_needed(worker: Worker) -> bool:
    """Return whether others may be waiting for the worker. That is also so for a worker that a planned change leaves
    out, until the boundary."""
    return worker.released is None or worker.left_out
