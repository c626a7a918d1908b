"""What the agent writes down: events and ledger, each by this one writer, and what a relaunch has to know."""

from __future__ import annotations

import os
import time
from typing import Any

from elastic_harness.agent.folder import RunFolder
from elastic_harness.errors import InfrastructureError
from elastic_harness.events import EventLog, read_events
from elastic_harness.ledger import LedgerError, LedgerLine, LedgerWriter, read_ledger
from elastic_harness.wire import Malformed

EVENTS = "events.jsonl"
LEDGER = "ledger.jsonl"
COUNTER = "generation"


class Records:
    """Events, ledger and the counters that must survive the agent. A failing disk raises InfrastructureError."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        try:
            self._events = EventLog(folder.path / EVENTS)
            self._ledger = LedgerWriter(folder.path / LEDGER)
            self._counter = os.open(folder.path / COUNTER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            counted = os.pread(self._counter, 64, 0).strip()
        except OSError as error:
            raise self._disk(error, folder.path) from error
        record = folder.record
        self.number = int(counted) if counted.isdigit() and len(counted) <= 20 else 0
        self.lineage: int = record.get("lineage") or 0
        self.from_step: int = record.get("from_step") or 0
        self.born: bool = record.get("born") or False
        self.history: str = record.get("history") or ""
        self.committed, self.committed_at = -1, 0.0  # the newest step, and when it was told of
        if len(self._ledger):
            self._learn_from_ledger()

    def _learn_from_ledger(self) -> None:
        lines = read_ledger(self.folder.path / LEDGER).lines
        newest = max(line.lineage for line in lines)
        if newest >= self.lineage:
            self.lineage = newest
            self.from_step = max(self.from_step, min(line.from_step for line in lines if line.lineage == newest))
        self.number = max(self.number, *(line.generation for line in lines))
        self.committed = max(line.step for line in lines if line.lineage == newest)
        self.born = True
        self._complete_events(lines[-1])

    def _complete_events(self, last: LedgerLine) -> None:
        """A commit goes to the ledger first: an agent that died right then left its event unwritten."""
        wanted = {"event": "step_committed", "lineage": last.lineage, "step": last.step}
        for event in read_events(self.folder.path / EVENTS):
            if wanted.items() <= event.items():
                return
        self.event(
            "step_committed",
            lineage=last.lineage,
            step=last.step,
            generation=last.generation,
            world_size=last.world_size,
            loss=last.loss,
            tokens=None,
            lr=None,
            grad_norm=None,
            step_s=None,
            reason="written again from the ledger",
        )

    def event(self, event: str, **fields: Any) -> None:
        """Write one event; `lineage` is filled in."""
        fields.setdefault("lineage", self.lineage)
        try:
            self._events.emit(event, **fields)
        except OSError as error:
            raise self._disk(error, self.folder.path / EVENTS) from error

    def sync(self) -> None:
        """Make the ledger durable: a checkpoint that survives a power cut must not be ahead of it."""
        try:
            self._ledger.fsync()
        except OSError as error:
            raise self._disk(error, self.folder.path / LEDGER) from error

    def use_number(self, number: int) -> None:
        """Note that a generation number is used up, before anybody hears of it.

        Written in place: this is on the way of every recovery, and replacing run.json costs milliseconds.
        """
        self.number = number
        try:
            os.pwrite(self._counter, f"{number:020d}\n".encode(), 0)
        except OSError as error:
            raise self._disk(error, self.folder.path / COUNTER) from error

    def remember(self, **fields: Any) -> None:
        """Set lineage, from_step or born, and keep them in run.json."""
        for name, value in fields.items():
            setattr(self, name, value)
        self.folder.update(**fields)

    def commit(self, message: dict[str, Any]) -> bool:
        """Write a committed step once per (lineage, step); False if it was written before. Raises Malformed for what
        is no commit."""
        ledger = dict(message.get("ledger") or {})
        ledger["lineage"] = message["lineage"]
        ledger.setdefault("from_step", self.from_step)
        for name in ("step", "generation", "world_size", "loss"):
            ledger.setdefault(name, message[name])
        try:
            line = LedgerLine.from_json(ledger, "its ledger line")
        except LedgerError as error:
            raise Malformed(f"a 'commit' message that does not fit the ledger: {error}") from error
        try:
            if not self._ledger.append(line):
                return False
        except OSError as error:
            raise self._disk(error, self.folder.path / LEDGER) from error
        fields = {k: v for k, v in message.items() if k not in ("type", "ledger")}
        self.event("step_committed", **fields)
        self.committed, self.committed_at = message["step"], time.time()
        if not self.born:
            self.remember(born=True)
        return True

    def close(self) -> None:
        os.close(self._counter)
        self._ledger.close()
        self._events.close()

    @staticmethod
    def _disk(error: OSError, path: object) -> InfrastructureError:
        return InfrastructureError(
            f"cannot write {path}: {error.strerror}; free space or make the folder writable, then launch with the "
            f"same --run-dir to resume"
        )
