"""The agent's records: events and ledger, of which it is the only writer, and the counters that a relaunch has to
know."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_harness.contract.messages import Commit
from elastic_harness.contract.wire import Malformed
from elastic_harness.durable_file import cannot_write
from elastic_harness.omissions import as_omissions
from elastic_harness.runs.events import EVENTS, EventLog, newest_events
from elastic_harness.runs.folder import RunFolder
from elastic_harness.runs.ledger import LEDGER, LedgerError, LedgerWriter, Reached, parse_line

COUNTER = "generation"
COUNTER_BYTES = 21  # of fixed length: a part of it is no number


class Records:
    """Events, ledger and the counters that must survive the agent. Raises InfrastructureError if the disk fails."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._events = EventLog(folder.path / EVENTS)
        self._ledger = LedgerWriter(folder.path / LEDGER)
        try:
            self._counter = os.open(folder.path / COUNTER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            counted = os.pread(self._counter, 64, 0)
        except OSError as error:
            raise cannot_write(folder.path / COUNTER, error) from error
        record = folder.record
        self.number = int(counted) if len(counted) == COUNTER_BYTES and counted.strip().isdigit() else 0
        self.lineage: int = record.get("lineage") or 0
        self.from_step: int = record.get("from_step") or 0
        self.doubts = tuple((lineage, version) for lineage, version in record.get("doubts") or ())
        self.omissions = as_omissions(record.get("omissions") or ())
        self.saved: bool = record.get("saved") or False
        self.born: bool = record.get("born") or False
        self.history: str = record.get("history") or ""
        self.committed, self.committed_at = -1, 0.0  # the newest step, and when it was told of
        self.farthest = self._ledger.reached.farthest  # the newest step of all lineages: what is beyond is new
        self.slowest_write_s = 0.0  # since somebody set it to 0
        self.damaged = list(self._ledger.damaged)  # lines that were passed over
        newest = next(newest_events(folder.path / EVENTS), None)
        self.cut_off_at: float | None = None  # the time of the newest event, if an earlier launch did not end in order
        if newest is not None and newest["event"] != "run_finished":
            self.cut_off_at = newest.get("t")
        self._learn_from(self._ledger.reached)
        if self.damaged:
            self.event("damaged_lines", count=len(self.damaged), first=self.damaged[0])

    def _learn_from(self, reached: Reached) -> None:
        if not reached.last:
            return
        if reached.lineage >= self.lineage:
            self.lineage = reached.lineage
            self.from_step = max(self.from_step, reached.from_step)
        self.number = max(self.number, reached.generation)
        self.committed = reached.committed
        self.born = True
        self._complete_events(reached.last)

    def _complete_events(self, last: Mapping[str, Any]) -> None:
        """Write the event of the last commit if it is missing. A commit goes to the ledger first, so an agent that died
        right then left its event unwritten. If it was written, it is the newest of its kind."""
        for event in newest_events(self.folder.path / EVENTS, self.damaged.append):
            if event["event"] == "step_committed":
                if (event.get("lineage"), event.get("step")) == (last["lineage"], last["step"]):
                    return
                break
        nothing = dict.fromkeys(("tokens", "lr", "grad_norm", "step_s"))
        self.event("step_committed", **last, **nothing, reason="written again from the ledger")

    def event(self, event: str, **fields: Any) -> None:
        """Write one event. `lineage` is filled in."""
        fields.setdefault("lineage", self.lineage)
        with self._measured():
            self._events.emit(event, **fields)

    def sync(self) -> None:
        """Make the ledger durable. A checkpoint that survives a power cut must not be ahead of it."""
        with self._measured():
            self._ledger.sync()

    def use_number(self, number: int) -> None:
        """Note that a generation number is used up, before any worker hears of it.

        It is written in place, because every recovery waits for it and replacing run.json would take milliseconds.
        """
        self.number = number
        text, written = f"{number:0{COUNTER_BYTES - 1}d}\n".encode(), 0
        try:
            while written < len(text):  # a disk that fills up takes a part, and refuses the rest
                written += os.pwrite(self._counter, text[written:], written)
        except OSError as error:
            raise cannot_write(self.folder.path / COUNTER, error) from error

    def remember(self, **fields: Any) -> None:
        """Set some of what run.json has of the run, and keep it there."""
        for name, value in fields.items():
            setattr(self, name, value)
        with self._measured():
            self.folder.update(**fields)

    def commit(self, told: Commit) -> bool:
        """Write a committed step once per (lineage, step). Return False if it was written before. Raises Malformed if
        it is not a commit."""
        ledger = {
            "from_step": self.from_step,
            "step": told.step,
            "generation": told.generation,
            "world_size": told.world_size,
            "loss": told.loss,
            **(told.ledger or {}),
            "lineage": told.lineage,
        }
        if not self._append(ledger):
            return False
        self.event("step_committed", **told.metrics)
        self.committed, self.committed_at = told.step, time.time()
        self.farthest = max(self.farthest, self.committed)
        if not self.born:
            self.remember(born=True)
        return True

    def handed_over(self, line: dict[str, Any]) -> None:
        """Write one side of a hand-over of the whole state, once."""
        self._append(line)

    def _append(self, record: dict[str, Any]) -> bool:
        try:
            line = parse_line(record)
        except LedgerError as error:
            raise Malformed(f"a line that does not fit the ledger: {error}") from error
        with self._measured():
            return self._ledger.append(line)

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """Note how long a write took."""
        began_at = time.monotonic()
        yield
        self.slowest_write_s = max(self.slowest_write_s, time.monotonic() - began_at)

    def close(self) -> None:
        os.close(self._counter)
        self._ledger.close()
        self._events.close()
