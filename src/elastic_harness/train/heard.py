"""What a worker has heard from its coordinator about generations, and what follows for it. Pure, and without torch, so
that the model checker and the simulator drive this very code.

Messages may arrive in a burst, before the worker looks: only the newest generation is known then, and of those before
it, whether one was urgent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_harness.membership.types import Generation


@dataclass(frozen=True)
class Heard:
    """newest: the newest generation. urgent_number: no generation below this one may go on."""

    newest: Generation | None = None
    urgent_number: int = 0
    paused: bool = False

    def announced(self, generation: Generation) -> Heard:
        """Return what is known after this generation was announced."""
        urgent_number = generation.number if generation.urgent else self.urgent_number
        return Heard(generation, urgent_number)

    def told_to_pause(self) -> Heard:
        """Return what is known after a pause: no generation goes on until the next one is announced."""
        number = self.newest.number if self.newest is not None else 0
        return replace(self, paused=True, urgent_number=number + 1)

    def urgent(self, current: int) -> bool:
        """Whether generation `current` must not go on."""
        return self.urgent_number > current

    def planned(self, current: int) -> int:
        """The number of the newest generation after `current`, else `current`."""
        return max(current, self.newest.number if self.newest is not None else 0)

    def next(self, member: str, after: int, *, boundary: bool, formed: bool) -> Generation | None:
        """The generation beyond `after` that this member is to react to, if there is one: the newest, if it or one in
        between is urgent, or leaves this member out, or if this member does no step: it is at a boundary, or `after`
        was not formed for it (and never will be: the leader forgot it with the store's data)."""
        newest = self.newest
        if newest is None or newest.number <= after or self.paused:
            return None
        reacts = boundary or not formed or member not in newest.members or self.urgent_number > after
        return newest if reacts else None
