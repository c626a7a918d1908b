"""The key-value store through which a process group meets: one namespace per generation, abortable."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist


class KeyValue(Protocol):
    """The values of a rendezvous. `get` blocks until the key exists, and raises as soon as the generation is void."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...


class RendezvousStore(dist.Store):
    """A `torch.distributed` store over a `KeyValue`. It remembers the values that went through, by key."""

    def __init__(self, values: KeyValue) -> None:
        super().__init__()
        self._values = values
        self.published: dict[str, bytes] = {}
        self.received: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.published[key] = data
        self._values.set(key, data)

    def get(self, key: str) -> bytes:
        data = self._values.get(key)
        self.received[key] = data
        return data

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._values.get(key)

    def check(self, keys: list[str]) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def has_extended_api(self) -> bool:
        return False
