"""Spans of a run from its events. Pure. A launch is a trace; its generations, recoveries and checkpoints are spans.

The ids of a span are made from what it is about, so whoever reads the same events again makes the same span.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_harness.incidents.naming import of_event

_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "generation": ("number", "world_size", "urgent", "reason"),
    "recovery": ("generation", "member", "resumed_step", "reason", "world_size", "total_ms"),
    "checkpoint_saved": ("step", "bytes"),
    "checkpoint_uploaded": ("step", "bytes", "url"),
}


@dataclass(frozen=True)
class RunSpan:
    """One span that has ended, times in UNIX seconds."""

    name: str
    began_at: float
    ended_at: float
    trace: tuple[str, int]  # the run, and which launch of it
    key: str  # what it is about, once in a trace; the launch itself: ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[tuple[float, str, Mapping[str, Any]], ...] = ()  # time, name, attributes: failures of a launch
    failed: bool = False

    @property
    def trace_id(self) -> int:
        return _number(16, *self.trace)

    @property
    def span_id(self) -> int:
        return _number(8, *self.trace, self.key)


class Spans:
    """Takes events in their order, and gives back the spans that end with them."""

    def __init__(self, run_id: str) -> None:
        self._run_id, self._launch = run_id, 0
        self._began: dict[str, tuple[float, Mapping[str, Any]]] = {}  # what goes on: a launch, a generation
        self._failures: list[tuple[float, str, Mapping[str, Any]]] = []
        self._newest = 0.0

    def take(self, event: Mapping[str, Any]) -> Iterator[RunSpan]:
        """Yield the spans that an event ends."""
        name, t = event["event"], event.get("t")
        if not isinstance(t, int | float):
            return
        if name == "run_started":
            yield from self._end(self._newest, "cut off")
            self._launch += 1
            self._began["launch"] = (t, {"run": self._run_id, "nproc": event.get("nproc")})
        self._newest = float(t)
        if (code := of_event(event)) is not None and name not in ("incident", "hang"):
            told = {"code": code.id, "what": code.name, "member": event.get("member"), "step": event.get("step")}
            self._failures.append((t, name, _told(told)))
        if name == "generation":
            yield from self._end_of("generation", t)
            self._began["generation"] = (t, _of(event))
        elif name == "recovery" and isinstance(event.get("t_noticed"), int | float):
            planned = "change of members" if event.get("planned") else "recovery"
            yield self._span(planned, event["t_noticed"], t, f"recovery {event.get('generation')}", _of(event))
        elif name in ("checkpoint_saved", "checkpoint_uploaded"):
            key = f"{name} {event.get('step')} {t}"
            yield self._span(name.replace("_", " "), t - float(event.get("seconds") or 0.0), t, key, _of(event))
        elif name == "run_finished":
            yield from self._end(t, str(event.get("status")))

    def _end(self, t: float, status: str) -> Iterator[RunSpan]:
        yield from self._end_of("generation", t)
        if "launch" in self._began:
            began_at, told = self._began.pop("launch")
            told, trace = _told({**told, "status": status}), (self._run_id, self._launch)
            failed = status not in ("finished", "stopped")
            yield RunSpan("launch", began_at, t, trace, "", told, tuple(self._failures), failed)
            self._failures = []

    def _end_of(self, name: str, t: float) -> Iterator[RunSpan]:
        if name in self._began:
            began_at, told = self._began.pop(name)
            yield self._span(name, began_at, t, f"{name} {told.get('number')}", told)

    def _span(self, name: str, began_at: float, ended_at: float, key: str, told: Mapping[str, Any]) -> RunSpan:
        return RunSpan(name, began_at, max(began_at, ended_at), (self._run_id, self._launch), key, told)


def _of(event: Mapping[str, Any]) -> Mapping[str, Any]:
    return _told({name: event.get(name) for name in _ATTRIBUTES[event["event"]]})


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an attribute may hold."""
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool)}


def _number(nbytes: int, *of: object) -> int:
    """Return a number that is never 0, from what it is of."""
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:nbytes], "big") or 1
