"""The text in which Prometheus reads metrics: its own format, version 0.0.4, and OpenMetrics 1.0. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_harness.metrics.fold import Histogram, Labels
from elastic_harness.metrics.table import PREFIX, TABLE, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True)
class RunValues:
    """The values of one run's metrics: by the metric's name, and then by the values of its labels."""

    labels: Mapping[str, str]  # of all of its metrics
    values: Mapping[str, Mapping[Labels, float | Histogram]]

    def as_object(self) -> dict[str, Any]:
        """Return them for --json: for each metric a list of its labels and value. What is no number is null."""
        return {
            **self.labels,
            "metrics": {
                PREFIX + name: [{**_labels(name, own), **_as_fields(value)} for own, value in self.values[name].items()]
                for name in TABLE
                if self.values.get(name)
            },
        }


def _labels(name: str, values: Labels) -> dict[str, str]:
    return dict(zip(TABLE[name].labels, values, strict=True))


def _as_fields(value: float | Histogram) -> dict[str, Any]:
    if isinstance(value, Histogram):
        return {"count": sum(value.counts), "sum": value.sum}
    return {"value": value if math.isfinite(value) else None}


def write(runs: Sequence[RunValues], *, openmetrics: bool = False) -> str:
    """Return the text of the metrics of some runs. A metric without a value is left out."""
    lines: list[str] = []
    common = [(run, _label_text(run.labels.items())) for run in runs]
    for metric in TABLE.values():
        samples = list(_samples(metric, common))
        if samples:
            lines += [*_head(metric, openmetrics=openmetrics), *samples]
    return "\n".join([*lines, "# EOF"] if openmetrics else lines) + "\n"


def _head(metric: Metric, *, openmetrics: bool) -> Iterator[str]:
    family = PREFIX + (metric.name.removesuffix("_total") if openmetrics else metric.name)
    yield f"# HELP {family} {_escaped(metric.help, quotes=openmetrics)}"
    yield f"# TYPE {family} {metric.kind}"
    if openmetrics and metric.unit:
        yield f"# UNIT {family} {metric.unit}"


def _samples(metric: Metric, runs: Iterable[tuple[RunValues, str]]) -> Iterator[str]:
    name = PREFIX + metric.name
    for run, common in runs:
        for values, value in run.values.get(metric.name, {}).items():
            own = _label_text(zip(metric.labels, values, strict=True)) if values else ""
            labels = f"{common},{own}" if own else common
            if isinstance(value, Histogram):
                yield from _buckets(name, labels, value)
            else:
                yield f"{name}{{{labels}}} {_number(value)}"


def _label_text(labels: Iterable[tuple[str, str]]) -> str:
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in labels])


def _buckets(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    count = 0
    for bound, observed in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        count += observed
        yield f'{name}_bucket{{{labels},le="{_number(bound)}"}} {count}'
    yield f"{name}_sum{{{labels}}} {_number(histogram.sum)}"
    yield f"{name}_count{{{labels}}} {count}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
