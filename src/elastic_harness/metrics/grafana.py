"""A dashboard for Grafana, monitoring/grafana-dashboard.json. It is written by `make reference`, never by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from elastic_harness.metrics.promql import whole_names
from elastic_harness.metrics.table import PREFIX, TABLE, Metric

_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_UNITS = {"seconds": "s", "bytes": "bytes"}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> str:
    """Return the file, for Grafana 10 or newer: a row of panels for each group of metrics."""
    content = {
        "title": "elastic-harness",
        "uid": "elastic-harness",
        "description": "Made from src/elastic_harness/metrics/table.py by `make reference`.",
        "tags": ["elastic-harness"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }
    return json.dumps(content, indent=1) + "\n"


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "label": "run",
            "type": "query",
            "datasource": _SOURCE,
            "query": f"label_values({PREFIX}build_info, run)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
        },
    ]


def _panels() -> Iterator[dict[str, Any]]:
    numbers, y = itertools.count(1), 0
    for group, metrics in itertools.groupby(TABLE.values(), key=lambda metric: metric.group):
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        yield {"type": "row", "title": group, "id": next(numbers), "gridPos": place, "collapsed": False, "panels": []}
        y += 1
        shown = list(metrics)
        for index, metric in enumerate(shown):
            row, column = divmod(index, _COLUMNS)
            place = {"x": column * _WIDTH, "y": y + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _panel(metric) | {"id": next(numbers), "gridPos": place}
        y += -(-len(shown) // _COLUMNS) * _HEIGHT


def _panel(metric: Metric) -> dict[str, Any]:
    query = whole_names(metric.query, 'run=~"$run"')
    ratio = metric.name == "time_seconds_total"
    unit = "percentunit" if ratio else "s" if "time()" in metric.query else _UNITS.get(metric.unit, "short")
    return {
        "type": "timeseries",
        "title": "effective training time" if ratio else metric.name.removesuffix("_total").replace("_", " "),
        "description": metric.help,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"spanNulls": False}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [{"refId": "A", "datasource": _SOURCE, "expr": query, "legendFormat": metric.legend}],
    }
