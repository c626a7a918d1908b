"""The store behind membership: the part of etcd v3 that an agent needs.

Every change gets the next *revision* of the whole store. A transaction compares the revisions at which keys were last
changed (0: the key does not exist). It applies all of its puts and deletes, or nothing. A lease that is not kept alive
ends, and its keys vanish with it. A watch starts at a revision and never loses a change. It raises `Compacted` if the
store no longer has the history from that revision on. The caller then reads the range anew.
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
    """The store did not answer in time. `maybe_applied`: the store may have made the change all the same. The caller
    reads the keys to know."""

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
        """Return all changes since the last call, oldest first; never block."""

    def close(self) -> None: ...


class Store(Protocol):
    """The calls that membership makes to a store. The store on etcd and the simulator's store implement the same calls
    and pass the same tests. A store on other machines may raise `Unavailable`."""

    @property
    def revision(self) -> int: ...

    def get(self, key: str) -> Entry | None: ...

    def range(self, prefix: str) -> list[Entry]:
        """Return all entries whose key starts with the prefix, in key order."""

    def read(self, prefix: str) -> tuple[list[Entry], int]:
        """Return the same entries, and the revision of the store at which they were so."""

    def txn(
        self, compare: Mapping[str, int], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> tuple[bool, int]:
        """Apply all puts and deletes if every compared key is at its revision. Return whether they were applied, and
        the revision of the store."""

    def lease(self, ttl_s: float) -> int:
        """Return a new lease. Its keys vanish when it was not kept alive for `ttl_s`."""

    def keep_alive(self, lease: int) -> bool:
        """Start the lease's time anew. Return False if it has already ended."""

    def revoke(self, lease: int) -> None: ...

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """Return a watch of every change of matching keys at `from_revision` or later. It loses no change and tells
        none twice. Raises Compacted, now or when the watch is polled."""


def check_changes(puts: Sequence[Put], deletes: Sequence[str]) -> None:
    """Raise ValueError if a transaction changes a key twice."""
    touched = [p.key for p in puts] + list(deletes)
    if len(set(touched)) != len(touched):
        raise ValueError(f"a transaction may change a key once only; it names {sorted(touched)}")
