"""A run in a few words, from its records: `ls`, `status` and the page show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic_harness.runs.events import EVENTS, newest_events
from elastic_harness.runs.folder import locked


def summary(path: Path, record: dict[str, Any], *events: str) -> dict[str, Any]:
    """Return a run as its records show it, with the newest of each of these events."""
    live = locked(path)
    state = record.get("status", "unknown")
    if not live and state in ("starting", "running", "stopping", "draining"):
        state = "dead"
    newest: dict[str, dict[str, Any]] = {}
    damaged: list[str] = []
    if (path / EVENTS).exists():
        for event in newest_events(path / EVENTS, damaged.append):
            if event["event"] in events:
                newest.setdefault(event["event"], event)
            if len(newest) == len(events):
                break
    committed = newest.get("step_committed", {})
    return {
        "run": record.get("run_id", path.name),
        "run_dir": str(path),
        "status": state,
        "live": live,
        "created": record.get("created"),
        "exit_code": record.get("exit_code"),
        "step": committed.get("step"),
        "loss": committed.get("loss"),
        "last_recovery": newest.get("recovery"),
        "last_incident": newest.get("incident", {}).get("what"),
        "last_incident_code": newest.get("incident", {}).get("code"),
        "damaged": damaged,
    }
