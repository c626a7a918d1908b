"""The store of several machines: `membership.store.Store` on an etcd."""

from __future__ import annotations

import base64
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_harness.errors import HarnessError, InfrastructureError
from elastic_harness.etcd.gateway import TOO_LARGE, Gateway, RequestRefused, Stream, decode, encode
from elastic_harness.membership.store import Change, Compacted, Entry, Put, TooLarge, Unavailable, Watch, check_changes

REQUEST_MIB = 1.5  # etcd's default --max-request-bytes
LEASE_NOT_FOUND = "requested lease not found"
RECONNECT_S_MAX = 1.0


class EtcdStore:
    """A store on an etcd. All keys are below `prefix`. `wake()` is called, in a separate thread, when a watch has
    something new.

    Every call blocks for at most the gateway's `timeout_s`, and raises Unavailable then. Any number of threads may use
    it, and so may a forked process. etcd counts leases in whole seconds and has a minimum (2 s with its defaults), so a
    lease may live longer than asked for, never shorter.
    """

    def __init__(self, gateway: Gateway, prefix: str = "", wake: Callable[[], None] = lambda: None) -> None:
        self._gateway = gateway
        self._prefix = prefix
        self._wake = wake

    @property
    def revision(self) -> int:
        return _revision(self._gateway.call("kv/range", {"key": encode(self._prefix or "\0"), "count_only": True}))

    def get(self, key: str) -> Entry | None:
        found = self._gateway.call("kv/range", {"key": self._key(key)})
        return next((_entry(kv, self._prefix) for kv in found.get("kvs", ())), None)

    def range(self, prefix: str) -> list[Entry]:
        return self.read(prefix)[0]

    def read(self, prefix: str) -> tuple[list[Entry], int]:
        found = self._gateway.call("kv/range", _range(self._prefix + prefix))
        return [_entry(kv, self._prefix) for kv in found.get("kvs", ())], _revision(found)

    def txn(
        self, compare: Mapping[str, int], puts: Sequence[Put] = (), deletes: Sequence[str] = ()
    ) -> tuple[bool, int]:
        check_changes(puts, deletes)
        expected = [
            {"key": self._key(key), "target": "MOD", "mod_revision": str(revision)}
            for key, revision in compare.items()
        ]
        changes = [
            *({"request_put": {"key": self._key(p.key), "value": encode(p.value), "lease": p.lease}} for p in puts),
            *({"request_delete_range": {"key": self._key(key)}} for key in deletes),
        ]
        try:
            told = self._gateway.call("kv/txn", {"compare": expected, "success": changes}, repeatable=False)
        except RequestRefused as error:
            if LEASE_NOT_FOUND in error.message:
                raise ValueError("the lease does not exist or has ended; take a new one") from error
            if error.message == TOO_LARGE:
                raise too_large(puts) from error
            raise
        return bool(told.get("succeeded")), _revision(told)

    def lease(self, ttl_s: float) -> int:
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is {ttl_s}; it must be greater than 0")
        return int(self._gateway.call("lease/grant", {"TTL": str(math.ceil(ttl_s))})["ID"])

    def keep_alive(self, lease: int) -> bool:
        return int(self._gateway.call("lease/keepalive", {"ID": str(lease)}).get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        try:
            self._gateway.call("lease/revoke", {"ID": str(lease)})
        except RequestRefused as error:
            if LEASE_NOT_FOUND not in error.message:
                raise

    def watch(self, prefix: str, from_revision: int) -> Watch:
        return _EtcdWatch(self._gateway, self._prefix, prefix, from_revision, self._wake)

    def compact(self, revision: int) -> None:
        """Have etcd forget the history before `revision`. etcd is usually set to do so by itself."""
        self._gateway.call("kv/compaction", {"revision": str(revision)})

    def _key(self, key: str) -> str:
        return encode(self._prefix + key)


class _EtcdWatch:
    """A thread that follows a stream. When the stream is lost, it opens another one at the next revision."""

    def __init__(
        self, gateway: Gateway, store_prefix: str, prefix: str, from_revision: int, wake: Callable[[], None]
    ) -> None:
        self._gateway = gateway
        self._store_prefix = store_prefix
        self._body = _range(store_prefix + prefix)
        self._wake = wake
        self._closed = threading.Event()
        self._begin(from_revision)

    def _begin(self, from_revision: int) -> None:
        self._pid = os.getpid()
        self._next = from_revision  # the first revision that was not received
        self._polled = from_revision  # the first revision that was not given to the caller
        self._changes: deque[Change] = deque()
        self._error: HarnessError | None = None
        self._stream: Stream | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._follow, name="etcd-watch", daemon=True).start()

    def poll(self) -> list[Change]:
        if self._closed.is_set():
            return []
        if self._pid != os.getpid():  # forked: threads and streams are the parent's
            self._begin(self._polled)
        changes = [self._changes.popleft() for _ in range(len(self._changes))]
        if changes:
            self._polled = changes[-1].revision + 1
        elif self._error is not None:
            raise self._error
        return changes

    def close(self) -> None:
        if self._pid == os.getpid():
            with self._lock:
                self._closed.set()
                if self._stream is not None:
                    self._stream.close()
        self._closed.set()

    def _follow(self) -> None:
        pause_s = 0.0
        while not self._closed.wait(pause_s):
            before = self._next
            try:
                self._read()
            except Unavailable:
                pause_s = 0.0 if self._next > before else min(RECONNECT_S_MAX, 2 * pause_s + 0.01)
            except HarnessError as error:
                return self._fail(error)
            except Exception as error:  # thread boundary: the caller would wait for ever
                return self._fail(InfrastructureError(f"A watch of the store failed: {error!r}."))

    def _fail(self, error: HarnessError) -> None:
        self._error = error
        self._wake()

    def _read(self) -> None:
        """Follow one stream to its end. Raises Unavailable when it is lost, Compacted if its first revision is no
        longer there."""
        stream = self._gateway.stream("watch", {"create_request": {**self._body, "start_revision": str(self._next)}})
        with self._lock:
            self._stream = stream
            if self._closed.is_set():
                stream.close()
        with stream:
            for told in stream:
                oldest = int(told.get("compact_revision", 0))
                if oldest:
                    raise Compacted(self._next, oldest)
                if told.get("canceled"):
                    raise Unavailable(f"etcd ended the watch: {told.get('cancel_reason')}.")
                changes = [self._change(event) for event in told.get("events", ())]
                if changes:
                    self._changes.extend(changes)
                    self._next = changes[-1].revision + 1
                    self._wake()

    def _change(self, event: Mapping[str, Any]) -> Change:
        entry = _entry(event["kv"], self._store_prefix)
        return Change(entry.revision, entry.key, None if event.get("type") == "DELETE" else entry)


def too_large(puts: Sequence[Put]) -> TooLarge:
    sizes = ", ".join(f"{put.key} with {len(put.value.encode()):,} bytes" for put in puts)
    return TooLarge(
        f"etcd takes no request of this size: {sizes}. Start all of its members with a larger --max-request-bytes (the "
        f"default is {REQUEST_MIB} MiB), then launch again with the same --run-dir and --run-id."
    )


def _range(prefix: str) -> dict[str, str]:
    """Return the range of all keys that begin with a prefix, as etcd takes it: from the prefix up to the first key that
    does not begin with it."""
    raw = prefix.encode()
    end = raw[:-1] + bytes([raw[-1] + 1]) if raw else b"\0"  # UTF-8 has no byte 255
    return {"key": base64.b64encode(raw or b"\0").decode(), "range_end": base64.b64encode(end).decode()}


def _entry(kv: Mapping[str, Any], prefix: str) -> Entry:
    key = decode(kv["key"]).removeprefix(prefix)
    return Entry(key, decode(kv.get("value", "")), int(kv["mod_revision"]), int(kv.get("lease", 0)))


def _revision(told: Mapping[str, Any]) -> int:
    return int(told["header"]["revision"])
