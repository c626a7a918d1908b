"""The interface of a transport between the members of a generation, and what all transports need to be built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch

from elastic_harness.errors import PeerFailed


class Pending:
    """A pending send or receive. `finished`: it is done and its transport has noticed, at the latest when the transport
    has waited for it. `error`: why it will never be done. `raw`: the transport's handle of it, None before it was
    issued. `hash`: of the content, for a transport that checks it."""

    def __init__(self, raw: Any, tensor: torch.Tensor, rank: int) -> None:
        self.raw = raw
        self.tensor = tensor
        self.rank = rank
        self.finished = False
        self.error = ""
        self.hash = 0

    def wait_raw(self, timeout_s: float) -> None:
        """Block up to `timeout_s`. Raises PeerFailed that names the peer's rank."""
        try:
            self.raw.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerFailed(f"the exchange with rank {self.rank} broke: {error}") from error
        self.finished = True


class Transport(Protocol):
    """The transport of one generation. Messages are matched by (peer, tag).

    device: where sent and received tensors must lie. They are contiguous, and a sent tensor must not change until its
    work is done. flush: issue everything sent or received so far (a transport may collect until then); with `below`
    only tags smaller than that kind's first. wait: block until all of the works are done. It raises PeerFailed when one
    breaks, when `timeout_s` has passed, or at once when the transport is aborted. concurrent: whether several threads
    may use it at once. abort: make all pending work fail at once, here and at the peers. Any thread may call it, any
    number of times."""

    rank: int
    world: int
    device: torch.device
    concurrent: bool

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Pending: ...
    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Pending: ...
    def flush(self, below: int | None = None) -> None: ...
    def wait(self, works: Sequence[Pending], timeout_s: float) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


AnyTransport = TypeVar("AnyTransport", bound=Transport)


def in_background(connect: Callable[[], AnyTransport], cancelled: Callable[[float], None]) -> AnyTransport:
    """Run `connect` in a thread and return its transport.

    `cancelled(0)` is called over and over meanwhile, and raises when the generation has become void. The thread then
    discards the half-built transport. Connection errors become `PeerFailed`.
    """
    outcome: list[AnyTransport | BaseException] = []
    finished = threading.Event()
    abandoned = threading.Event()

    def run() -> None:
        try:
            transport = connect()
            outcome.append(transport)
            if abandoned.is_set():
                transport.close()
        except BaseException as error:  # thread boundary: handed to the caller
            outcome.append(error.with_traceback(None))  # its frames would keep the half-built transport open
        finally:
            finished.set()

    threading.Thread(target=run, name="transport-connect", daemon=True).start()
    try:
        while not finished.wait(0.002):
            cancelled(0.0)
    except BaseException:
        abandoned.set()
        raise
    result = outcome[0]
    if isinstance(result, RuntimeError):
        raise PeerFailed(f"the transport could not be connected: {result}") from result
    if isinstance(result, BaseException):
        raise result
    return result
