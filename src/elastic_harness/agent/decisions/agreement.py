"""Who decides about the workers of this node: this node alone, or all nodes of the run together (`cluster.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from elastic_harness.agent.loop import JobOutcome
from elastic_harness.membership import leader
from elastic_harness.membership.records import Known, Values
from elastic_harness.membership.types import Limits

CarryOut = Callable[[leader.Action], None]
Deliver = Callable[[Values], None]


class Agreement(Protocol):
    """What happens to workers is told here; what is decided is carried out by the one who told, in the order in which
    it was decided. Nothing here blocks.

    node: what the members of this node are called by, "" if there is only one. least: how many workers this node must
    have to go on, or it may as well end.
    """

    node: str
    least: int

    @property
    def born(self) -> bool:
        """Whether any step was ever committed."""

    def start(self) -> None: ...

    def tell(self, event: leader.Event, at: float | None = None) -> None:
        """Something happened, now or at a time of the monotonic clock."""

    def offer(self, generation: int, key: str, value: str) -> None:
        """A worker of this node set a value that other members wait for."""

    def describe(self, fingerprint: dict[str, Any]) -> None:
        """What all workers of the run have to agree in is known."""

    def scale(self, places: int) -> None:
        """This node wants so many workers."""

    def tick(self) -> None: ...

    def stop(self, outcome: JobOutcome, members: tuple[str, ...]) -> bool:
        """This node is to stop; `members`: of the generation. False: that is up to its own workers. True: the others
        go on without it."""

    def stop_all(self, reason: str) -> bool:
        """The run is to stop. True: everybody will hear of it, this node too."""

    def status(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Alone:
    """One node: the leader is here."""

    node = ""

    def __init__(self, limits: Limits, known: Known, carry_out: CarryOut) -> None:
        self.least = limits.min_workers
        self._carry_out = carry_out
        self._state = leader.State(limits, **vars(known))

    @property
    def born(self) -> bool:
        return self._state.born

    def start(self) -> None:
        pass

    def tell(self, event: leader.Event, at: float | None = None) -> None:
        self._state, actions = leader.step(self._state, event, time.monotonic() if at is None else at)
        for action in actions:
            self._carry_out(action)

    def offer(self, generation: int, key: str, value: str) -> None:
        pass

    def describe(self, fingerprint: dict[str, Any]) -> None:
        pass

    def scale(self, places: int) -> None:
        if places != self._state.limits.target:
            self.tell(leader.Scaled(places))

    def tick(self) -> None:
        self.tell(leader.Tick())

    def stop(self, outcome: JobOutcome, members: tuple[str, ...]) -> bool:
        return False

    def stop_all(self, reason: str) -> bool:
        return False

    def status(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass
