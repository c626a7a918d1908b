"""A headless Chromium, steered over a pipe with its DevTools protocol: that needs no driver and no package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60.0


def program() -> str | None:
    """Where Chromium is, None if it is not installed."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """Use as a context. One page at a time. What a page complains of is in `complaints`."""

    def __init__(self, folder: Path) -> None:
        self.complaints: list[str] = []
        self.dialogs: list[str] = []
        found = program()
        assert found is not None
        (read, self._out), (self._in, write) = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (read, write)]
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        arguments += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            [found, *arguments, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=lambda: (os.dup2(theirs[0], 3), os.dup2(theirs[1], 4)),
            start_new_session=True,
        )
        for descriptor in (read, write, *theirs):
            os.close(descriptor)
        self._rest, self._number = b"", 0
        self._session: str | None = None

    def __enter__(self) -> Browser:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    # ---- the protocol

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something, and return the answer. Fails the test if it is an error."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._out, json.dumps(order).encode() + b"\0")
        while True:
            told = self._receive()
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                return told["result"]
            self._note(told)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, f"Chromium does not answer (exit code {self._process.poll()})"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, told: dict[str, Any]) -> None:
        parameters = told.get("params", {})
        match told.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(json.dumps(parameters["entry"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(parameters["args"]))
            case "Page.javascriptDialogOpening":
                self.dialogs.append(parameters["message"])

    # ---- what a person does

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and whether the system is dark."""
        phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Go to an address, from anywhere."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if self.run(f"(() => {{ try {{ return Boolean({script}) }} catch {{ return false }} }})()"):
                return
            time.sleep(0.02)
        raise AssertionError(f"{script} never came true; {self.complaints}:\n{self.text()[:3000]}")

    def text(self) -> str:
        return self.run("document.body.innerText")

    def drag(self, element: str, begin: int, end: int) -> None:
        """Drag the mouse over an element, from so many pixels right of its left edge to so many."""
        box = f"document.querySelector('{element}').getBoundingClientRect()"
        left, top = self.run(f"(box => [box.left, box.top + 40])({box})")
        places = (("mouseMoved", begin), ("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end))
        for kind, x in places:
            self.send("Input.dispatchMouseEvent", type=kind, x=left + x, y=top, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))
