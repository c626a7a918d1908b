"""The small key-value board through which the members of one generation find each other."""

from __future__ import annotations

GENERATIONS_KEPT = 3


class KeyValues:
    """Values by (generation, key), each set once. A get waits until there is a value. Old generations are forgotten."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], str] = {}
        self._waiting: dict[tuple[int, str], list[str]] = {}

    def set(self, generation: int, key: str, value: str) -> list[str]:
        """Store a value, and return the members that have been waiting for it."""
        self._values[(generation, key)] = value
        return self._waiting.pop((generation, key), [])

    def get(self, generation: int, key: str, member: str) -> str | None:
        """Return the value, or None. Then the member is remembered as waiting."""
        value = self._values.get((generation, key))
        if value is None:
            self._waiting.setdefault((generation, key), []).append(member)
        return value

    def forget_before(self, newest: int) -> None:
        """Drop the values of generations long gone. The generation before a planned change is still in use."""
        oldest = newest - GENERATIONS_KEPT + 1
        self._values = {k: v for k, v in self._values.items() if k[0] >= oldest}
        self._waiting = {k: v for k, v in self._waiting.items() if k[0] >= oldest}
