"""Watches for notices that this machine will go: a file, and the metadata service of a cloud.

A thread asks, because a file system may hang, and a service may not answer. A notice is queued, and the agent's loop
is woken.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from elastic_harness.agent.options import LaunchOptions
from elastic_harness.contract import variables
from elastic_harness.health.preemption import (
    WHY_CHARS,
    Notice,
    read_aws,
    read_azure,
    read_file,
    read_gcp_maintenance,
    read_gcp_preempted,
)

LOOK_S = 1.0
TIMEOUT_S = 0.3  # of a request; the services answer from within the machine's host
SILENT_S = 10.0  # a service that has not answered for so long is told of, once
TOKEN_S = 21600
ADDRESS = "169.254.169.254"
Probe = Callable[[], Notice | None]


class Metadata:
    """The metadata service of a cloud. `address`: HOST or HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._token = ""
        self._machine = ""

    def aws(self) -> Notice | None:
        """Ask IMDSv2. A token that has ended is replaced."""
        if not self._token:
            status, token = self._ask(
                "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}, method="PUT"
            )
            if status != 200:
                raise ValueError(f"status {status} for a token, {token[:WHY_CHARS]!r}")
            self._token = token
        status, body = self._ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token})
        if status == 401:
            self._token = ""
        return read_aws(status, body)

    def gcp(self) -> Notice | None:
        flavor, instance = {"Metadata-Flavor": "Google"}, "/computeMetadata/v1/instance/"
        preempted = read_gcp_preempted(*self._ask(instance + "preempted", flavor), time.time())
        return preempted or read_gcp_maintenance(*self._ask(instance + "maintenance-event", flavor))

    def azure(self) -> Notice | None:
        asked = {"Metadata": "true"}
        if not self._machine:
            status, name = self._ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", asked)
            if status != 200 or not name.strip():
                raise ValueError(f"status {status} for the machine's name, {name[:WHY_CHARS]!r}")
            self._machine = name.strip()
        return read_azure(*self._ask("/metadata/scheduledevents?api-version=2020-07-01", asked), self._machine)

    def _ask(self, path: str, headers: dict[str, str], method: str = "GET") -> tuple[int, str]:
        """Return status and body. No proxy is asked."""
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(1 << 16).decode(errors="replace")
        finally:
            connection.close()


def probes(options: LaunchOptions) -> dict[str, Probe]:
    """Return what is to be asked, by name."""
    metadata = Metadata(os.environ.get(variables.METADATA) or ADDRESS)
    services: dict[str, Probe] = {"aws": metadata.aws, "gcp": metadata.gcp, "azure": metadata.azure}
    chosen = {name: probe for name, probe in services.items() if name == options.preemption_notices}
    if options.notice_file is not None:
        chosen["file"] = lambda path=Path(options.notice_file): _look(path)  # type: ignore[misc]
    return chosen


def _look(path: Path) -> Notice | None:
    try:
        with open(path, errors="replace") as file:
            return read_file(file.read(4 * WHY_CHARS))
    except FileNotFoundError:
        return None


class NoticeWatch:
    """Asks each of `probes` once a second until it gives a notice. `wake` is called from the thread."""

    def __init__(self, probes: dict[str, Probe], wake: Callable[[], None]) -> None:
        self._probes = probes
        self._wake = wake
        self._heard: deque[Notice | str] = deque()
        self._closed = threading.Event()
        self._answered = dict.fromkeys(probes, time.monotonic())
        self._thread = threading.Thread(target=self._watch, name="notices", daemon=True)
        if probes:
            self._thread.start()

    def heard(self) -> list[Notice | str]:
        """Return what is new: notices, and texts about a source that does not answer."""
        return [self._heard.popleft() for _ in range(len(self._heard))]

    def close(self) -> None:
        """Stop asking. A request that is under way is not waited for."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            for name in list(self._probes):
                self._probe(name)

    def _probe(self, name: str) -> None:
        try:
            notice = self._probes[name]()
        except Exception as error:  # thread boundary: whatever a source answers, it is asked on
            if time.monotonic() - self._answered[name] > SILENT_S:
                self._answered[name] = float("inf")
                self._tell(f"no notice of preemption can be had from {name} ({error}); it is asked on")
            return
        self._answered[name] = max(self._answered[name], time.monotonic())
        if notice is not None:
            del self._probes[name]
            self._tell(notice)

    def _tell(self, told: Notice | str) -> None:
        self._heard.append(told)
        with contextlib.suppress(BlockingIOError):
            self._wake()
