"""The page and `top` beside real jobs: what happens is shown, commands reach the run, and nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration import chromium
from integration.chromium import Browser
from integration.launch_tools import PATIENCE_S, Job, command, environment, run, workers

pytestmark = pytest.mark.slow
Start = Callable[..., Job]
TOKEN = "the-token-of-this-test"
ADDRESS = re.compile(r"\[dashboard\] .*: http://127\.0\.0\.1:(\d+)/(\?token=\S+)?")
HOSTILE = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=2</script>'\"&amp;\x1b[31m"
LONG = ("--steps", 100_000, "--step-s", 0.05)


class Page:
    """An open page, without a browser."""

    def __init__(self, port: int, name: str, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._connection.request("GET", f"/api/runs/{name}/events", headers=headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self.parts: dict[str, Any] = {}

    def until(self, condition: Callable[[dict[str, Any]], Any]) -> Any:
        """Wait until what was sent so far is so."""
        name = ""
        while line := self._answer.readline().decode():
            if line.startswith("event: "):
                name = line[7:].strip()
            elif line.startswith("data: "):
                self.parts[name] = json.loads(line[6:])
                with contextlib.suppress(KeyError, IndexError):
                    if found := condition(self.parts):
                        return found
        raise AssertionError(f"the stream ended: {self.parts.get('now')}")

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def refused(port: int) -> bool:
    """Whether nobody listens there any more."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/")
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited in vain for {what}")


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts pages as users do; the port at which one listens."""
    started: list[subprocess.Popen[str]] = []

    def begin(what: Path, *options: str) -> int:
        process = subprocess.Popen(
            command("dashboard", what, "--port", 0, *options),
            env={**environment(), "ELASTIC_HARNESS_DASHBOARD_TOKEN": TOKEN},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        found = ADDRESS.match(process.stdout.readline())
        assert found is not None
        return int(found[1])

    yield begin
    for process in started:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, "Ctrl-C is its ordinary end"
        assert process.stdout is not None
        process.stdout.close()


def order(port: int, name: str, **told: str) -> str:
    """Give a command as the page does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {TOKEN}", "Origin": f"http://127.0.0.1:{port}", "X-Elastic-Harness": "control"}
    with contextlib.closing(connection):
        path = f"/api/runs/{name}/control"
        connection.request("POST", path, json.dumps(told), {**headers, "Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        return text


# ---- beside a job


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_launch_with_a_page_shows_a_death_and_takes_the_page_along(start: Start, end: int) -> None:
    job = start(*LONG, options=workers(2, "--dashboard"))
    port = int(job.until(lambda: ADDRESS.search(job.shown()), "the page's address")[1])
    job.until_step(2)
    page = Page(port, job.run_dir.name)
    assert page.until(lambda told: len(told["crew"]["members"]) == 2 and told["now"]["live"])
    members = job.members()
    assert {part["member"] for part in page.parts["now"]["computed"]["by"]} <= set(members)
    if end == signal.SIGTERM:
        victim = job.kill_rank(1)
        episode = page.until(lambda told: told["failures"]["episodes"][0])
        assert (episode["failures"][0]["code"], episode["failures"][0]["member"]) == ("EH-W101", victim)
        states = page.until(lambda told: {w["member"]: w["state"] for w in told["crew"]["workers"]})
        assert states[victim] == "dead"
        assert page.until(lambda told: told["failures"]["episodes"][0]["cost_s"] is not None)
        assert page.until(lambda told: told["crew"]["recoveries"])
    page.close()
    job.send(end)
    if end == signal.SIGTERM:
        job.wait()
    until(lambda: refused(port), "the page's end with the launch")


def test_commands_from_the_page_reach_the_run(start: Start, dashboard: Callable[..., int]) -> None:
    job = start(*LONG, options=workers(2))
    job.until_step(2)
    port, name = dashboard(job.run_dir, "--control"), job.run_dir.name
    page = Page(port, name, Authorization=f"Bearer {TOKEN}")
    assert "scaling to 3 workers" in order(port, name, command="add")
    assert page.until(lambda told: len(told["crew"]["members"]) == 3)
    victim = job.members()[0]
    assert f"killed {victim}" in order(port, name, command="kill", worker=victim)
    assert page.until(lambda told: told["failures"]["episodes"][0]["failures"][0]["code"]) == "EH-W106"
    assert "stopping" in order(port, name, command="stop")
    assert job.wait() == 143
    assert page.until(lambda told: told["now"]["state"]) in ("stopping", "stopped", "running")
    assert page.until(lambda told: told["now"]["state"] == "stopped")
    page.close()


# ---- in a terminal


def test_top_shows_a_run_once(start: Start) -> None:
    job = start(*LONG, options=workers(2, "--spares", 1))
    job.until_step(3)
    job.kill_rank(0)
    job.until_event("failure_detected")
    shown = run("top", job.run_dir, "--once")
    assert shown.returncode == 0 and "\x1b" not in shown.stdout
    assert "EH-W101" in shown.stdout and re.search(r"w\d-\d+ +training", shown.stdout), shown.stdout


def test_top_follows_a_terminal_that_is_resized_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "first", steps=30)
    ours, theirs = pty.openpty()
    resize(theirs, 100, 30)
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        command("top", folder, "--interval", 0.1),
        env={**environment(), "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    said = until_said(ours, b"of its best")
    resize(theirs, 40, 12)
    said = until_said(ours, b"\xe2\x80\xa6")  # an ellipsis: a line was cut
    os.write(ours, b"\x03")
    said = until_said(ours, b"\x1b[?1049l")
    assert process.wait(PATIENCE_S) == 0
    assert b"Traceback" not in said and b"\x1b[?25h" in said, "the cursor is there again"
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def resize(terminal: int, columns: int, lines: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))


def until_said(terminal: int, what: bytes) -> bytes:
    said, end = b"", time.monotonic() + PATIENCE_S
    while what not in said:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], said
        said += os.read(terminal, 1 << 16)
    return said


