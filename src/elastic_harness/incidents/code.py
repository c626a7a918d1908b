"""A code: one kind of thing that goes wrong, and all that can be said about it offline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Domain = Literal["workload", "infrastructure", "unknown"]
"""workload: the script, its data or its settings. infrastructure: the machine, the network, the storage, or people who
operate them. unknown: the evidence fits both."""
Retry = Literal["yes", "no", "unknown"]
"""Whether the same again, with nothing changed, would do."""

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "W": "Workers and agents that end",
        "H": "Hangs",
        "M": "Memory",
        "T": "Slow machines and waits",
        "N": "Bad numbers",
        "C": "Corruption: other bits",
        "S": "Storage and checkpoints",
        "P": "Preemption and requests to stop",
        "L": "Links, membership and the store",
        "U": "User code and data",
        "R": "Settings that do not fit",
    }
)
UNKNOWN_PLACE: Mapping[str, object] = MappingProxyType(
    {"run": "RUN", "member": "WORKER", "step": "S", "slot": "J", "log": "its log"}
)
"""The words in `Code.next` of which nothing is known."""


@dataclass(frozen=True)
class Code:
    """One row of the table."""

    id: str  # EH-W101: the family's letter and a number, neither of which ever changes
    name: str  # a few words
    domain: Domain
    retry: Retry
    symptom: str  # what a user sees
    meaning: str  # what it says, and what it does not
    evidence: str  # the facts by which this code was chosen
    inferred: str  # what is concluded from these facts and is not itself a fact
    done: str  # by the harness
    next: tuple[str, ...]  # for the user, with commands; {run}, {member}, {step}, {slot} and {log} are filled in
    exit_code: int | None = None  # of a run that this code ends

    @property
    def family(self) -> str:
        return self.id[3]

    def what_next(self, place: Mapping[str, object] = UNKNOWN_PLACE) -> list[str]:
        """Return what to do next, with what is known of the place filled in."""
        known = {name: value for name, value in place.items() if value is not None}
        return [sentence.format_map({**UNKNOWN_PLACE, **known}) for sentence in self.next]
