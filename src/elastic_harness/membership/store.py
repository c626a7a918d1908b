"""The store behind membership: what an agent needs of etcd v3.

Every change gets the next *revision* of the whole store. A transaction compares the revisions at which keys were last
changed (0: the key does not exist) and applies all of its puts and deletes, or nothing. A lease takes its keys along
when it is not kept alive. A watch starts at a revision and never loses a change: it raises `Compacted` if the history
that it asks for is gone, and the caller reads the range anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_harness.errors import InfrastructureError


class Compacted(InfrastructureError):
    """The requested revision is older than the history the store keeps; read the range anew and watch from there."""

    def __init__(self, revision: int, oldest: int) -> None:
        super().__init__(
            f"revision {revision} was compacted, the oldest kept is {oldest}; read the range anew and watch from there"
        )
        self.revision = revision
        self.oldest = oldest


class Unavailable(InfrastructureError):
    """The store did not answer in time. `maybe_applied`: a change that was asked for may have been made all the same;
    read the keys to know."""

    def __init__(self, message: str, maybe_applied: bool = False) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied


class TooLarge(InfrastructureError):
    """The store takes no request of this size. The same request would be refused again."""


@dataclass(frozen=True)
class Entry:
    """A key's value, the revision of its last change, and the lease it hangs on (0: none)."""

    key: str
    value: str
    revision: int
    lease: int = 0


@dataclass(frozen=True)
class Put:
    key: str
    value: str
    lease: int = 0


@dataclass(frozen=True)
class Change:
    """One event of a watch; `entry` is None for a deletion."""

    revision: int
    key: str
    entry: Entry | None


class Watch(Protocol):
    def poll(self) -> list[Change]:
        """All changes since the last call, oldest first; never blocks."""

    def close(self) -> None: ...


class Store(Protocol):
    """What membership asks of a store: that on etcd and the simulator's implement the same and pass the same tests.
    What is on other machines may raise `Unavailable`."""

    @property
    def revision(self) -> int: ...

    def get(self, key: str) -> Entry | None: ...

    def range(self, prefix: str) -> list[Entry]:
        """All entries whose key starts with the prefix, in key order."""

    def read(self, prefix: str) -> tuple[list[Entry], int]:
        """The same, and the revision of the store at which that was so."""

    def txn(
        self, compare: Mapping[str, int], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> tuple[bool, int]:
        """Apply all puts and deletes if every compared key is at its revision; (applied, revision of the store)."""

    def lease(self, ttl_s: float) -> int:
        """A new lease; its keys vanish when it was not kept alive for `ttl_s`."""

    def keep_alive(self, lease: int) -> bool:
        """Start the lease's time anew; False if it has already ended."""

    def revoke(self, lease: int) -> None: ...

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """Every change of matching keys at `from_revision` or later, none lost, none twice. Raises Compacted, now or
        when it is polled."""


def check_changes(puts: Sequence[Put], deletes: Sequence[str]) -> None:
    """Raises ValueError if a transaction changes a key twice."""
    touched = [p.key for p in puts] + list(deletes)
    if len(set(touched)) != len(touched):
        raise ValueError(f"a transaction may change a key once only; it names {sorted(touched)}")