# ---- in a browser


def write_run(folder: Path, steps: int) -> Path:
    """A run that ended, with hostile texts in its log."""
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "worker-0-w0-1.log").write_text(HOSTILE)
    add(folder, "run_started", run_id=HOSTILE)
    add(folder, "worker_started", member="w0-1", pid=1, host=HOSTILE)
    add(folder, "worker_started", member=f"w1-{HOSTILE}", pid=2)
    add(folder, "generation", number=1, members=["w0-1", f"w1-{HOSTILE}"], reason=HOSTILE)
    for step in range(steps):
        commit(folder, step)
    add(folder, "failure_detected", member="w0-1", what=HOSTILE, code="EH-W101", step=steps)
    add(folder, "incident", member="w0-1", what=HOSTILE, evidence=[HOSTILE, HOSTILE], done=HOSTILE, code="EH-W101",
        log="logs/worker-0-w0-1.log")  # fmt: skip
    add(folder, "alarm", kind=HOSTILE, severity=HOSTILE, message=HOSTILE)
    add(folder, "checkpoint_failed", step=3, error=HOSTILE)
    add(folder, "waiting", reason=HOSTILE)
    commit(folder, steps)
    return folder


def add(folder: Path, event: str, **fields: Any) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"t": time.time(), "event": event, "lineage": 0, **fields}) + "\n")


def commit(folder: Path, step: int) -> None:
    add(folder, "step_committed", step=step, generation=1, world_size=2, loss=5.0 / (step + 1), tokens=100, lr=0.1,
        grad_norm=1.0, step_s=0.5)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium.program() is None:
        pytest.skip("missing program: chromium (apt install chromium)")
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def seen(browser: Browser, dashboard: object) -> Iterator[Browser]:
    """The browser, which must have nothing to complain of. It leaves a page before the page's server ends."""
    browser.complaints.clear()
    browser.look()
    yield browser
    browser.send("Page.navigate", url="about:blank")
    assert (browser.complaints, browser.dialogs) == ([], [])


