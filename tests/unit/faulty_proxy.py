"""An HTTP proxy in front of an S3 server that fails as it is told: for one request each, or for all."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Faults:
    """What is to go wrong. `plan`: (method, fault), each taken by the next request of that method. `always`: decides
    for every request; gives a fault or "". Faults: 503, cut (no answer), half (of the answer), slow, wrong (a bit)."""

    def __init__(self) -> None:
        self.plan: list[tuple[str, str]] = []
        self.always: Callable[[str, str], str] = lambda method, path: ""
        self.happened: list[str] = []
        self._lock = threading.Lock()

    def take(self, method: str, path: str) -> str:
        with self._lock:
            fault = self.always(method, path)
            planned = next((item for item in self.plan if item[0] == method), None)
            if not fault and planned is not None:
                self.plan.remove(planned)
                fault = planned[1]
            if fault:
                self.happened.append(fault)
            return fault


@contextmanager
def proxy(upstream: str) -> Iterator[tuple[str, Faults]]:
    """The address of a proxy before `upstream`, and its faults."""
    faults, target = Faults(), urlsplit(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = faults.take(self.command, self.path)
            if fault == "503":
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if fault == "cut":
                self.close_connection = True
                return
            if fault == "slow":
                time.sleep(0.5)
            connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            if fault == "wrong" and content:
                content = content[:-1] + bytes([content[-1] ^ 1])
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if fault == "half":
                content = content[: len(content) // 2]
                self.close_connection = True
            self.wfile.write(content)
            connection.close()

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except (BrokenPipeError, ConnectionResetError):
                pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
