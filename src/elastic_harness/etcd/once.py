"""Transactions whose outcome is always known, even if an answer was lost."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from elastic_harness.membership.store import Entry, Put, Store, Unavailable

PAUSE_S = 0.1


class Once:
    """Applies each transaction once or not at all, and says which. Not for several threads.

    Each transaction leaves its number in a key that only this object writes, and expects the number before it there. If
    an answer is lost, the key tells whether the transaction was applied. If an old try is still under way while the
    next one is sent, only one of the two can be applied. `lease()` returns the lease for that key.
    """

    def __init__(self, store: Store, folder: str, lease: Callable[[], int], patience_s: float) -> None:
        self._store = store
        self._key = f"{folder}{uuid.uuid4().hex}"
        self._lease = lease
        self._patience_s = patience_s
        self._number = 0
        self._settled = True  # whether the outcome of the last transaction is known
        self._revision = 0  # of the key; -1: to be read

    def txn(
        self, compare: Mapping[str, int], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> tuple[bool, int]:
        """Apply a transaction, as `Store.txn`. Raises Unavailable only after `patience_s`. After any error the next
        call must be for the very same transaction: that call goes on finding out what became of it."""
        if self._settled:
            self._number += 1
        self._settled = False
        mark = Put(self._key, str(self._number), self._lease())
        give_up_at = time.monotonic() + self._patience_s
        while True:
            try:
                outcome = self._try(compare, puts, deletes, mark)
                self._settled = True
                return outcome
            except ValueError:  # the lease has ended, and with it every key that hung on it
                self._settled = True
                raise
            except Unavailable as error:
                if error.maybe_applied:
                    self._revision = -1
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(PAUSE_S)

    def _try(
        self, compare: Mapping[str, int], puts: Sequence[Put], deletes: Sequence[str], mark: Put
    ) -> tuple[bool, int]:
        if self._revision < 0:
            arrived = self._arrived(mark)
            if arrived is not None:
                return True, arrived.revision
        applied, revision = self._store.txn({**compare, self._key: self._revision}, [*puts, mark], deletes)
        if applied:
            self._revision = revision
            return True, revision
        arrived = self._arrived(mark)
        return (False, revision) if arrived is None else (True, arrived.revision)

    def _arrived(self, mark: Put) -> Entry | None:
        """Return the key, if an earlier try of the same transaction was applied after all."""
        entry = self._store.get(self._key)
        self._revision = 0 if entry is None else entry.revision
        return entry if entry is not None and entry.value == mark.value else None
