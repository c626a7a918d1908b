"""What a notice is that this machine will go, and how the metadata services of clouds tell of one. Pure.

Each reader gets what the service answered, and returns the notice, or None if there is none. It raises ValueError for
an answer that is none of the service's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

GCP_PREEMPTED_S = 30.0  # a preempted machine has so long
AZURE_GOING = ("Preempt", "Terminate", "Reboot", "Redeploy")  # "Freeze" pauses the machine for seconds
WHY_CHARS = 200


@dataclass(frozen=True)
class Notice:
    """This node is to go."""

    source: str  # SIGTERM, request, file, aws, gcp or azure
    why: str
    deadline: float | None = None  # unix time at which the machine goes; None: not known, or there is none


ON_REQUEST = Notice("request", "elastic-harness drain")


def read_aws(status: int, body: str) -> Notice | None:
    """Read the answer to `spot/instance-action`: 404 as long as the instance stays."""
    if status == 404:
        return None
    action = _object(status, body)
    what, at = action.get("action"), action.get("time")
    if not isinstance(what, str):
        raise ValueError(f"an instance action without an action: {body[:WHY_CHARS]!r}")
    return Notice("aws", f"the spot instance will {what}", _time(at, lambda text: datetime.fromisoformat(text[:19])))


def read_gcp_preempted(status: int, body: str, now: float) -> Notice | None:
    """Read the answer to `instance/preempted`. now: unix time."""
    if _word(status, body) != "TRUE":
        return None
    return Notice("gcp", "the instance is preempted", now + GCP_PREEMPTED_S)


def read_gcp_maintenance(status: int, body: str) -> Notice | None:
    """Read the answer to `instance/maintenance-event`. A live migration is no reason to go."""
    event = _word(status, body)
    return Notice("gcp", event) if event == "TERMINATE_ON_HOST_MAINTENANCE" else None


def read_azure(status: int, body: str, machine: str) -> Notice | None:
    """Read the answer to `scheduledevents`. machine: this one's name. The machines of a scale set hear of each other's
    events."""
    events = _object(status, body).get("Events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"scheduled events without a list of events: {body[:WHY_CHARS]!r}")
    for event in events:
        what, machines = event.get("EventType"), event.get("Resources")
        if what in AZURE_GOING and isinstance(machines, list) and machine in machines:
            return Notice("azure", f"{what} of {machine}", _time(event.get("NotBefore"), parsedate_to_datetime))
    return None


def read_file(text: str) -> Notice:
    """Return the notice that a file is. Its first line says why."""
    first = (text.splitlines() or [""])[0].strip()[:WHY_CHARS]
    return Notice("file", first or "the notice file is there")


def _time(text: object, parse: Callable[[str], datetime]) -> float | None:
    """Return a time in UTC as unix time. A notice counts even if its time cannot be read."""
    try:
        return parse(text).replace(tzinfo=timezone.utc).timestamp() if isinstance(text, str) else None
    except (ValueError, TypeError, OverflowError):
        return None


def _object(status: int, body: str) -> dict[str, Any]:
    try:
        value = json.loads(body) if status == 200 else None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"status {status}, {body[:WHY_CHARS]!r}")
    return value


def _word(status: int, body: str) -> str:
    if status != 200:
        raise ValueError(f"status {status}, {body[:WHY_CHARS]!r}")
    return body.strip()
