"""The values that the nodes of a run read from the store. Each value is checked as a whole before it is used.

Anybody may write into a store. A value that none of our nodes wrote raises ValueError here, and the node that reads it
goes on with the values that it had.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_harness import shape
from elastic_harness.membership import protocol
from elastic_harness.membership.codec import decode, from_text
from elastic_harness.omissions import Entry, as_omissions


@dataclass(frozen=True)
class Known:
    """The facts about a run that must outlive the store. Every node keeps them."""

    number: int = 0  # the last generation number ever used
    born: bool = False  # a step was committed at some time
    lineage: int = 0  # the newest one, …
    from_step: int = 0  # … and the step at which it began
    saved: bool = False  # a checkpoint was saved at some time
    doubts: tuple[tuple[int, int], ...] = ()  # what lineages before this one did beyond this version never counts
    omissions: tuple[Entry, ...] = ()  # of all rollbacks by a policy

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubts", tuple(sorted((lineage, version) for lineage, version in self.doubts)))
        object.__setattr__(self, "omissions", as_omissions(self.omissions))

    @staticmethod
    def of(state: protocol.State) -> Known:
        return Known(
            state.number, state.born, state.lineage, state.from_step, state.saved, state.doubts, state.omissions
        )

    def and_also(self, other: Known) -> Known:
        """Return what both together know."""
        newest = max(self, other, key=lambda known: (known.lineage, known.from_step))
        number, born, saved = max(self.number, other.number), self.born or other.born, self.saved or other.saved
        doubts = tuple({*self.doubts, *other.doubts})
        omissions = tuple({*self.omissions, *other.omissions})
        return Known(number, born, newest.lineage, newest.from_step, saved, doubts, omissions)


Values = Mapping[int, Mapping[str, str]]
"""The values that members have set for each other, by generation and key."""

_EVENTS = typing.get_args(protocol.Event)
_ACTIONS = typing.get_args(protocol.Action)
_RECORD: shape.Shape = {
    "about": dict[str, Any],
    "places": int,
    "members": list[str],
    "known": dict[str, Any],
    "events": list[tuple[int, dict[str, Any]]],
    "values": dict[int, dict[str, str]],
}
_DECISION: shape.Shape = {
    "origin": str,
    "now": float,
    "known": dict[str, Any],
    "about": dict[str, Any],
    "generation": int | None,
    "members": list[str] | None,
    "formed": bool,
    "paused": str,
    "finished": int | None,
    "excluded": dict[str, str],
    "damaged": list[str] | None,
    "taken": dict[str, int],
    "count": int,
    "actions": list[tuple[int, dict[str, Any]]],
}


def read_record(text: str) -> dict[str, Any]:
    """Return a node's record, its events decoded. Raises ValueError."""
    record = _object(text)
    shape.expect(record, _RECORD)
    shape.expect(record["known"], shape.of(Known))
    record["events"] = [(number, _one_of(_EVENTS, event)) for number, event in record["events"]]
    return record


def read_decision(text: str) -> dict[str, Any]:
    """Return a decision, its actions decoded. Raises ValueError."""
    decision = _object(text)
    shape.expect(decision, _DECISION)
    shape.expect(decision["known"], shape.of(Known))
    for _, action in decision["actions"]:
        _one_of(_ACTIONS, action)
    return decision


def read_state(text: str) -> protocol.State:
    """Return the leader's state that stands beside a decision. Raises ValueError."""
    state: protocol.State = _one_of((protocol.State,), from_text(text))
    return state


def read_values(text: str) -> dict[int, dict[str, str]]:
    """Return the addresses of members, by generation and key. Raises ValueError."""
    values = _object(text)
    shape.expect({"values": values}, {"values": dict[int, dict[str, str]]})
    return {int(number): by_key for number, by_key in values.items()}


def _object(text: str) -> dict[str, Any]:
    value = from_text(text)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {str(value)[:40]!r}, not an object")
    return value


def _one_of(classes: tuple[type[Any], ...], data: Any) -> Any:
    value = decode(data)
    if not isinstance(value, classes):
        raise ValueError(f"{str(data)[:80]!r} is none of {', '.join(each.__name__ for each in classes)}")
    return value
