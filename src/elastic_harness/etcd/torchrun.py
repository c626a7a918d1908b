"""A rendezvous for torchrun on etcd v3. It does not need etcd's v2 API, and works for any PyTorch script:

    torchrun --nnodes 1:4 --rdzv-backend etcd-v3 --rdzv-endpoint host:2379,host2:2379 --rdzv-id my-job train.py

    --rdzv-conf ca=FILE,cert=FILE,key=FILE,user=NAME,password_file=FILE     TLS (ca: begin with etcds://) and login

The nodes hold nothing of the rendezvous. So the loss of the first node is like that of any other: the nodes that are
left rendezvous again. With `keep_alive_interval=1` (seconds) in --rdzv-conf a lost node is noticed after three seconds.
"""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlencode

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from elastic_harness.errors import HarnessError
from elastic_harness.etcd.address import Address
from elastic_harness.etcd.gateway import Gateway
from elastic_harness.etcd.once import Once
from elastic_harness.etcd.store import EtcdStore
from elastic_harness.membership.store import Compacted, Entry, Put, Unavailable
from elastic_harness.names import check_name

PREFIX = "torch/elastic/"
TTL_S = 86_400.0  # of all keys, from the last time that the lease was renewed
TIMEOUT_S = 60.0
PATIENCE_S = 30.0  # so long etcd may be away
BACK_OFF_S = 0.02
WAIT_S = 5.0
T = TypeVar("T")
OPTIONS = ("ca", "cert", "key", "user", "password_file")


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of one node. Raises RendezvousConnectionError if etcd does not answer, or does not let us
    in."""
    options = {name: str(params.config[name]) for name in OPTIONS if params.config.get(name)}
    try:
        gateway = Gateway(Address.parse(f"{params.endpoint}?{urlencode(options)}" if options else params.endpoint))
        EtcdStore(gateway).revision  # noqa: B018  (says now what is wrong)
    except HarnessError as error:
        raise RendezvousConnectionError(str(error)) from error
    check_name("--rdzv-id", params.run_id, "it is a part of keys in etcd: ")
    backend = EtcdBackend(EtcdStore(gateway, f"{PREFIX}rendezvous/"), params.run_id)
    store = EtcdTensorStore(gateway, f"{PREFIX}store/{params.run_id}/")
    return Handler(create_handler(store, backend, params))


class EtcdBackend(RendezvousBackend):
    """The rendezvous' state in one key, which is changed by compare-and-swap."""

    def __init__(self, store: EtcdStore, run_id: str) -> None:
        self._store = store
        self._key = run_id
        self._lease = _Lease(store)
        self._once = Once(store, f"{run_id}/by/", self._lease, PATIENCE_S)
        self._lock = threading.Lock()  # heartbeats come from a thread of their own

    @property
    def name(self) -> str:
        return "etcd-v3"

    def get_state(self) -> tuple[bytes, Token] | None:
        try:
            return _state(_patiently(lambda: self._store.get(self._key)))
        except HarnessError as error:
            raise RendezvousConnectionError(str(error)) from error

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        revision = token if isinstance(token, int) else 0
        try:
            with self._lock:
                put = Put(self._key, base64.b64encode(state).decode(), self._lease())
                applied, revision = self._once.txn({self._key: revision}, [put])
        except HarnessError as error:
            raise RendezvousConnectionError(str(error)) from error
        if applied:
            return state, revision, True
        found = self.get_state()
        return None if found is None else (*found, False)


