"""An HTTP server that gives byte ranges of one file, and misbehaves as told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Fault = Callable[[int, bytes], bytes | int | None]  # of the first byte and the content: other content, a status, or cut


class RangeServer:
    """`url` of the file; `ranges` that were asked for; `fault` is asked about each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranges: list[tuple[int, int]] = []
        self.fault: Fault = lambda low, content: content
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer(head=True)

            def do_GET(self) -> None:
                self.answer(head=False)

            def answer(self, head: bool) -> None:
                if self.path.rpartition("/")[2] != outer.path.name:
                    self.send_error(404)
                    return
                content = outer.path.read_bytes()
                size, status, low = len(content), 200, 0
                given = self.headers.get("Range")
                if given and not head:
                    first, _, last = given.removeprefix("bytes=").partition("-")
                    low, status = int(first), 206
                    content = content[low : int(last) + 1]
                    outer.ranges.append((low, low + len(content)))
                answer = outer.fault(low, content) if not head else content
                if isinstance(answer, int):
                    self.send_error(answer)
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                if status == 206:
                    self.send_header("Content-Range", f"bytes {low}-{low + len(content) - 1}/{size}")
                self.end_headers()
                if not head:
                    self.wfile.write(answer if answer is not None else content[: len(content) // 2])
                if answer is None:
                    self.close_connection = True

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/corpora/{path.name}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
