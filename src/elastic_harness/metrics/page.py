"""The page about all metrics, docs/metrics.md. It is written by `make reference` and never by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from elastic_harness.metrics.alerts import ALERTS
from elastic_harness.metrics.promql import whole_names
from elastic_harness.metrics.table import PREFIX, TABLE, Metric

_HEAD = """\
<!-- Made from src/elastic_harness/metrics/ by `make reference`. Change the tables there, not this page. -->

# Metrics

For Prometheus. A process of its own reads the run folder, so nothing of it takes the time of the agent or of a worker,
and it may be started, killed and started again at any time.

```
elastic-harness metrics RUN                        # print them once; --json: as JSON
elastic-harness metrics RUN --port 9464            # serve http://127.0.0.1:9464/metrics until Ctrl-C
elastic-harness metrics RUN --file DIR/run.prom    # for the textfile collector of node_exporter, until the run ends
elastic-harness launch --metrics-file DIR/run.prom train.py    # the same, for as long as this launch lives
```

- **Loopback unless told otherwise.** `--address 0.0.0.0` shows the metrics to everybody who reaches the port. They can
  only be read.
- **Batch systems** (Slurm and the like), where Prometheus does not reach a job: let node_exporter run with
  `--collector.textfile.directory=DIR`. The file is replaced at once, never half written. When the run has ended, it is
  written once more and stays; remove it when it is not wanted any more.
- **Counters** begin with the run, not with the process: they are folded from the run's events, of all of its launches,
  and never fall. A run that is begun anew with `--fresh` begins with 0, which Prometheus takes for a reset.
- **When a run has ended**, what is about the present (marked *now*) is absent. `run_state` says how it ended. If the
  launch was killed, that is `dead`.
- **Several nodes.** Each node has its own run folder, and its own exporter. What is marked *run* each node tells of
  the whole run: take `max by (run)`. What is marked *node* it tells of itself: take `sum by (run)`.
- **Labels.** All metrics have `run` and, with several nodes, `node`. The other labels have few values. A place on a
  node is a label, but no member and no process, for each restart makes a new one.
- **GPUs** are dcgm-exporter's matter. Join its metrics by instance. Its `DCGM_FI_DEV_XID_ERRORS` is the code of the
  *last* error, not a count.

[monitoring/prometheus-rules.yaml](../monitoring/prometheus-rules.yaml) has alert rules, and
[monitoring/grafana-dashboard.json](../monitoring/grafana-dashboard.json) a dashboard; `elastic-harness metrics --make
rules` and `--make dashboard` print them. Both are made from the same tables as this page. In the tests promtool judges
the rules: each fires when it should. A real Prometheus has scraped a run and answered every query of the dashboard. No
real Grafana has shown it.
"""


def metrics_page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_tables(), *_alerts()])


def _tables() -> Iterator[str]:
    for group, metrics in itertools.groupby(TABLE.values(), key=lambda metric: metric.group):
        yield f"## {group}\n"
        yield "| Metric | Type | Labels | What it is | From | Scope |\n|---|---|---|---|---|---|"
        yield from map(_row, metrics)
        yield ""


def _row(metric: Metric) -> str:
    labels = "; ".join(f"`{name}`: {_values(values)}" for name, values in metric.labels.items())
    kind = f"{metric.kind}, in {metric.unit}" if metric.unit else metric.kind
    scope = metric.scope + (", now" if metric.now else "")
    return f"| `{PREFIX}{metric.name}` | {kind} | {labels} | {metric.help} | {metric.source} | {scope} |"


def _values(values: tuple[str, ...] | str) -> str:
    return values if isinstance(values, str) else ", ".join(values)


def _alerts() -> Iterator[str]:
    yield "## Alerts\n"
    yield "*page*: training stands, or work is lost. *ticket*: look at it in working hours. Fit the limits to your run."
    yield ""
    yield "| Alert | Severity | If it holds for | Expression |\n|---|---|---|---|"
    for alert in ALERTS:
        expression = whole_names(alert.expression).replace("|", "\\|")
        yield f"| ElasticHarness{alert.name} | {alert.severity} | {alert.lasts} | `{expression}` |"