class EtcdTensorStore(dist.Store):
    """The store through which torch's agents meet, in etcd. Values are bytes. Several threads may use it."""

    def __init__(self, gateway: Gateway, prefix: str) -> None:
        super().__init__()
        self._gateway, self._prefix = gateway, prefix
        self._store = EtcdStore(gateway, prefix)
        self._lease = _Lease(self._store)
        self._once = Once(self._store, "by/", self._lease, PATIENCE_S)
        self._lock = threading.Lock()
        self.set_timeout(timedelta(seconds=TIMEOUT_S))

    def set(self, key: str, value: str | bytes) -> None:
        put = Put(_key(key), _text(value), self._lease())
        _patiently(lambda: self._store.txn({}, [put]))

    def get(self, key: str) -> bytes:
        return self._await([key], self.timeout)[0]  # type: ignore[attr-defined]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self.timeout if timeout is None else timeout)  # type: ignore[attr-defined]

    def check(self, keys: list[str]) -> bool:
        return all(self._get(key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            while True:
                entry = self._get(key)
                count = amount + (int(_bytes(entry)) if entry is not None else 0)
                if self._replace(key, entry, str(count)):
                    return count
                time.sleep(BACK_OFF_S * random.random())

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted = expected.encode() if isinstance(expected, str) else expected
        with self._lock:
            while True:
                entry = self._get(key)
                if entry is None and wanted:
                    return wanted  # as TCPStore does
                if entry is not None and _bytes(entry) != wanted:
                    return _bytes(entry)
                if self._replace(key, entry, desired):
                    return desired.encode() if isinstance(desired, str) else desired

    def delete_key(self, key: str) -> bool:
        with self._lock:
            entry = self._get(key)
            return entry is not None and self._once.txn({_key(key): entry.revision}, (), [_key(key)])[0]

    def num_keys(self) -> int:
        return len(_patiently(lambda: self._store.range(_key(""))))

    deleteKey, getNumKeys = delete_key, num_keys  # the names that torch's C++ looks for

    def _replace(self, key: str, entry: Entry | None, value: str | bytes) -> bool:
        put = Put(_key(key), _text(value), self._lease())
        return self._once.txn({_key(key): entry.revision if entry is not None else 0}, [put])[0]

    def _await(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        """Return the values of keys, once all are there. Raises DistStoreError if that takes too long."""
        give_up_at = time.monotonic() + timeout.total_seconds()
        values = []
        for key in keys:
            entry = self._get(key) or self._watch_for(key, give_up_at)
            if entry is None:
                raise dist.DistStoreError(f"nobody has set {key} within {timeout.total_seconds():g} s")
            values.append(_bytes(entry))
        return values

    def _get(self, key: str) -> Entry | None:
        return _patiently(lambda: self._store.get(_key(key)))

    def _watch_for(self, key: str, give_up_at: float) -> Entry | None:
        """Return the key as soon as it is there; None if that takes too long."""
        changed = threading.Event()
        store = EtcdStore(self._gateway, self._prefix, wake=changed.set)
        with closing(store.watch(_key(key), _patiently(lambda: store.revision) + 1)) as watch:
            while (entry := self._get(key)) is None and time.monotonic() < give_up_at:
                changed.wait(min(WAIT_S, max(0.0, give_up_at - time.monotonic())))
                changed.clear()
                with suppress(Compacted):  # then the loop looks for it every WAIT_S
                    watch.poll()
        return entry


class Handler(RendezvousHandler):
    """torch's own dynamic rendezvous on our backend. It settles anew in each round where workers meet. Otherwise the
    nodes that survive the loss of the first one would go on looking for it there."""

    def __init__(self, inner: RendezvousHandler) -> None:
        self._inner = inner

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def next_rendezvous(self) -> RendezvousInfo:
        if hasattr(self._inner, "_bootstrap_store_info"):
            self._inner._bootstrap_store_info = None
        return self._inner.next_rendezvous()

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


class _Lease:
    """A lease that lives as long as its user is active, and about a day longer."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store
        self._lease = 0
        self._renewed_at = 0.0

    def __call__(self) -> int:
        now = time.monotonic()
        if not self._lease or now - self._renewed_at > TTL_S / 4:
            kept = self._lease and _patiently(lambda: self._store.keep_alive(self._lease))
            if not kept:
                self._lease = _patiently(lambda: self._store.lease(TTL_S))
            self._renewed_at = now
        return self._lease


def _patiently(call: Callable[[], T]) -> T:
    """Repeat a call while etcd is away, for PATIENCE_S. The call must be one that may be repeated."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except Unavailable:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.1)


def _state(entry: Entry | None) -> tuple[bytes, Token] | None:
    if entry is None:
        return None
    try:
        return base64.b64decode(entry.value, validate=True), entry.revision
    except ValueError as error:
        raise RendezvousStateError(f"The rendezvous' state in etcd, {entry.key}, is damaged: {error}") from error


def _key(key: str) -> str:
    return f"key/{key}"


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _bytes(entry: Entry) -> bytes:
    return base64.b64decode(entry.value)
