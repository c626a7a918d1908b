"""What a member may wait for from another member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

HEADER, JOIN, REDUCE, GATHER, SPREAD, RECHECK, TRANSFER, MEASURED, CONNECTION, REPORT = range(10)
"""The kinds of messages between members. The first six are in the order in which a step needs them; MEASURED comes
before a step. The others belong to a recovery: state travels, a peer connects, and a peer reports to the leader, who
needs all reports for the digest. The first eight have tags."""


class Awaited(NamedTuple):
    """One part that a member waits for."""

    kind: int
    rank: int  # of the member from which it comes
    lo: int = 0  # first lane of the sum, if it is the sum of some lanes
    hi: int = 0  # one past its last lane

    def in_words(self, step: int) -> str:
        if self.kind == HEADER:
            return f"the header of step {step}"
        if self.kind in (JOIN, REDUCE):
            lanes = f"lane {self.lo}" if self.hi - self.lo == 1 else f"lanes {self.lo}-{self.hi - 1}"
            return f"the sum of {lanes} of step {step}"
        if self.kind in (GATHER, SPREAD):
            return f"a part of the finished sum of step {step}"
        if self.kind == RECHECK:
            return f"what it computes again of step {step}"
        if self.kind == MEASURED:
            return f"what it has measured of version {step}"
        return {TRANSFER: "training state", CONNECTION: "a connection", REPORT: "a report"}.get(self.kind, "something")


@dataclass(frozen=True)
class Wait:
    """What one member waits for."""

    step: int  # -1 in a recovery
    since: float  # UNIX time
    parts: tuple[Awaited, ...]
    unlisted: int = 0  # further parts, for which the board has no room
