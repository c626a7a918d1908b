"""The web server: a thread for each connection, the standard library alone. It reads, unless it may take commands.

    /                               the page
    /api/runs                       all runs
    /api/runs/NAME/events           a stream of what changes (server-sent events)
    /api/runs/NAME/steps            a part of the curve, in full: ?first=&last=
    /api/runs/NAME/text             the end of a log, or stacks: ?name=
    /api/runs/NAME/control          POST, with --control: a command to the run
    and what is mounted: `DashboardServer.mounted`

No part of an address becomes a part of a path: runs and texts are looked up by their names.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from elastic_harness import shape
from elastic_harness.dashboard import control
from elastic_harness.dashboard.access import Access, PageRefusal, cookie
from elastic_harness.dashboard.hub import Hub, Watched, as_json, event
from elastic_harness.dashboard.shown import COLUMNS, rows
from elastic_harness.errors import ConfigError, HarnessError, InfrastructureError

CONNECTIONS_MAX = 128
STREAMS_MAX = 64
IDLE_S = 10.0  # a client that sends nothing, or takes nothing, is dropped
LOOK_S = 1.0  # whether the client of a quiet stream is still there
BEAT_S = 10.0  # a stream without news says that it lives
BODY_BYTES_MAX = 4096
HTML, CSS, SCRIPT, JSON, TEXT = (
    "text/html; charset=utf-8", "text/css; charset=utf-8", "text/javascript; charset=utf-8", "application/json",
    "text/plain; charset=utf-8",
)  # fmt: skip
_FILES = {"/": ("index.html", HTML), "/page.css": ("page.css", CSS)}
_FILES |= {f"/{name}.js": (f"{name}.js", SCRIPT) for name in ("charts", "page")}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Mounted = Callable[[], tuple[str, bytes]]
"""Returns a content type and a body. Called from any thread."""


class DashboardServer(ThreadingMixIn, TCPServer):
    """Listens, and hands each connection to a thread. If there are too many, the oldest that has asked for nothing yet
    has to go."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, access: Access, hub: Hub) -> None:
        """Raises InfrastructureError if it cannot listen there, ConfigError if there is no such address."""
        self.access = access
        self.hub = hub
        self.mounted: dict[str, Mounted] = {}  # path, such as /metrics -> what is answered there
        self.files = {path: (_file(name), kind) for path, (name, kind) in _FILES.items()}
        self.streams = threading.Semaphore(STREAMS_MAX)
        self.ending = threading.Event()
        self._connections: dict[socket.socket, bool] = {}  # the oldest first; whether it has asked for something
        self._lock = threading.Lock()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ConfigError(f"--host is {host!r}, which is no address of this machine: {error.strerror}") from error
        self.address_family = found[0]
        try:
            super().__init__(found[4][:2], PageHandler)  # type: ignore[arg-type]
        except OSError as error:
            raise InfrastructureError(f"cannot listen on {host} port {port}: {error.strerror}") from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._connections) >= CONNECTIONS_MAX:
                idle = next((each for each, asked in self._connections.items() if not asked), None)
                gone = idle if idle is not None else request
                with contextlib.suppress(OSError):
                    gone.shutdown(socket.SHUT_RDWR)
                self._connections.pop(gone, None)
                if gone is request:
                    request.close()
                    return
            self._connections[request] = False
        super().process_request(request, client_address)

    def note_asked(self, request: socket.socket) -> None:
        """Note that a connection has asked for something."""
        with self._lock:
            if request in self._connections:
                self._connections[request] = True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client has gone, or sent what is no request."""

    def close(self) -> None:
        """End all streams, and listen no more. `serve_forever` has returned, or was not called."""
        self.ending.set()
        self.server_close()
        self.hub.close()


class PageHandler(BaseHTTPRequestHandler):
    """One connection, which has one request."""

    server: DashboardServer
    protocol_version = "HTTP/1.1"
    server_version = "elastic-harness"
    sys_version = ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        self.close_connection = True
        self.server.note_asked(self.connection)
        try:
            address = urlsplit(self.path)
            asked = {name: values[0] for name, values in parse_qs(address.query, max_num_fields=8).items()}
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, TEXT, b"the address cannot be read\n")
            return
        access, port = self.server.access, self.server.port
        if method == "GET" and address.path == "/" and access.is_token(asked.get("token", "")):
            if self._refused(Access(access.loopback, access.names, None, False).refusal("GET", self.headers, port)):
                return
            self._send(HTTPStatus.SEE_OTHER, TEXT, b"", {"Location": "/", "Set-Cookie": cookie(asked["token"], port)})
            return
        if self._refused(access.refusal(method, self.headers, port)):
            return
        if method == "POST":
            self._carry_out(address.path)
        else:
            self._show(address.path, asked)

    def _refused(self, refusal: PageRefusal | None) -> bool:
        if refusal is not None:
            self._send(refusal.status, TEXT, refusal.reason.encode() + b"\n")
        return refusal is not None

    def _show(self, path: str, asked: dict[str, str]) -> None:
        if path in self.server.files:
            body, kind = self.server.files[path]
            self._send(HTTPStatus.OK, kind, body)
        elif path in self.server.mounted:
            kind, body = self.server.mounted[path]()
            self._send(HTTPStatus.OK, kind, body)
        elif path == "/api/runs":
            told = {"runs": self.server.hub.catalogue.rows(), "control": self.server.access.control}
            self._send(HTTPStatus.OK, JSON, as_json(told).encode())
        elif path.startswith("/api/runs/") and path.count("/") == 4:
            _, _, _, name, what = path.split("/")
            self._show_run(unquote(name), what, asked)
        else:
            self._send(HTTPStatus.NOT_FOUND, TEXT, b"there is nothing here\n")

    def _show_run(self, name: str, what: str, asked: dict[str, str]) -> None:
        with self.server.hub.watch(name) as watched:
            if watched is None:
                self._send(HTTPStatus.NOT_FOUND, TEXT, b"there is no run of this name\n")
            elif what == "events":
                self._stream(watched)
            elif what == "steps":
                first, last = (asked.get(key, "") for key in ("first", "last"))
                if not (first.isdecimal() and last.isdecimal() and len(first) < 16 and len(last) < 16):
                    self._send(HTTPStatus.BAD_REQUEST, TEXT, b"first and last must be steps\n")
                    return
                with watched.lock:
                    points = rows(watched.followed.zoomed(int(first), int(last)))
                self._send(HTTPStatus.OK, JSON, as_json({"columns": COLUMNS, "rows": points}).encode())
            elif what == "text" and (text := watched.followed.text(asked.get("name", ""))) is not None:
                self._send(HTTPStatus.OK, TEXT, text.encode())
            else:
                self._send(HTTPStatus.NOT_FOUND, TEXT, b"there is nothing of this name in the run\n")

    def _stream(self, watched: Watched) -> None:
        """Send what changes, until the client goes or takes nothing any more."""
        if not self.server.streams.acquire(blocking=False):
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, b"too many pages are open\n", {"Retry-After": "5"})
            return
        try:
            self._head(HTTPStatus.OK, "text/event-stream", {"X-Accel-Buffering": "no"})
            known: dict[str, int] = {}
            sent_at = time.monotonic()
            while not (self.server.ending.is_set() or watched.over):
                news = watched.news(known, LOOK_S)
                if news:
                    self.wfile.write(b"".join(map(event, news)))
                elif time.monotonic() - sent_at > BEAT_S or _is_gone(self.connection):
                    self.wfile.write(b": \n\n")
                else:
                    continue
                sent_at = time.monotonic()
        finally:
            self.server.streams.release()

    def _carry_out(self, path: str) -> None:
        """Hand a command to the run's agent."""
        parts = path.split("/")
        paths = self.server.hub.catalogue.paths().get(unquote(parts[3])) if len(parts) == 5 else None
        if paths is None or parts[4] != "control":
            self._send(HTTPStatus.NOT_FOUND, TEXT, b"there is no run of this name\n")
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, TEXT, b"a command is a short JSON object\n")
            return
        try:
            said = control.carry_out(paths, shape.parse_object(self.rfile.read(int(length))))
        except HarnessError as error:
            self._send(HTTPStatus.CONFLICT, TEXT, f"{error}\n".encode())
        except ValueError as error:
            self._send(HTTPStatus.BAD_REQUEST, TEXT, f"the command is no JSON object: {error}\n".encode())
        else:
            self._send(HTTPStatus.OK, TEXT, f"{said}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self._head(status, kind, {"Content-Length": str(len(body)), **(more or {})})
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS, **more, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request of ours, without a word of what was sent."""
        self.close_connection = True
        self._send(HTTPStatus(code), TEXT, f"{HTTPStatus(code).phrase}\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing about each request."""


def _is_gone(connection: socket.socket) -> bool:
    """Return whether a client has closed its side: it sends nothing else. A socket with a timeout would wait for it in
    `recv`, whatever the flags."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return bool(poll.poll(0))


def _file(name: str) -> bytes:
    return (resources.files(__package__) / "page" / name).read_bytes()


