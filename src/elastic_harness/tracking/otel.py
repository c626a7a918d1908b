"""Sends a run's spans to OpenTelemetry, by OTLP over HTTP: to OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_harness import durable_file, shape
from elastic_harness.errors import ConfigError
from elastic_harness.tracking.spans import RunSpan, Spans

FLUSH_SPANS = 200


class SpanFollower:
    """Takes a run's events, and sends each span once it has ended. If it is killed and started again, it sends what has
    ended since it last knew that all was sent. A span that comes twice has the same ids."""

    def __init__(self, run_id: str, folder: Path) -> None:
        """Make the exporter. Raises ConfigError if the package is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise ConfigError(f"spans need a package ({error}): pip install 'elastic-harness[otel]'") from error
        self._exporter = OTLPSpanExporter()
        self._resource = Resource.create({"service.name": "elastic-harness", "run": run_id})
        self._spans, self._path, self._sent_to = Spans(run_id), folder / "otel.json", -1
        self._taken, self._pending = 0, list[RunSpan]()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._sent_to = int(shape.parse_object(self._path.read_bytes())["spans"])
        except (OSError, LookupError, TypeError, ValueError):
            self._sent_to = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        for span in self._spans.take(event):
            self._taken += 1
            if self._taken > self._sent_to:
                self._pending.append(span)
        if len(self._pending) >= FLUSH_SPANS:
            self.save()

    def save(self) -> None:
        """Send what has ended, and note that. What cannot be sent now is sent later."""
        if not self._pending:
            return
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self._exporter.export([self._as_sent(span) for span in self._pending]) is SpanExportResult.SUCCESS:
            self._pending, self._sent_to = [], self._taken
            durable_file.write(self._path, json.dumps({"spans": self._sent_to}).encode())

    def close(self) -> None:
        self.save()
        self._exporter.shutdown()

    def _as_sent(self, span: RunSpan) -> Any:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import Event, ReadableSpan

        def context(span_id: int) -> trace.SpanContext:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
            return trace.SpanContext(span.trace_id, span_id, is_remote=False, trace_flags=flags)

        launch = RunSpan("launch", 0.0, 0.0, span.trace, "")
        return ReadableSpan(
            name=span.name,
            context=context(span.span_id),
            parent=context(launch.span_id) if span.key else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[Event(name, dict(told), timestamp=int(1e9 * t)) for t, name, told in span.events],
            start_time=int(1e9 * span.began_at),
            end_time=int(1e9 * span.ended_at),
            status=trace.Status(trace.StatusCode.ERROR if span.failed else trace.StatusCode.OK),
        )
