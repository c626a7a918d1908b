"""A metadata service on loopback that answers as those of AWS, GCP and Azure do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Cloud:
    """What the service says. `silent`: it takes connections and does not answer."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.address = f"127.0.0.1:{server.server_address[1]}"
        self.silent = threading.Event()
        self.asked: list[str] = []
        self.tokens: list[str] = []
        self.action: dict[str, Any] | None = None  # AWS
        self.preempted, self.maintenance = "FALSE", "NONE"  # GCP
        self.machine, self.events = "vm_1", list[dict[str, Any]]()  # Azure

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        self.asked.append(f"{method} {path}")
        match method, path.partition("?")[0]:
            case "PUT", "/latest/api/token":
                if headers["X-aws-ec2-metadata-token-ttl-seconds"] is None:
                    return 400, ""
                self.tokens.append(f"token-{len(self.asked)}")
                return 200, self.tokens[-1]
            case "GET", "/latest/meta-data/spot/instance-action":
                if headers["X-aws-ec2-metadata-token"] not in self.tokens:
                    return 401, ""
                return (404, "") if self.action is None else (200, json.dumps(self.action))
            case "GET", "/computeMetadata/v1/instance/preempted" if headers["Metadata-Flavor"] == "Google":
                return 200, self.preempted
            case "GET", "/computeMetadata/v1/instance/maintenance-event" if headers["Metadata-Flavor"] == "Google":
                return 200, self.maintenance
            case "GET", "/metadata/instance/compute/name" if headers["Metadata"] == "true":
                return 200, self.machine
            case "GET", "/metadata/scheduledevents" if headers["Metadata"] == "true":
                return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events})
        return 403, "<html>no</html>"


@contextmanager
def fake_cloud() -> Iterator[Cloud]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if cloud.silent.is_set():
                ended.wait()
                return
            status, body = cloud.answer(self.command, self.path, self.headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    ended = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    cloud = Cloud(server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield cloud
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
