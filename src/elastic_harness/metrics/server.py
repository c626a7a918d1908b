"""Serves metrics over HTTP, with the standard library."""

from __future__ import annotations

import http.server
import socket
from collections.abc import Callable
from http import HTTPStatus

from elastic_harness.errors import ConfigError
from elastic_harness.metrics.exposition import CONTENT_TYPE, OPENMETRICS_TYPE

PATH = "/metrics"
Text = Callable[[bool], str]
"""Returns the metrics; given: whether as OpenMetrics."""


class MetricsServer(http.server.ThreadingHTTPServer):
    """Listens until it is closed, read-only. `address` is where it does."""

    daemon_threads = True

    def __init__(self, host: str, port: int, text: Text) -> None:
        """Begin to listen. Port 0: one that is free. Raises ConfigError if that is not possible."""
        self.text = text
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {host} port {port}: {error.strerror or error}; choose another --port, 0 for a free "
                "one, or another --address"
            ) from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else str(host)}:{port}{PATH}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: MetricsServer
    protocol_version = "HTTP/1.1"
    timeout = 30.0  # of a connection that says nothing
    wbufsize = -1  # one answer in one piece: with two, the second waits 40 ms for the reader's acknowledgement
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", f"the metrics are at {PATH}\n")
            return
        openmetrics = "application/openmetrics-text" in self.headers.get("Accept", "")
        told = self.server.text(openmetrics)
        self._answer(HTTPStatus.OK, OPENMETRICS_TYPE if openmetrics else CONTENT_TYPE, told)

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, kind: str, told: str) -> None:
        body = told.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape each second would fill the terminal."""
