"""How it is decided about the workers of this node: by this node alone, or by all nodes of the run (`cluster.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from elastic_harness.membership import protocol
from elastic_harness.membership.records import Known, Values
from elastic_harness.membership.types import Limits

CarryOut = Callable[[protocol.Action], None]
Deliver = Callable[[Values], None]


class Agreement(Protocol):
    """The supervisor tells it what happens to workers, and carries out its decisions in the order in which they were
    made. Nothing here blocks.

    node: the prefix of this node's member names, "" if there is only one node. least: how many workers this node must
    have to go on; with fewer it may as well end.
    """

    node: str
    least: int

    @property
    def born(self) -> bool:
        """Whether any step was ever committed."""

    @property
    def saved(self) -> bool:
        """Whether any checkpoint was ever saved."""

    def start(self) -> None: ...

    def tell(self, event: protocol.Event, at: float | None = None) -> None:
        """Take an event that happened now, or at a time of the monotonic clock."""

    def offer(self, generation: int, key: str, value: str) -> None:
        """Take a value that a worker of this node has set for other members."""

    def describe(self, fingerprint: dict[str, Any]) -> None:
        """Take the fingerprint in which all workers of the run have to agree."""

    def scale(self, places: int) -> None:
        """Take the number of workers that this node wants."""

    def tick(self) -> None: ...

    def leave(self) -> bool:
        """Tell the other nodes that this one leaves at a step boundary. Return False if they would not hear of it."""

    def stop_all(self, reason: str) -> bool:
        """Stop the run. Return True if everybody will hear of it, this node too."""

    def status(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Alone:
    """One node: the leader is here."""

    node = ""

    def __init__(self, limits: Limits, known: Known, carry_out: CarryOut) -> None:
        self.least = limits.min_workers
        self._carry_out = carry_out
        self._state = protocol.State(limits, **vars(known))

    @property
    def born(self) -> bool:
        return self._state.born

    @property
    def saved(self) -> bool:
        return self._state.saved

    def start(self) -> None:
        pass

    def tell(self, event: protocol.Event, at: float | None = None) -> None:
        self._state, actions = protocol.step(self._state, event, time.monotonic() if at is None else at)
        for action in actions:
            self._carry_out(action)

    def offer(self, generation: int, key: str, value: str) -> None:
        pass

    def describe(self, fingerprint: dict[str, Any]) -> None:
        pass

    def scale(self, places: int) -> None:
        if places != self._state.limits.target:
            self.tell(protocol.Scaled(places))

    def tick(self) -> None:
        self.tell(protocol.Tick())

    def leave(self) -> bool:
        return False

    def stop_all(self, reason: str) -> bool:
        return False

    def status(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass
