"""The page's server on a real socket: what it shows, whom it refuses, and clients that hang or come by hundreds."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.dashboard import command, hub, server
from elastic_harness.dashboard.access import Access
from elastic_harness.dashboard.command import metrics_of
from elastic_harness.dashboard.hub import Catalogue, Hub, as_json
from elastic_harness.dashboard.server import DashboardServer
from elastic_harness.errors import ConfigError, InfrastructureError
from elastic_harness.metrics import RunMetrics

TOKEN = "a-token-that-is-long-enough"
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
Start = Callable[..., DashboardServer]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "first"
    (folder / "logs").mkdir(parents=True)
    (folder / "hangs").mkdir()
    add(folder, {"t": 1.0, "event": "run_started", "run_id": "first"}, commit(0))
    add(folder, {"t": 3.0, "event": "incident", "member": "w0-1", "what": HOSTILE, "code": "EH-W101"})
    (folder / "logs" / "worker-0-w0-1.log").write_text(HOSTILE)
    (folder / "logs" / "agent.log").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("nobody may see this")
    (folder / "run.json").write_text(json.dumps({"run_id": "first", "status": "running", "created": 1.0}))
    return tmp_path / "runs"


def commit(step: int) -> dict[str, Any]:
    return {"t": 2.0 + step, "event": "step_committed", "lineage": 0, "step": step, "loss": 1.5, "world_size": 1}


def add(folder: Path, *events: dict[str, Any]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


@pytest.fixture
def start(runs: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def begin(**rules: Any) -> DashboardServer:
            access = Access(**{"loopback": True, "names": frozenset(), "token": None, "control": False, **rules})
            served = DashboardServer("127.0.0.1", 0, access, Hub(Catalogue(str(runs))))
            thread = threading.Thread(target=served.serve_forever, args=(0.02,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(served.close)
            stack.callback(served.shutdown)
            return served

        yield begin
    left = [thread.name for thread in threading.enumerate() if thread.name == "hub"]
    assert not left


def ask(
    served: DashboardServer, path: str, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


class Stream:
    """A page that is open."""

    def __init__(self, served: DashboardServer, name: str = "first") -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
        self.connection.request("GET", f"/api/runs/{name}/events")
        self.answer = self.connection.getresponse()

    def until(self, part: str, condition: Callable[[Any], bool] = bool) -> Any:
        name = ""
        while line := self.answer.readline().decode():
            if line.startswith("event: "):
                name = line[7:].strip()
            elif line.startswith("data: ") and name == part and condition(told := json.loads(line[6:])):
                return told
        raise AssertionError(f"the stream ended before {part}")

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


# ---- what it shows


def test_the_page_and_all_that_it_loads_is_served_and_nothing_from_elsewhere(start: Start) -> None:
    served = start()
    status, page, headers = ask(served, "/")
    assert status == HTTPStatus.OK and "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
    whole = page
    for path in ("/page.css", "/page.js", "/charts.js"):
        assert f'"{path}"' in page or f'".{path}"' in whole
        status, text, _ = ask(served, path)
        assert status == HTTPStatus.OK
        whole += text
    assert "://" not in whole and "innerHTML" not in whole and "outerHTML" not in whole
    assert len(whole) < 150_000
    assert json.loads(ask(served, "/api/runs")[1])["runs"][0]["name"] == "first"


def test_what_happens_reaches_a_page_that_is_open(start: Start, runs: Path) -> None:
    stream = Stream(start())
    assert stream.until("now")["step"] == 0
    assert stream.until("failures")["episodes"][0]["failures"][0]["what"] == HOSTILE
    add(runs / "first", commit(1))
    told = stream.until("series")
    assert (told["from"], [row[0] for row in told["rows"]]) == (0, [0, 1]), "from the last point that it had"
    assert stream.until("now")["step"] == 1
    stream.close()


def test_what_happens_after_a_quiet_time_comes_as_soon(
    start: Start, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ALWAYS_S", 1000.0)
    monkeypatch.setattr(server, "LOOK_S", 0.05)
    stream = Stream(start())
    stream.until("now")
    time.sleep(0.5)  # the stream has looked whether its client is there
    add(runs / "first", commit(1))
    began_at = time.monotonic()
    stream.until("now", lambda told: told["step"] == 1)
    assert time.monotonic() - began_at < server.IDLE_S / 2
    stream.close()


def test_a_page_that_is_open_gets_the_whole_curve_of_a_run_that_was_begun_anew(start: Start, runs: Path) -> None:
    add(runs / "first", commit(1), commit(2))
    stream = Stream(start())
    assert len(stream.until("series")["rows"]) == 3
    (runs / "first" / "events.jsonl").rename(runs / "old")
    add(runs / "first", commit(0), commit(1))
    told = stream.until("series")
    assert (told["from"], [row[0] for row in told["rows"]]) == (0, [0, 1])
    stream.close()


def test_the_folder_of_another_node_is_taken_in(start: Start, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LIST_S", 0.0)
    served = start()
    stream = Stream(served)
    stream.until("now")
    (runs / "first@other").mkdir()
    add(runs / "first@other", {"t": 9.0, "event": "worker_started", "member": "other/w0-1", "pid": 1})
    both = Stream(served)
    assert both.until("crew", lambda told: "other/w0-1" in [worker["member"] for worker in told["workers"]])
    with pytest.raises(AssertionError, match="the stream ended"):
        stream.until("nothing")  # the browser connects again by itself
    stream.close()
    both.close()


def test_a_run_that_cannot_be_shown_says_so_and_harms_no_other(
    start: Start, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "second").mkdir()
    add(runs / "second", commit(7))
    show = hub.show
    monkeypatch.setattr(hub, "show", lambda run, *more: 1 / 0 if run.name == "first" else show(run, *more))
    served = start()
    ill, well = Stream(served), Stream(served, "second")
    assert "ZeroDivisionError" in ill.until("trouble")
    assert well.until("now")["step"] == 7
    monkeypatch.setattr(hub, "show", show)
    assert ill.until("now")["step"] == 0, "as soon as it can be shown, it is"
    ill.close()
    well.close()


def test_numbers_that_are_not_finite_are_null() -> None:
    assert as_json({"a": [1.0, float("nan")], "b": float("inf")}) == '{"a":[1.0,null],"b":null}'


def test_something_else_can_be_mounted(start: Start) -> None:
    served = start(token=TOKEN)
    served.mounted["/metrics"] = lambda: ("text/plain", b"up 1\n")
    assert ask(served, "/metrics")[0] == HTTPStatus.UNAUTHORIZED
    assert ask(served, "/metrics", Authorization=f"Bearer {TOKEN}")[1] == "up 1\n"


def test_metrics_are_those_of_the_live_runs_or_of_the_one_that_is_shown(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: dict[Path, RunMetrics] = {}
    kind, body = metrics_of(Catalogue(str(runs)), readers)
    assert kind.startswith("text/plain") and b'run="first"' in body
    for name in ("live", "ended"):
        (runs / name).mkdir()
        add(runs / name, {"t": 1.0, "event": "run_started", "run_id": name}, commit(0))
    monkeypatch.setattr(command, "locked", lambda path: path.name == "live")
    _, body = metrics_of(Catalogue(str(runs)), readers)
    assert b'run="live"' in body and b'run="first"' not in body and b'run="ended"' not in body
    assert [path.name for path in readers] == ["live"]


# ---- what it does not show


@pytest.mark.parametrize(
    "path",
    [
        "/../secret", "/..%2f..%2fsecret", "/page/index.html", "/api/runs/../events", "/api/runs/%2e%2e/events",
        "/api/runs/..%2f..%2fetc/events", "/api/runs/first/nothing", "/api/runs//events", "/api/runs/first/text",
        "/api/runs/first/text?name=../../../secret", "/api/runs/first/text?name=logs/../run.json",
        "/api/runs/first/text?name=/etc/passwd", "/api/runs/first/text?name=logs/agent.log",
        "/api/runs/first/text?name=run.json", "/api/runs/first/text?name=logs/worker-0-w0-1.log%00", "//etc/passwd",
    ],
)  # fmt: skip
def test_no_address_leads_out_of_the_run(start: Start, path: str) -> None:
    status, text, _ = ask(start(), path)
    assert status == HTTPStatus.NOT_FOUND and "nobody may see" not in text and "root:" not in text


def test_logs_are_text_and_nothing_else(start: Start) -> None:
    status, text, headers = ask(start(), "/api/runs/first/text?name=logs/worker-0-w0-1.log")
    assert (status, text) == (HTTPStatus.OK, HOSTILE)
    assert headers["Content-Type"].startswith("text/plain") and headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("asked", ["", "?first=-1&last=2", "?first=1&last=x", "?first=1&last=" + "9" * 30])
def test_a_wrong_range_is_refused(start: Start, asked: str) -> None:
    assert ask(start(), "/api/runs/first/steps" + asked)[0] == HTTPStatus.BAD_REQUEST


# ---- whom it refuses


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::1", "10.0.0.9"]
)
def test_another_sites_name_is_refused(start: Start, host: str) -> None:
    for path in ("/", "/api/runs", "/api/runs/first/events"):
        status, text, _ = ask(start(), path, Host=host)
        assert status == HTTPStatus.FORBIDDEN and "Host" in text


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1:1234", "[::1]:80"])
def test_this_machine_is_known_by_its_names_at_any_port(start: Start, host: str) -> None:
    assert ask(start(), "/api/runs", Host=host)[0] == HTTPStatus.OK


def test_without_the_token_nothing_is_shown(start: Start) -> None:
    served = start(token=TOKEN)
    for path in ("/", "/page.js", "/api/runs", "/api/runs/first/events", "/?token=wrong", "/api/runs?token=" + TOKEN):
        assert ask(served, path)[0] == HTTPStatus.UNAUTHORIZED, path
    assert ask(served, "/", Authorization="Bearer wrong")[0] == HTTPStatus.UNAUTHORIZED
    assert ask(served, "/api/runs", Authorization=f"Bearer {TOKEN}")[0] == HTTPStatus.OK


def test_the_token_becomes_a_cookie_and_leaves_the_address(start: Start) -> None:
    served = start(token=TOKEN)
    status, _, headers = ask(served, f"/?token={TOKEN}")
    assert (status, headers["Location"]) == (HTTPStatus.SEE_OTHER, "/")
    assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
    assert ask(served, "/api/runs", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == HTTPStatus.OK
    assert ask(served, f"/?token={TOKEN}", Host="evil.example")[0] == HTTPStatus.FORBIDDEN


def order(served: DashboardServer, **changed: str | None) -> tuple[int, str]:
    headers = {
        "Authorization": f"Bearer {TOKEN}",
        "Origin": f"http://127.0.0.1:{served.port}",
        "Content_Type": "application/json",
        "X_Elastic_Harness": "control",
    }
    given = {name: value for name, value in {**headers, **changed}.items() if value is not None}
    body = json.dumps({"command": "kill", "worker": "w0"})
    return ask(served, "/api/runs/first/control", "POST", body, **given)[:2]


@pytest.mark.parametrize(
    "changed",
    [
        {"Authorization": None}, {"Origin": None}, {"Origin": "http://evil.example"}, {"Origin": "null"},
        {"X_Elastic_Harness": None}, {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"}, {"Host": "evil.example", "Origin": "http://evil.example"},
    ],
)  # fmt: skip
def test_a_command_of_another_site_is_refused(start: Start, changed: dict[str, str | None]) -> None:
    served = start(token=TOKEN, control=True)
    assert order(served, **changed)[0] in (401, 403, 415)
    status, said = order(served)
    assert status == HTTPStatus.CONFLICT and "is not live" in said, "all that is right, the run's agent is asked"


def test_without_control_no_command_is_taken(start: Start) -> None:
    status, said = order(start(token=TOKEN))
    assert status == HTTPStatus.FORBIDDEN and "--control" in said
    assert ask(start(), "/api/runs/first/control", "OPTIONS")[0] == HTTPStatus.NOT_IMPLEMENTED


@pytest.mark.parametrize("length", ["-1", "x", "999999999", ""])
def test_a_command_of_odd_length_is_refused(start: Start, length: str) -> None:
    assert order(start(token=TOKEN, control=True), Content_Length=length)[0] in (400, 413)


# ---- clients that do harm


def test_clients_that_hang_by_hundreds_keep_nobody_out(start: Start) -> None:
    served = start()
    with contextlib.ExitStack() as stack:
        for number in range(2 * server.CONNECTIONS_MAX):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            client.sendall(b"GET / HTTP/1.1\r\nHost: loc" if number % 2 else b"")
        assert ask(served, "/api/runs")[0] == HTTPStatus.OK
        assert threading.active_count() < server.CONNECTIONS_MAX + 20
    stream = Stream(served)
    assert stream.until("now")
    stream.close()


def test_pages_by_hundreds_get_as_many_streams_as_there_are(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAMS_MAX", 5)
    served = start()
    streams = [Stream(served) for _ in range(8)]
    assert [stream.answer.status for stream in streams] == [200] * 5 + [503] * 3
    assert ask(served, "/")[0] == HTTPStatus.OK
    for stream in streams:
        stream.close()
    end = time.monotonic() + 20
    while time.monotonic() < end:  # a page that was closed makes room for another one
        again = Stream(served)
        status = again.answer.status
        again.close()
        if status == HTTPStatus.OK:
            return
    raise AssertionError("the streams of pages that were closed are still taken")


@pytest.mark.parametrize(
    "sent",
    [b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000, b"POST / HTTP/1.1\r\n\r\n",
     b"GET /?" + b"a&" * 500 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n",
     b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n"],
)  # fmt: skip
def test_what_is_no_request_is_answered_or_dropped(start: Start, sent: bytes) -> None:
    served = start()
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert b"Traceback" not in client.makefile("rb").read()
    assert ask(served, "/")[0] == HTTPStatus.OK


# ---- the command line


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("x", False)]
)
def test_other_addresses_need_a_token(host: str, loopback: bool) -> None:
    assert command.is_loopback(host) == loopback


def test_a_token_that_is_easily_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "short", "long enough, but with blanks"):
        monkeypatch.setenv("ELASTIC_HARNESS_DASHBOARD_TOKEN", text)
        with pytest.raises(ConfigError, match="at least 16"):
            command._token()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        command.main([str(tmp_path / "nothing")])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no folder"):
        command.main([str(tmp_path / "file")])
    with pytest.raises(ConfigError, match="--port is 70000"):
        command.main([str(tmp_path), "--port", "70000"])


def test_a_port_that_is_taken_is_said_or_the_next_one_used(tmp_path: Path, start: Start) -> None:
    taken = start()
    others = Hub(Catalogue(str(tmp_path)))
    access = Access(True, frozenset(), None, False)
    try:
        with pytest.raises(InfrastructureError, match=f"port {taken.port}"):
            command._server("127.0.0.1", taken.port, access, others)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command, "PORT", taken.port)
            served = command._server("127.0.0.1", None, access, others)
            assert taken.port < served.port < taken.port + command.PORTS_TRIED
            served.server_close()
    finally:
        others.close()
