"""Metrics of runs for Prometheus: one table, a fold over a run's events, and text. A process of its own reads the run
folder; neither agent nor workers know of it."""

from __future__ import annotations

from elastic_harness.metrics.exposition import CONTENT_TYPE, OPENMETRICS_TYPE
from elastic_harness.metrics.run import RunMetrics, text

__all__ = ["CONTENT_TYPE", "OPENMETRICS_TYPE", "RunMetrics", "text"]
