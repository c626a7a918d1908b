"""etcd's v3 API as JSON over HTTP, which every etcd since 3.4 serves on its client port. There are single requests, to
whichever endpoint answers, and streams."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from typing import Any

from elastic_harness.contract import variables
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.etcd.address import Address
from elastic_harness.membership.store import Unavailable
from elastic_harness.shape import parse

try:
    import urllib3
    from urllib3.connection import HTTPConnection
    from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError
except ModuleNotFoundError as error:
    raise ConfigError("etcd needs urllib3: pip install 'elastic-harness[cluster]'.") from error

Json = dict[str, Any]
TIMEOUT_S = 3.0
CONNECT_S_MAX = 1.0
PAUSE_S_MAX = 0.2
SILENCE_S = 5.0  # a stream that is silent for so long is opened anew: its member may be paused
_INVALID, _DENIED, _EXHAUSTED, _UNAVAILABLE, _UNAUTHENTICATED = 3, 7, 8, 14, 16  # gRPC's codes
TOO_LARGE = "etcdserver: request is too large"
_USERS_CHANGED = "auth: revision in header is old"  # the answer to an old token, after any change of users
_TRANSIENT = (2, 4, 10, _UNAVAILABLE)  # unknown, deadline exceeded, aborted
_NOT_TRIED = ("etcdserver: no leader", "etcdserver: too many requests")  # nothing was done
_HEADERS = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}  # a cut-off member says so at once
_KEEPALIVE = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]  # a host that vanished ends a quiet stream after 5 s


class RequestRefused(InfrastructureError):
    """etcd's own error: a gRPC code and a message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"etcd refused the request: {message} (code {code})")
        self.code = code
        self.message = message


