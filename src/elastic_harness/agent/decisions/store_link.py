"""A node's line to the store. It carries out in its own threads what a `Node` asks for, so that the agent never waits.

One thread makes the requests, one after the other. Another thread keeps the lease alive. Their results are queued, and
`wake` tells the agent so. While the store is away, it is asked again and again: nothing is given up, and nothing is
lost.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from elastic_harness.errors import ConfigError, HarnessError, InfrastructureError
from elastic_harness.etcd.once import Once
from elastic_harness.health.lasting import Lasting, Turn
from elastic_harness.membership import line, node
from elastic_harness.membership.store import Put, Store, TooLarge, Watch

PAUSE_S = 0.2
ONCE = "once/"
STATUS = "status"
CLOSE_S_MAX = 1.0
RENEWAL_MAX = 0.25  # of the lease; it is renewed every third of it

_NO_ANSWER = (KeyError, TypeError, ValueError, AttributeError)  # JSON, but not what etcd answers: a proxy's, perhaps
Asked = node.Register | node.Follow | node.Write


class StoreLink:
    """`keeper`: the same store for the thread that keeps the lease, with a short timeout. `ttl_s`: how long the lease
    lives."""

    def __init__(self, store: Store, keeper: Store, ttl_s: float, wake: Callable[[], None]) -> None:
        self._store = store
        self._keeper = keeper
        self._ttl_s = ttl_s
        self._wake = wake
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._told: deque[node.Input | HarnessError | tuple[Watch, node.Read]] = deque()
        self._watch: Watch | None = None
        self._following: node.Follow | None = None
        self._lease = 0
        self._former = 0  # a lease that is given up, and perhaps not yet revoked
        self._once: Once | None = None
        self._ever = False  # there was a lease: from then on every error of the store may pass
        self._failing: dict[str, tuple[float, str]] = {}  # by thread: since when, and why
        self._closed = threading.Event()
        self._status = ""
        self._renewals: deque[float] = deque(maxlen=8)  # seconds that the newest ones took, failed ones too
        self._late = Lasting(RENEWAL_MAX * ttl_s, 2, 0.0, smooth=1, rest=10)
        self._threads = [
            threading.Thread(target=self._guard, args=(self._make_requests,), name="store-requests", daemon=True),
            threading.Thread(target=self._guard, args=(self._keep_alive,), name="store-lease", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, asked: Asked) -> None:
        """Queue a request. Its outcome comes from `heard`."""
        if isinstance(asked, node.Follow):
            self._following = asked
        self._asked.put(asked)

    def heard(self) -> list[node.Input]:
        """Return what is new. Raises HarnessError if the store never let us in, or will never take what has to be
        written."""
        inputs: list[node.Input] = []
        while self._told:
            told = self._told.popleft()
            if isinstance(told, HarnessError):
                raise told
            if isinstance(told, tuple):
                self._stop_watching()
                self._watch, told = told
            inputs.append(told)
        if self._watch is not None:
            try:
                inputs += map(node.Saw, self._watch.poll())
            except HarnessError:  # the history is gone: read anew
                self._stop_watching()
                if self._following is not None:
                    self.ask(self._following)
        return inputs

    @property
    def trouble(self) -> tuple[float, str] | None:
        """Since when (monotonic) the store cannot be used, and why; None if it can be used."""
        failing = sorted(self._failing.values())
        return failing[0] if failing else None

    def late_renewal(self) -> float | None:
        """Return how many seconds renewals of the lease take, if that has just become so long that the lease may be
        lost."""
        late = None
        while self._renewals:
            took_s = self._renewals.popleft()
            if self._late.note(took_s, time.monotonic()) is Turn.LASTS:
                late = took_s
        return late

    def show_status(self, text: str) -> None:
        """Show this status in the store. It is written with the next keep-alive."""
        self._status = text

    def close(self) -> None:
        """Give the lease back, so that the other nodes need not wait for its end. Takes at most about a second for each
        thread."""
        self._closed.set()
        self._asked.put(None)
        self._stop_watching()
        for thread in self._threads:
            thread.join(CLOSE_S_MAX)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # thread boundary: the agent would wait for ever
            self._tell(InfrastructureError(f"the line to the store failed: {error!r}"))

    # ---- the thread of requests

    def _make_requests(self) -> None:
        while not self._closed.is_set():
            asked = self._asked.get()
            while asked is not None and not self._closed.is_set():
                try:
                    self._request(asked)
                    self._failing.pop("requests", None)
                    break
                except TooLarge as error:  # nothing can be decided any more, and a repetition would not help
                    self._tell(error)
                    return
                except HarnessError as error:
                    if not self._ever and isinstance(error, ConfigError):
                        self._tell(error)
                        return
                    self._fails("requests", error)
                    self._closed.wait(PAUSE_S)
                except _NO_ANSWER as error:
                    self._fails("requests", _nonsense(error))
                    self._closed.wait(PAUSE_S)
        if self._lease:
            with contextlib.suppress(HarnessError):
                self._keeper.revoke(self._lease)

    def _request(self, asked: Asked) -> None:
        match asked:
            case node.Register():
                self._former, self._lease = self._lease or self._former, 0
                self._lease, self._former = line.register(self._store, self._former, self._ttl_s), 0
                self._once = Once(self._store, ONCE, lambda: self._lease, 0.0)
                self._ever = True
                self._tell(node.Registered())
            case node.Follow():
                if asked is self._following:  # otherwise a later request has replaced it
                    self._tell(line.follow(self._store, asked))
            case node.Write():
                assert self._once is not None
                self._tell(line.write(self._once, asked, self._lease))

    # ---- the thread of the lease

    def _keep_alive(self) -> None:
        shown, ended = "", 0
        while not self._closed.wait(self._ttl_s / 3):
            lease = self._lease
            if not lease or lease == ended:
                continue
            asked_at = time.monotonic()
            try:
                alive = self._keeper.keep_alive(lease)
                self._renewals.append(time.monotonic() - asked_at)
                if not alive:
                    ended = lease
                    if lease == self._lease:
                        self._tell(node.LeaseEnded())
                elif self._status != shown:
                    shown = self._status
                    with contextlib.suppress(ValueError):
                        self._keeper.txn({}, [Put(STATUS, shown, lease)])
                self._failing.pop("lease", None)
            except HarnessError as error:
                self._renewals.append(time.monotonic() - asked_at)
                self._fails("lease", error)
            except _NO_ANSWER as error:
                self._fails("lease", _nonsense(error))

    def _fails(self, thread: str, error: HarnessError) -> None:
        since, _ = self._failing.get(thread, (time.monotonic(), ""))
        self._failing[thread] = (since, str(error))
        self._wake()

    def _tell(self, told: node.Input | HarnessError | tuple[Watch, node.Read]) -> None:
        self._told.append(told)
        self._wake()


def _nonsense(error: Exception) -> InfrastructureError:
    return InfrastructureError(f"its answer is not etcd's ({error!r}); is there a proxy between?")
