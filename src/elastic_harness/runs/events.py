"""The event log: one JSON object a line, one writer, readable while it is written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic_harness.incidents.naming import of_event
from elastic_harness.runs import json_lines

SCHEMA = 1
EVENTS = "events.jsonl"


class EventLog(json_lines.Appender):
    """The append-only `events.jsonl`. Only one process may write it: a run has one writer on each node."""

    def emit(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one event, stamped with the current time unless `t` is given. A failure gets its code, unless it has
        one. Raises InfrastructureError."""
        record: dict[str, Any] = {"t": fields.pop("t", None) or time.time(), "event": event, **fields}
        if code := of_event(record):
            record["code"] = code.id
        self.append(record)
        return record


def read_events(path: Path, damaged: Callable[[str], object] = lambda damage: None) -> Iterator[dict[str, Any]]:
    """Yield every event in order. A torn last line is left out. `damaged` is called for each other line that is no
    event."""
    return _events(path, json_lines.read(path), damaged)


def newest_events(path: Path, damaged: Callable[[str], object] = lambda damage: None) -> Iterator[dict[str, Any]]:
    """Yield the events, the newest first. Read only as far back as the caller asks."""
    return _events(path, json_lines.read_backwards(path), damaged)


class EventTail:
    """Reads an event log while it is being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the events that are new since the last call; none while the file does not exist. A damaged line is
        passed over."""
        return list(self.each())

    def each(self) -> Iterator[dict[str, Any]]:
        """Yield the same events one by one, for a log that is longer than memory. An event that was yielded is not new
        any more."""
        return _events(self._path, self._lines(), lambda damage: None)

    def _lines(self) -> Iterator[json_lines.Line]:
        with contextlib.suppress(FileNotFoundError):
            for line in json_lines.read(self._path, self._read_to):
                self._read_to = line.end
                yield line


def _events(
    path: Path, lines: Iterator[json_lines.Line], damaged: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.record is None:
            damaged(line.damage)
        elif not isinstance(line.record.get("event"), str):
            damaged(f"{path} at byte {line.begin}: not an event, it has {sorted(line.record)}")
        else:
            yield line.record


def passed_over(damaged: Sequence[str]) -> str:
    """Return a sentence about damaged lines, for people."""
    if len(damaged) == 1:
        return f"1 damaged line was passed over: {damaged[0]}"
    return f"{len(damaged)} damaged lines were passed over, the first: {damaged[0]}"
