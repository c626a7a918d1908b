"""The metrics of a run, read from its folder while it is written.

Nothing is asked of the agent or of a worker. What is not in the run's events is read from `run.json`, from the lock
that a live job holds, and from what the kernel shows of the agent: the boards of its workers, and their memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_harness import __version__
from elastic_harness.contract.board import paces
from elastic_harness.errors import InfrastructureError
from elastic_harness.memory_pools import resident_bytes
from elastic_harness.metrics.exposition import RunValues, write
from elastic_harness.metrics.fold import Fold, Histogram, Labels
from elastic_harness.metrics.table import RUN_STATES, TABLE
from elastic_harness.runs import folder as folders
from elastic_harness.runs.events import EVENTS, EventTail


class RunMetrics:
    """The metrics of one run folder. It keeps what it has read, so that each call reads only what is new. Calls from
    several threads wait for each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._fold, self._tail = inode, Fold(), EventTail(self.folder / EVENTS)

    def read(self) -> RunValues:
        """Read what is new and return all values. The first call reads the whole log, which takes some seconds for each
        million steps; later ones take a millisecond."""
        with self._lock:
            self._read_events()
            return self._values()

    def text(self, *, openmetrics: bool = False) -> str:
        """Return the text for Prometheus. Blocks as `read` does."""
        return text([self], openmetrics=openmetrics)

    @property
    def live(self) -> bool:
        """Whether a job holds the run folder."""
        return folders.locked(self.folder)

    def _read_events(self) -> None:
        with contextlib.suppress(OSError):
            inode = os.stat(self.folder / EVENTS).st_ino
            if inode != self._inode:  # the run was begun anew with --fresh
                self._begin(inode)
        for event in self._tail.each():
            self._fold.take(event)

    def _values(self) -> RunValues:
        fold, record, live, now = self._fold, self._record(), self.live, time.time()
        state = str(record.get("status") or fold.ended or ("running" if live else "unknown"))
        going_on = state in ("starting", "running", "stopping", "draining")
        if going_on and not live:
            state = "dead"
        values: dict[str, Mapping[Labels, float | Histogram]] = {
            **fold.counters,
            **fold.gauges,
            "build_info": {(__version__,): 1.0},
            "run_state": {(each,): float(each == state) for each in RUN_STATES},
            "step_duration_seconds": {(): fold.step_s},
            "recovery_seconds": {(stage,): histogram for stage, histogram in fold.recovery_s.items()},
        }
        if going_on and live:
            values |= self._now(record, now)
        else:
            values = {name: of for name, of in values.items() if not TABLE[name].now}
        options = record.get("options") or {}
        labels = {"run": str(record.get("run_id") or self.folder.name)}
        if options.get("store"):
            labels["node"] = str(options.get("node_name") or socket.gethostname())
        return RunValues(labels, values)

    def _now(self, record: Mapping[str, Any], now: float) -> dict[str, Mapping[Labels, float | Histogram]]:
        """Return what is about the present of a live run."""
        fold, memory, slot_s = self._fold, dict[Labels, float](), dict[Labels, float]()
        slots_of_a_lane = max(1.0, fold.slots / fold.lanes) if fold.lanes else math.nan
        agent = record.get("agent_pid")
        shown = paces(agent) if agent else {}
        for member, worker in fold.workers.items():
            place = (str(worker.place),)
            if worker.host == socket.gethostname() and (held := resident_bytes(worker.pid)):
                memory[place] = memory.get(place, 0.0) + held
            pace = shown.get(member)
            if pace is not None and pace.lane_s and fold.lanes:
                slot_s[place] = pace.lane_s / slots_of_a_lane
        return {
            "workers": {(state,): float(count) for state, count in fold.worker_states().items()},
            "worker_memory_bytes": memory,
            "slot_seconds": slot_s,
            "checkpoint_age_seconds": {(tier,): max(0.0, now - at) for tier, at in fold.saved_at.items()},
        }

    def _record(self) -> Mapping[str, Any]:
        try:
            return folders.read_record(self.folder) or {}
        except InfrastructureError:  # damaged: the commands that need it say so
            return {}


def text(runs: Sequence[RunMetrics], *, openmetrics: bool = False) -> str:
    """Return the text of some runs for Prometheus, each metric of all runs in one place. Blocks as `RunMetrics.read`
    does."""
    return write([run.read() for run in runs], openmetrics=openmetrics)
