"""A store in memory that behaves as etcd does, for simulated clusters."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile

from elastic_harness.membership.store import Change, Compacted, Entry, Put, Watch, check_changes

HISTORY_EVENTS_MAX = 10_000


class EmbeddedStore:
    """A store in memory. Not safe for several threads. `revision`, `lease`: the last ones that were ever used.
    `entries`, `leases`: its contents at first. These leases never end by themselves."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        revision: int = 0,
        lease: int = 0,
        history_max: int = HISTORY_EVENTS_MAX,
        entries: Iterable[Entry] = (),
        leases: Iterable[int] = (),
    ) -> None:
        self._clock = clock
        self._revision = revision
        self._entries = {entry.key: entry for entry in entries}
        self._history: deque[Change] = deque()
        self._history_max = history_max
        self._compacted = revision
        self._leases = dict.fromkeys(leases, (math.inf, math.inf))
        self._lease_last = lease

    @property
    def revision(self) -> int:
        self._expire()
        return self._revision

    @property
    def leases(self) -> tuple[int, ...]:
        """The leases that have not ended."""
        self._expire()
        return tuple(self._leases)

    def get(self, key: str) -> Entry | None:
        self._expire()
        return self._entries.get(key)

    def range(self, prefix: str) -> list[Entry]:
        return self.read(prefix)[0]

    def read(self, prefix: str) -> tuple[list[Entry], int]:
        self._expire()
        return [self._entries[k] for k in sorted(self._entries) if k.startswith(prefix)], self._revision

    def txn(
        self, compare: Mapping[str, int], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> tuple[bool, int]:
        self._expire()
        check_changes(puts, deletes)
        for put in puts:
            if put.lease and put.lease not in self._leases:
                raise ValueError(f"lease {put.lease} does not exist or has ended; take a new one")
        for key, revision in compare.items():
            entry = self._entries.get(key)
            if (entry.revision if entry else 0) != revision:
                return False, self._revision
        self._apply(puts, [k for k in deletes if k in self._entries])
        return True, self._revision

    def lease(self, ttl_s: float) -> int:
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is {ttl_s}; it must be greater than 0")
        self._lease_last += 1
        self._leases[self._lease_last] = (ttl_s, self._clock() + ttl_s)
        return self._lease_last

    def keep_alive(self, lease: int) -> bool:
        self._expire()
        if lease not in self._leases:
            return False
        ttl_s, _ = self._leases[lease]
        self._leases[lease] = (ttl_s, self._clock() + ttl_s)
        return True

    def revoke(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None:
            self._apply((), [k for k, e in self._entries.items() if e.lease == lease])

    def watch(self, prefix: str, from_revision: int) -> Watch:
        self._expire()
        if from_revision <= self._compacted and from_revision <= self._revision:
            raise Compacted(from_revision, self._compacted + 1)
        return _EmbeddedWatch(self, prefix, from_revision)

    def compact(self, revision: int) -> None:
        """Forget the history up to and including `revision`."""
        while self._history and self._history[0].revision <= revision:
            self._history.popleft()
        self._compacted = max(self._compacted, min(revision, self._revision))

    def _since(self, prefix: str, revision: int) -> tuple[list[Change], int]:
        self._expire()
        if revision <= self._compacted and revision <= self._revision:
            raise Compacted(revision, self._compacted + 1)
        newest = takewhile(lambda change: change.revision >= revision, reversed(self._history))
        changes = [change for change in newest if change.key.startswith(prefix)]
        return changes[::-1], max(revision, self._revision + 1)

    def _expire(self) -> None:
        now = self._clock()
        for lease in [n for n, (_, ends) in self._leases.items() if ends <= now]:
            self.revoke(lease)

    def _apply(self, puts: Sequence[Put], deletes: Sequence[str]) -> None:
        if not puts and not deletes:
            return
        self._revision += 1
        for key in deletes:
            del self._entries[key]
            self._history.append(Change(self._revision, key, None))
        for put in puts:
            entry = Entry(put.key, put.value, self._revision, put.lease)
            self._entries[put.key] = entry
            self._history.append(Change(self._revision, put.key, entry))
        while len(self._history) > self._history_max:
            self.compact(self._history[0].revision)


class _EmbeddedWatch:
    def __init__(self, store: EmbeddedStore, prefix: str, from_revision: int) -> None:
        self._store: EmbeddedStore | None = store
        self._prefix = prefix
        self._next = from_revision

    def poll(self) -> list[Change]:
        if self._store is None:
            return []
        changes, self._next = self._store._since(self._prefix, self._next)
        return changes

    def close(self) -> None:
        self._store = None