def test_the_page_shows_hostile_texts_as_text(seen: Browser, dashboard: Callable[..., int], tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first", steps=20)
    port = dashboard(tmp_path / "runs")
    seen.open(f"http://127.0.0.1:{port}/")
    seen.until("document.querySelectorAll('.tile').length > 8 && document.querySelector('details.failure')")
    seen.run("document.querySelector('details.failure').open = true")
    assert seen.text().count("window.hacked=1") >= 6
    seen.run("[...document.querySelectorAll('.told button')].find(b => b.textContent.includes('w0-1.log')).click()")
    seen.until("document.querySelector('dialog[open] pre').textContent.includes('window.hacked=2')")
    assert seen.run("[window.hacked ?? null, document.querySelectorAll('main img, main script').length]") == [None, 0]


def test_what_happens_is_on_the_page_that_is_open(
    seen: Browser, dashboard: Callable[..., int], tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "first", steps=20)
    port = dashboard(folder)
    seen.open(f"http://127.0.0.1:{port}/")
    seen.until("document.querySelector('.tile b').textContent === '21'")
    commit(folder, 21)
    seen.until("document.querySelector('.tile b').textContent === '22'")
    add(folder, "failure_detected", member="w0-2", what="another end", code="EH-W103", step=22)
    seen.until("document.querySelector('details.failure b').textContent === 'EH-W103'")
    inked = "(id => document.getElementById(id).getContext('2d').getImageData(60, 10, 300, 80).data.some(v => v))"
    assert all(seen.run(f"{inked}('{name}')") for name in ("loss", "speed", "rate", "timeline")), "curves are drawn"


def test_a_part_of_the_curve_is_looked_at_and_another_run_beside_it(
    seen: Browser, dashboard: Callable[..., int], tmp_path: Path
) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / "runs" / name, steps=100)
    port = dashboard(tmp_path / "runs")
    seen.open(f"http://127.0.0.1:{port}/#second")
    seen.until("document.querySelector('.tile b').textContent === '101'")
    seen.drag("#loss", 300, 500)
    seen.until("document.querySelector('#zoomed').textContent.startsWith('steps ')")
    first, last = map(int, re.findall(r"\d+", seen.run("document.querySelector('#zoomed').textContent")))
    assert 10 < first < last < 60
    seen.run("document.querySelector('#reset').click()")
    seen.until("document.querySelector('#reset').hidden")
    seen.run("document.querySelector('#compare input').click()")
    seen.until("document.querySelectorAll('#legend .key').length === 2")
    assert seen.run("document.querySelector('#legend').innerText").split() == ["second", "first"]


def test_a_run_that_has_not_begun_is_shown_when_it_does(
    seen: Browser, dashboard: Callable[..., int], tmp_path: Path
) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "events.jsonl").touch()
    port = dashboard(folder)
    seen.open(f"http://127.0.0.1:{port}/")
    seen.until("document.querySelector('.tile b').textContent === '0'")
    commit(folder, 0)
    seen.until("document.querySelector('.tile b').textContent === '1'")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_the_page_fits_its_window_and_the_systems_colours(
    seen: Browser, dashboard: Callable[..., int], tmp_path: Path, width: int, dark: bool
) -> None:
    port = dashboard(write_run(tmp_path / "first", steps=20))
    seen.look(width=width, dark=dark)
    seen.open(f"http://127.0.0.1:{port}/")
    seen.until("document.querySelector('.tile')")
    assert seen.run("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    lightness = seen.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(lightness) < 80) == dark
    seen.screenshot(tmp_path / "page.png")


def test_a_worker_is_killed_from_the_page(seen: Browser, start: Start, dashboard: Callable[..., int]) -> None:
    job = start(*LONG, options=workers(2))
    job.until_step(2)
    port = dashboard(job.run_dir, "--control")
    seen.open(f"http://127.0.0.1:{port}/?token={TOKEN}")
    seen.until("document.querySelector('#workers button')")
    assert "token" not in seen.run("location.href")
    seen.run("document.querySelector('#workers button').click()")
    seen.run("document.querySelector('#ask button[value=no]').click()")
    assert not job.events("failure_detected"), "it asks first"
    seen.run("document.querySelector('#workers button').click()")
    seen.run("document.querySelector('#ask button[value=yes]').click()")
    assert job.until_event("failure_detected")["code"] == "EH-W106"
    seen.until("document.querySelector('details.failure b').textContent === 'EH-W106'")
