"""The events that the process which writes checkpoints tells: one line of JSON each."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from elastic_harness import shape
from elastic_harness.contract.wire import Malformed, decode
from elastic_harness.incidents.naming import of_event

ALARMING = frozenset(
    {
        "checkpoint_failed",
        "checkpoint_corrupt",
        "checkpoint_passed_over",
        "checkpoint_repaired",
        "checkpoint_writer_died",
        "memory_passed_over",
        "upload_failed",
        "peer_copy_failed",
        "keeper_failed",
    }
)
"""Events that a user has to see at once."""


def alarm(event: str, fields: dict[str, Any]) -> str:
    """Return the line that a user has to see of an event; "" if there is none."""
    if event not in ALARMING:
        return ""
    code = of_event({"event": event, **fields})
    named = f" [{code.id}]" if code else ""
    return f"{event.replace('_', ' ')}: {fields.get('error') or fields.get('repaired')}{named}"


def print_alarm(event: str, fields: dict[str, Any]) -> None:
    """Print the line that a user has to see of an event, in a process without an agent that would."""
    if said := alarm(event, fields):
        print(f"elastic-harness: {said}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class CheckpointEvent:
    """An event in the life of a checkpoint. The process that writes checkpoints sends it, or a worker."""

    event: str
    fields: dict[str, Any]

    def __post_init__(self) -> None:
        if self.event in ("checkpoint_saved", "checkpoint_uploaded", "checkpoint_failed"):
            shape.expect(self.fields, {"step": int})
        if self.event == "checkpoint_begun":
            shape.expect(self.fields, {"attempt": int})

    def to_line(self) -> str:
        return json.dumps({"event": self.event, "fields": self.fields})

    @staticmethod
    def from_line(line: bytes) -> CheckpointEvent:
        """Return the event in a line. Raises Malformed for a line that `to_line` did not write."""
        try:
            return shape.build(CheckpointEvent, decode(line))
        except ValueError as error:
            raise Malformed(f"a line whose {error}") from None
