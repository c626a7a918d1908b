"""The little key-value board through which the members of one generation find each other."""

from __future__ import annotations

GENERATIONS_KEPT = 3


class KeyValues:
    """Values by (generation, key), set once; a get waits until there is one. Old generations are forgotten."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], str] = {}
        self._waiting: dict[tuple[int, str], list[str]] = {}

    def set(self, generation: int, key: str, value: str) -> list[str]:
        """Store a value; returns the members that have been waiting for it."""
        self._values[(generation, key)] = value
        return self._waiting.pop((generation, key), [])

    def get(self, generation: int, key: str, member: str) -> str | None:
        """The value, or None: then the member is remembered as waiting."""
        value = self._values.get((generation, key))
        if value is None:
            self._waiting.setdefault((generation, key), []).append(member)
        return value

    def forget_before(self, newest: int) -> None:
        """Drop what belongs to generations long gone. The one before a planned change is still in use."""
        oldest = newest - GENERATIONS_KEPT + 1
        self._values = {k: v for k, v in self._values.items() if k[0] >= oldest}
        self._waiting = {k: v for k, v in self._waiting.items() if k[0] >= oldest}
