"""What the process that writes checkpoints says: one line of JSON for each event."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from elastic_harness import shape
from elastic_harness.contract.wire import Malformed, decode

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
"""Events that a user is to see at once."""


def alarm(event: str, fields: dict[str, Any]) -> str:
    """Return what a user is to see of an event; empty if that is nothing."""
    if event not in ALARMING:
        return ""
    return f"{event.replace('_', ' ')}: {fields.get('error') or fields.get('repaired')}"


def print_alarm(event: str, fields: dict[str, Any]) -> None:
    """Print what a user is to see of an event, where no agent does it."""
    if said := alarm(event, fields):
        print(f"elastic-harness: {said}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class CheckpointEvent:
    """What became of a checkpoint. From the process that writes them, or a worker."""

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
        """Raises Malformed for anything that `to_line` did not write."""
        try:
            return shape.build(CheckpointEvent, decode(line))
        except ValueError as error:
            raise Malformed(f"a line whose {error}") from None
