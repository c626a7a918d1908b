"""The event log: one JSON object a line, one writer, readable while it is written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic_harness.errors import InfrastructureError
from elastic_harness.shape import expect, parse_object

SCHEMA = 1


def open_appendable(path: Path) -> int:
    """Open an append-only JSON-lines file; a torn last line (the writer was killed) is cut off first."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    size = os.fstat(descriptor).st_size
    keep = size
    while keep > 0:
        start = max(0, keep - 65536)
        newline = os.pread(descriptor, keep - start, start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep < size:
        os.ftruncate(descriptor, keep)
    os.lseek(descriptor, 0, os.SEEK_END)
    return descriptor


class EventLog:
    """Append-only `events.jsonl`. Each line is written by a single `write`, so a crash of the writer loses at
    most the line it was writing. Not safe for two processes: a run has one writer per node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_appendable(path)

    def emit(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one event, stamped with the current time unless `t` is given."""
        record: dict[str, Any] = {"t": fields.pop("t", None) or time.time(), "event": event, **fields}
        os.write(self._descriptor, json.dumps(record, separators=(",", ":")).encode() + b"\n")
        return record

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line of the log in order; a torn last line is left out. Any other line that is no event raises
    InfrastructureError."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                event = parse_object(line)
                expect(event, {"event": str})
            except ValueError as error:
                raise InfrastructureError(f"{path}:{number} is no event ({error}); the log was damaged") from error
            yield event
