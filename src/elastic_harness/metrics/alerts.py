"""Alert rules for Prometheus, monitoring/prometheus-rules.yaml. It is written by `make reference`, never by hand."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from elastic_harness.incidents import table as codes
from elastic_harness.metrics.promql import whole_names


@dataclass(frozen=True)
class Alert:
    """One rule. Metrics stand in the expression without the prefix."""

    name: str
    expression: str
    lasts: str  # how long it must hold
    severity: str  # page: training stands, or will lose work. ticket: look at it in working hours
    summary: str
    next: str  # what to type


_SAVING_FAILS = "|".join(code.id for code in (codes.NOT_SAVED, codes.NOT_SAVED_FATAL, codes.NOT_UPLOADED))

ALERTS = (
    Alert(
        "TrainingStandsStill",
        "(time() - max by (run) (last_commit_timestamp_seconds) > 900) and on (run) "
        '(max by (run) (run_state{state=~"starting|running"}) == 1)',
        "5m", "page", "No step of {{ $labels.run }} was committed for more than 15 minutes.",
        "elastic-harness status {{ $labels.run }}; elastic-harness explain {{ $labels.run }}",
    ),
    Alert(
        "RunFailed", 'max by (run) (run_state{state=~"failed|dead"}) == 1', "1m", "page",
        "{{ $labels.run }} has failed, or its launch was killed.",
        "elastic-harness explain {{ $labels.run }}; elastic-harness resume {{ $labels.run }}",
    ),
    Alert(
        "WorkersAreMissing",
        "max by (run) (world_size) < 0.9 * max by (run) (max_over_time(world_size[6h]))", "15m", "ticket",
        "{{ $labels.run }} trains with {{ $value }} workers, a tenth less than it had in the last six hours.",
        "elastic-harness status {{ $labels.run }}",
    ),
    Alert(
        "LittleEffectiveTime",
        'max by (run) (increase(time_seconds_total{state="productive"}[1h])) / '
        "sum by (run) (max by (run, state) (increase(time_seconds_total[1h]))) < 0.9 and "
        "on (run) sum by (run) (max by (run, state) (increase(time_seconds_total[1h]))) > 1800",
        "15m", "ticket", "Only {{ $value | humanizePercentage }} of the last hour of {{ $labels.run }} was productive.",
        "elastic-harness report {{ $labels.run }}",
    ),
    Alert(
        "WorkersFailOften", "sum by (run, code) (increase(failures_total[1h])) > 10", "0m", "ticket",
        "{{ $labels.run }} had {{ $value | humanize }} failures {{ $labels.code }} within an hour.",
        "elastic-harness explain {{ $labels.code }}",
    ),
    Alert(
        "StepsAreSlower",
        "histogram_quantile(0.5, max by (run, le) (rate(step_duration_seconds_bucket[15m]))) > "
        "2 * histogram_quantile(0.5, max by (run, le) (rate(step_duration_seconds_bucket[6h])))", "15m", "ticket",
        "Steps of {{ $labels.run }} take twice as long as in the last six hours.",
        "elastic-harness status {{ $labels.run }}",
    ),
    Alert(
        "LossIsNotFinite", "max by (run) (loss) != max by (run) (loss)", "5m", "page",
        "The loss of {{ $labels.run }} is no number.", "elastic-harness explain {{ $labels.run }}",
    ),
    Alert(
        "UpdatesAreSkipped", "max by (run) (increase(updates_skipped_total[1h])) > 10", "0m", "ticket",
        "{{ $value | humanize }} updates of {{ $labels.run }} were skipped within an hour.",
        "elastic-harness health {{ $labels.run }}",
    ),
    Alert(
        "WorkerGaveOtherBits", "max by (run) (increase(replica_mismatch_total[1h])) > 0", "0m", "page",
        "A worker of {{ $labels.run }} gave other bits than its peers, and was sent away.",
        "elastic-harness explain {{ $labels.run }}; on the machine: elastic-harness burn-in",
    ),
    Alert(
        "CheckpointIsOld", 'min by (run) (checkpoint_age_seconds{tier="disk"}) > 7200', "5m", "ticket",
        "The newest checkpoint of {{ $labels.run }} is {{ $value | humanizeDuration }} old.",
        "elastic-harness checkpoint list {{ $labels.run }}",
    ),
    Alert(
        "CheckpointsFail", f'sum by (run, code) (increase(failures_total{{code=~"{_SAVING_FAILS}"}}[1h])) > 0',
        "0m", "ticket", "Checkpoints of {{ $labels.run }} are not saved ({{ $labels.code }}).",
        "elastic-harness explain {{ $labels.code }}",
    ),
    Alert(
        "NodeHasNotice", 'sum by (run, source) (increase(preemption_notices_total{source!="request"}[10m])) > 0', "0m",
        "ticket", "A node of {{ $labels.run }} was told that it will go ({{ $labels.source }}).",
        "elastic-harness status {{ $labels.run }}",
    ),
)  # fmt: skip


def rules() -> str:
    """Return the file."""
    group = [
        {
            "alert": f"ElasticHarness{alert.name}",
            "expr": whole_names(alert.expression),
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "next": alert.next},
        }
        for alert in ALERTS
    ]
    head = "# Made from src/elastic_harness/metrics/alerts.py by `make reference`. Change that, not this file.\n"
    content = {"groups": [{"name": "elastic-harness", "rules": group}]}
    return head + yaml.safe_dump(content, sort_keys=False, width=1000)