class Gateway:
    """Requests to an etcd. Any number of threads may use it. A forked process gets its own connections."""

    def __init__(self, address: Address, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._endpoints = list(address.endpoints)
        self._at = random.randrange(len(self._endpoints))  # so that a large cluster spreads over all members
        self._token = ""
        self._date: str | None = None
        self._lock = threading.Lock()
        self._pid = -1
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._pools: urllib3.PoolManager

    def call(self, path: str, body: Json, *, repeatable: bool = True) -> Json:
        """Send one request and return its answer. Try all endpoints, again and again, for at most `timeout_s`. A
        request that is not `repeatable` is not sent again once etcd may have acted on it. Raises Unavailable,
        RequestRefused, or ConfigError if etcd does not let us in."""
        give_up_at = time.monotonic() + self.timeout_s
        problem, tries = "", 0
        while True:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise Unavailable(f"{self._named()} did not answer for {self.timeout_s:g} s ({problem}).")
            endpoint = self._endpoints[self._at]
            try:
                return self._once(endpoint, path, body, left_s)
            except (NewConnectionError, ConnectTimeoutError) as error:
                problem = _short(error)
            except HTTPError as error:
                problem = _short(error)
                if not repeatable:
                    self._leave(endpoint)
                    raise self._unknown(problem) from error
            except RequestRefused as error:
                stale = error.code == _UNAUTHENTICATED or _USERS_CHANGED in error.message
                if stale and self.address.user:  # the token has expired
                    self._token = ""
                elif error.code not in _TRANSIENT:
                    raise
                elif not repeatable and error.message not in _NOT_TRIED:
                    self._leave(endpoint)
                    raise self._unknown(error.message) from error
                problem = error.message
            self._leave(endpoint)
            tries += 1
            if tries % len(self._endpoints) == 0:
                time.sleep(min(PAUSE_S_MAX, 0.01 * tries, max(0.0, give_up_at - time.monotonic())))

    def date(self) -> str | None:
        """Return the time of the endpoint that answered last, to the second, as HTTP writes it."""
        return self._date

    def stream(self, path: str, body: Json) -> Stream:
        """Send a request whose answers go on until the stream is closed. Return when the first one is there. If another
        request finds the same endpoint silent, the stream ends too. After a failure the next request goes to another
        endpoint. Raises Unavailable, ConfigError."""
        endpoint = self._endpoints[self._at]
        try:
            response = self._send(endpoint, path, body, urllib3.Timeout(connect=self._connect_s(), read=SILENCE_S))
            stream = Stream(response, endpoint)
        except (HTTPError, RequestRefused, Unavailable) as error:
            self._token = ""
            self._leave(endpoint)
            raise Unavailable(f"{endpoint} did not answer ({_short(error)}).") from error
        self._streams.add(stream)
        return stream

    def _once(self, endpoint: str, path: str, body: Json, left_s: float) -> Json:
        share_s = left_s if len(self._endpoints) == 1 else max(0.5, self.timeout_s / 2)
        timeout = urllib3.Timeout(connect=self._connect_s(), read=min(left_s, share_s))
        response = self._send(endpoint, path, body, timeout)
        try:
            line = response.read()
        finally:
            response.release_conn()
        return _answer(line)

    def _send(self, endpoint: str, path: str, body: Json, timeout: urllib3.Timeout) -> urllib3.HTTPResponse:
        if not self.address.user:
            return self._post(endpoint, path, body, _HEADERS, timeout)
        token = self._token or self._log_in(endpoint, timeout)
        return self._post(endpoint, path, body, {**_HEADERS, "Authorization": token}, timeout)

    def _post(
        self, endpoint: str, path: str, body: Json, headers: dict[str, str], timeout: urllib3.Timeout
    ) -> urllib3.HTTPResponse:
        response = self._connections().request(
            "POST",
            f"{endpoint}/v3/{path}",
            body=json.dumps(body, separators=(",", ":")).encode(),
            headers=headers,
            timeout=timeout,
            retries=False,
            redirect=False,
            preload_content=False,
        )
        assert isinstance(response, urllib3.HTTPResponse)
        self._date = response.headers.get("Date")
        if response.status != 200:
            raise self._refusal(response)
        return response

    def _log_in(self, endpoint: str, timeout: urllib3.Timeout) -> str:
        given = {"name": self.address.user, "password": self.address.password}
        response = self._post(endpoint, "auth/authenticate", given, _HEADERS, timeout)
        self._token = str(_answer(response.read())["token"])
        response.release_conn()
        return self._token

    def _refusal(self, response: urllib3.HTTPResponse) -> InfrastructureError | ConfigError:
        """Return the error that an answer other than success means."""
        content = response.read()
        response.release_conn()
        try:
            told = parse(content)
            code, message = int(told["code"]), str(told.get("message") or told.get("error"))
        except (ValueError, KeyError, TypeError):
            if response.status == 404:
                return ConfigError(f"{self._named()} does not speak the v3 API of etcd 3.4 or later (404 for /v3).")
            said = content[:200].decode(errors="replace").strip()
            if "CommonName" in said:
                return ConfigError(
                    f"{self._named()} has users, and then refuses a client's certificate with a CommonName: make one "
                    "without (a subject such as /O=training), and name the user in the address."
                )
            return RequestRefused(_UNAVAILABLE, f"HTTP {response.status} {said}".strip())
        if "user name is empty" in message or (code == _UNAUTHENTICATED and not self.address.user):
            return ConfigError(
                f"{self._named()} wants to know who we are: add ?user=NAME to its address, and put the password into "
                f"{variables.ETCD_PASSWORD}."
            )
        if code == _DENIED or "authentication failed" in message or "authentication is not enabled" in message:
            return ConfigError(f"{self._named()} does not let the user {self.address.user!r} in: {message}.")
        if code == _EXHAUSTED and "space exceeded" in message:
            return InfrastructureError(
                f"{self._named()} has no space left: {message}. Compact and defragment it, then `etcdctl alarm disarm`."
            )
        too_large = code == _EXHAUSTED and "larger than max" in message  # gRPC says so before etcd itself looks
        if code == _EXHAUSTED and not too_large:
            code = _UNAVAILABLE
        return RequestRefused(_INVALID if too_large else code, TOO_LARGE if too_large else message)

    def _connections(self) -> urllib3.PoolManager:
        if self._pid != os.getpid():  # first use, or forked: the connections and a held lock belong to the parent
            self._lock = threading.Lock()
            self._token = ""
            self._streams = weakref.WeakSet()
            self._pools = urllib3.PoolManager(
                num_pools=len(self._endpoints),
                maxsize=8,
                cert_file=self.address.cert,
                key_file=self.address.key,
                ca_certs=self.address.ca,
                socket_options=[*HTTPConnection.default_socket_options, *_KEEPALIVE],
            )
            self._pid = os.getpid()
        return self._pools

    def _connect_s(self) -> float:
        return min(CONNECT_S_MAX, self.timeout_s / 2)

    def _leave(self, endpoint: str) -> None:
        """Try another endpoint next, unless another thread has already changed it. Interrupt the streams of this
        endpoint, which may stay silent for ever."""
        with self._lock:
            if self._endpoints[self._at] == endpoint:
                self._at = (self._at + 1) % len(self._endpoints)
        if len(self._endpoints) > 1:
            for stream in list(self._streams):
                if stream.endpoint == endpoint:
                    stream.interrupt()

    def _named(self) -> str:
        return f"etcd at {', '.join(self._endpoints)}"

    def _unknown(self, problem: str) -> Unavailable:
        return Unavailable(f"{self._named()} did not answer ({problem}); what was asked for may have happened.", True)


class Stream:
    """The answers to one request, as they arrive. Blocks for the first one; raises as iterating does. Whoever reads it
    does so in a `with` block, at whose end the connection is let go of."""

    def __init__(self, response: urllib3.HTTPResponse, endpoint: str) -> None:
        self.endpoint = endpoint
        self._response = response
        self._closed = False
        self._answers = self._read()
        self._first = next(self._answers)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()

    def __iter__(self) -> Iterator[Json]:
        """Yield each answer, and block for the next. End when the stream is closed. Raises Unavailable when the
        connection is lost or interrupted, or the endpoint can go on no longer. Raises RequestRefused."""
        return itertools.chain([self._first], self._answers)

    def _read(self) -> Generator[Json, None, None]:
        rest = b""
        try:
            for chunk in self._response.read_chunked():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield _answer(line)
        except RequestRefused as error:
            if error.code in _TRANSIENT:
                raise Unavailable(f"etcd ended the stream ({error.message}).") from error
            raise
        except (HTTPError, OSError, ValueError, AttributeError) as error:
            if not self._closed:
                raise Unavailable(f"The connection to etcd was lost ({_short(error)}).") from error
        finally:
            self._response.close()
        if not self._closed:
            raise Unavailable("etcd ended the connection.")

    def close(self) -> None:
        """End the stream, also for a thread that waits in it."""
        self._closed = True
        self.interrupt()

    def interrupt(self) -> None:
        """Make the reader find the connection lost."""
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # the stream may have ended just now
            self._response.shutdown()


def encode(text: str) -> str:
    """Return a key or value in the form that the gateway takes."""
    return base64.b64encode(text.encode()).decode()


def decode(text: str) -> str:
    """Return the text of a key or value. Bytes that are no UTF-8 are spelled out, so that the reader finds the value
    damaged."""
    return base64.b64decode(text).decode(errors="backslashreplace")


def _answer(line: bytes) -> Json:
    try:
        told = parse(line)
    except ValueError:
        raise RequestRefused(_UNAVAILABLE, f"an answer that is no JSON: {line[:80]!r}") from None
    if not isinstance(told, dict):
        raise RequestRefused(_UNAVAILABLE, f"an answer that is no object: {line[:80]!r}")
    if "error" in told:
        error = told["error"]
        error = error if isinstance(error, dict) else told
        raise RequestRefused(int(error.get("grpc_code") or error.get("code") or 2), str(error.get("message") or error))
    result = told.get("result", told)
    if not isinstance(result, dict):
        raise RequestRefused(_UNAVAILABLE, f"an answer whose result is no object: {line[:80]!r}")
    return result


def _short(error: BaseException) -> str:
    """Return the innermost reason, without the addresses of objects."""
    text = str(error.args[-1] if error.args else error)
    return text.rsplit(": ", 1)[-1] if "object at 0x" in text else text
