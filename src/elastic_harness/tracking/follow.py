"""Follows a run's events, and gives each step's figures to trackers once.

How far a tracker is stands beside what it has written. A tracker that is started again goes on from there. What it may
have logged after that, before it was killed, is taken back (TensorBoard), is known to the tracker itself (MLflow), or
is ignored by the service because the step is not new (Weights & Biases).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_harness import durable_file, shape
from elastic_harness.runs.events import EVENTS, EventTail
from elastic_harness.tracking.otel import SpanFollower
from elastic_harness.tracking.trackers import OTEL, TrackedRun, Tracker, open_tracker

FIGURES = ("loss", "lr", "grad_norm", "step_s", "tokens", "world_size")
FOLDER = "tracking"
POLL_S = 0.5
FLUSH_S = 5.0
FLUSH_STEPS = 1000
Mark = tuple[int, int]
"""A lineage and a step."""


class Follower:
    """One tracker and how far it is."""

    def __init__(self, name: str, run_id: str, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open the tracker. Raises ConfigError if its package is not installed."""
        self.name = name
        self._path = folder / f"{name}.json"
        self._mark = self._read_mark()
        run = TrackedRun(run_id, (folder / name).absolute(), self._mark[1] + 1, settings)
        self._tracker: Tracker = open_tracker(name, run)
        self._highest = self._mark[1]  # the steps up to here it has
        known = self._tracker.newest()
        if known is not None:  # it says so itself, whatever was lost when it was killed
            self._mark, self._highest = (-1, -1), known
        self._unsaved, self._saved_at = 0, time.monotonic()
        self._saves: deque[tuple[float, Mark]] = deque()  # when it was flushed, and how far it was

    def take(self, event: Mapping[str, Any]) -> None:
        """Log an event's figures, if they are a step's that the tracker has not."""
        if event["event"] != "step_committed":
            return
        try:
            mark, t = (int(event.get("lineage") or 0), int(event["step"])), float(event["t"])
            told = {name: float(event[name]) for name in FIGURES if event.get(name) is not None}
        except (LookupError, TypeError, ValueError):
            return
        if mark <= self._mark:
            return
        lineage, step = mark
        if lineage > self._mark[0] and step <= self._highest and self._tracker.go_back(step):
            self._highest = step - 1
        self._mark = mark
        if step > self._highest:
            if "loss" not in told:
                told["loss"] = math.nan
            self._tracker.log(step, t, told)
            self._highest = step
            self._unsaved += 1
        if self._unsaved >= FLUSH_STEPS or time.monotonic() - self._saved_at > FLUSH_S:
            self.save()

    def save(self) -> None:
        """Bring what was logged to disk, and then how far that is."""
        now = self._saved_at = time.monotonic()
        if self._unsaved:
            self._tracker.flush()
            self._saves.append((now, self._mark))
        safe = [mark for at, mark in self._saves if at <= now - self._tracker.late_s]
        if safe:
            self._write_mark(safe[-1])
            self._saves = deque(each for each in self._saves if each[0] > now - self._tracker.late_s)
        self._unsaved = 0

    def close(self) -> None:
        self.save()
        self._tracker.close()
        self._write_mark(self._mark)

    def _write_mark(self, mark: Mark) -> None:
        durable_file.write(self._path, json.dumps({"lineage": mark[0], "step": mark[1]}).encode())

    def _read_mark(self) -> Mark:
        try:
            found = shape.parse_object(self._path.read_bytes())
            return int(found["lineage"]), int(found["step"])
        except (OSError, LookupError, TypeError, ValueError):  # a new one; or it begins again
            return -1, -1


def follow(run: Path, run_id: str, names: Sequence[str], live: Callable[[], bool], asked: threading.Event) -> None:
    """Give all events to trackers until the run is live no more, or this process is asked to end, and close them. They
    are opened with the first step, when it is known what the run is made of. Raises ConfigError if a package is
    missing."""
    tail, before, followers = EventTail(run / EVENTS), list[Mapping[str, Any]](), list[Follower | SpanFollower]()
    try:
        while True:
            last = asked.is_set() or not live()
            for event in tail.each():
                before.append(event)
                if followers or event["event"] == "step_committed":
                    followers = followers or [_follower(name, run_id, run / FOLDER, before) for name in names]
                    for follower in followers:
                        for each in before:
                            follower.take(each)
                    before = []
            for follower in followers:
                follower.save()
            if last:
                return
            asked.wait(POLL_S)
    finally:
        for follower in followers:
            follower.close()


def _follower(name: str, run_id: str, folder: Path, events: Sequence[Mapping[str, Any]]) -> Follower | SpanFollower:
    if name == OTEL:
        return SpanFollower(run_id, folder)
    told = next((event for event in events if event["event"] == "run_configured"), {})
    return Follower(name, run_id, folder, {k: v for k, v in told.items() if k not in ("t", "event", "lineage")})
