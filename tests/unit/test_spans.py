"""Spans of a run: what they cover, and that OpenTelemetry's own package sends each once."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_harness import cli
from elastic_harness.tracking.spans import RunSpan, Spans
from unit.test_episodes import STEP_S, Log


def two_launches() -> Log:
    log = Log(5).lost("b", "EH-W101").members("a", "c")
    log.add("recovery", generation=7, planned=False, t_noticed=log.t - 0.3, total_ms=310.0).commit(5)
    log.add("checkpoint_saved", step=10, seconds=2.0, bytes=7)
    log.add("run_started", 60.0).members("a", "c").commit(3)
    return log.add("run_finished", status="finished")


def spans_of(log: Log) -> list[RunSpan]:
    spans = Spans("run")
    return [span for event in log.events for span in spans.take(event)]


def test_a_launch_is_a_trace_of_what_happened_in_it() -> None:
    log = two_launches()
    spans = spans_of(log)
    names = [span.name for span in spans]
    first = ["generation", "recovery", "checkpoint saved", "generation", "launch"]
    assert names == [*first, "generation", "launch"]
    assert [span.trace for span in spans] == [("run", 1)] * 5 + [("run", 2)] * 2
    launch, recovery, checkpoint = spans[4], spans[1], spans[2]
    assert launch.failed and launch.attributes["status"] == "cut off", "nobody said how it ended"
    assert [told["code"] for _, _, told in launch.events] == ["EH-W101"] and not spans[-1].events
    assert recovery.ended_at - recovery.began_at == pytest.approx(0.31)
    assert checkpoint.ended_at - checkpoint.began_at == pytest.approx(2.0)
    assert spans[3].ended_at == launch.ended_at < log.events[-5]["t"], "the second launch is not in it"
    assert spans[-1].ended_at - spans[-1].began_at == pytest.approx(3 * STEP_S, abs=0.1)
    assert len({(span.trace_id, span.span_id) for span in spans}) == len(spans)
    assert [(s.trace_id, s.span_id) for s in spans_of(two_launches())] == [(s.trace_id, s.span_id) for s in spans]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """A server that takes OTLP."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_opentelemetry_gets_each_span_once(tmp_path: Path, collector: tuple[str, list[bytes]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    endpoint, bodies = collector
    log, env = two_launches(), {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    whole = log.events
    for end in (12, len(whole), len(whole)):
        log.events = whole[:end]
        folder = log.write(tmp_path / "run")
        subprocess.run([sys.executable, "-m", "elastic_harness", "track", str(folder), "otel"], check=True, env=env)
    sent = [
        (scope_span.name, scope_span.span_id, scope_span.parent_span_id)
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for scope_span in scope.spans
    ]
    want = spans_of(two_launches())
    assert [(name, int.from_bytes(own, "big")) for name, own, _ in sent] == [(s.name, s.span_id) for s in want]
    assert [bool(parent) for _, _, parent in sent] == [s.name != "launch" for s in want]
    assert json.loads((tmp_path / "run" / "tracking" / "otel.json").read_text()) == {"spans": len(want)}


def test_without_the_package_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert cli.main(["track", str(Log(2).write(tmp_path / "run")), "otel"]) == 2
    assert "pip install 'elastic-harness[otel]'" in capsys.readouterr().err
