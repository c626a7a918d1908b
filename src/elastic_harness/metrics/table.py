"""The table of all metrics. The exporter, docs/metrics.md, the dashboard and the tests read it.

Labels are bounded: each has the few values that its row says, the codes of the incidents, or one value for each place
of a node. A member or a process id is never a label, because each restart makes a new one. All metrics also have the
label `run`, and `node` if the run has several nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

PREFIX = "elastic_harness_"
STEP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

TIMES = ("productive", "replay", "recovery", "waiting", "startup", "checkpoint", "down")
STAGES = ("detect", "generation", "rebuild", "reconcile", "release", "repair", "total")
RUN_STATES = ("starting", "running", "stopping", "draining", "finished", "stopped", "failed", "dead", "unknown")
WORKER_STATES = ("training", "starting", "spare")
AUDITS = ("agreed", "same", "ill", "undecided", "random")
RECOMPUTED = ("restored", "retried", "declined")
SOURCES = ("SIGTERM", "request", "file", "aws", "gcp", "azure", "other")
TIERS = ("disk", "remote")


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str  # without PREFIX; of a counter with `_total`
    kind: Literal["counter", "gauge", "histogram"]
    group: str  # the part of the dashboard that it is in
    help: str  # one sentence
    source: str  # events, with their fields, or the file that it comes from
    labels: Mapping[str, tuple[str, ...] | str] = field(default_factory=dict)  # its values, or in words what they are
    unit: str = ""  # as in the name
    scope: Literal["run", "node"] = "run"  # node: each node of a run tells of itself, and sums are over nodes
    now: bool = False  # it is about the present, and absent when nothing runs
    buckets: tuple[float, ...] = ()
    query: str = ""  # PromQL of its panel; metrics stand there without the prefix
    legend: str = "{{run}}"


def _rows(*metrics: Metric) -> Mapping[str, Metric]:
    return MappingProxyType({metric.name: metric for metric in metrics})


_EVERY_STATE_IS_TOLD = "1 for the one that holds, 0 for the others."

TABLE = _rows(
    # ---- progress
    Metric(
        "build_info", "gauge", "Progress", "The version of elastic_harness that exports; always 1.", "the exporter",
        {"version": "its version"}, query="max by (run, version) (build_info)", legend="{{run}} {{version}}",
    ),
    Metric(
        "run_state", "gauge", "Progress", f"What has become of the run. {_EVERY_STATE_IS_TOLD}",
        "`status` in `run.json`, and `lock`: `dead` if nobody holds that and the run has not ended",
        {"state": RUN_STATES}, scope="node", query="sum by (run, state) (run_state) > 0", legend="{{run}} {{state}}",
    ),
    Metric(
        "launches_total", "counter", "Progress", "Launches of the run.", "`run_started`",
        scope="node", query="max by (run) (launches_total)",
    ),
    Metric(
        "steps_committed_total", "counter", "Progress", "Steps that were committed for the first time.",
        "`step_committed`", query="max by (run) (rate(steps_committed_total[5m]))",
    ),
    Metric(
        "steps_recommitted_total", "counter", "Progress",
        "Steps that were committed once more, because the run went back to a checkpoint.", "`step_committed`",
        query="max by (run) (increase(steps_recommitted_total[1h]))",
    ),
    Metric(
        "samples_total", "counter", "Progress", "Samples of steps that were committed for the first time.",
        "`samples` of `step_committed`", query="max by (run) (rate(samples_total[5m]))",
    ),
    Metric(
        "tokens_total", "counter", "Progress", "Tokens of steps that were committed for the first time.",
        "`tokens` of `step_committed`", query="max by (run) (rate(tokens_total[5m]))",
    ),
    Metric(
        "step", "gauge", "Progress", "The newest committed step. It goes back when the run does.", "`step_committed`",
        query="max by (run) (step)",
    ),
    Metric(
        "last_commit_timestamp_seconds", "gauge", "Progress", "When the newest step was committed.",
        "`t` of `step_committed`", unit="seconds", query="time() - max by (run) (last_commit_timestamp_seconds)",
    ),
    Metric(
        "last_event_timestamp_seconds", "gauge", "Progress", "When anything was told of the run.", "`t` of all events",
        unit="seconds", scope="node", query="time() - max by (run) (last_event_timestamp_seconds)",
    ),
    # ---- training
    Metric(
        "loss", "gauge", "Training", "The loss of the newest step.", "`step_committed`", query="max by (run) (loss)",
    ),
    Metric(
        "validation_loss", "gauge", "Training", "The newest validation loss.", "`validation`",
        query="max by (run) (validation_loss)",
    ),
    Metric(
        "grad_norm", "gauge", "Training", "The norm of the newest step's gradient, before it is clipped.",
        "`step_committed`", query="max by (run) (grad_norm)",
    ),
    Metric(
        "learning_rate", "gauge", "Training", "The learning rate of the newest step.", "`lr` of `step_committed`",
        query="max by (run) (learning_rate)",
    ),
    Metric(
        "step_duration_seconds", "histogram", "Training",
        "How long steps took, from commit to commit. The first step after a recovery has no time.",
        "`step_s` of `step_committed`", unit="seconds", buckets=STEP_BUCKETS_S,
        query="histogram_quantile(0.5, max by (run, le) (rate(step_duration_seconds_bucket[5m])))",
    ),
    Metric(
        "updates_skipped_total", "counter", "Training", "Committed steps whose update was not applied.",
        "`skipped` of `step_committed`", query="max by (run) (increase(updates_skipped_total[1h]))",
    ),
    # ---- workers
    Metric(
        "workers", "gauge", "Workers", "Living worker processes of the node.",
        "`worker_started`, `generation`, `failure_detected`, `worker_stopped`", {"state": WORKER_STATES},
        scope="node", now=True, query="sum by (run, state) (workers)", legend="{{run}} {{state}}",
    ),
    Metric(
        "world_size", "gauge", "Workers", "Members of the newest generation, of all nodes.", "`generation`", now=True,
        query="max by (run) (world_size)",
    ),
    Metric(
        "generation", "gauge", "Workers", "The number of the newest generation.", "`generation`",
        query="max by (run) (generation)",
    ),
    Metric(
        "lineage", "gauge", "Workers", "How often the run was restored after all workers had died, or went back.",
        "`lineage` of `step_committed`", query="max by (run) (lineage)",
    ),
    Metric(
        "slot_seconds", "gauge", "Workers", "How long each of its slots took a worker in its newest step.",
        "the boards of the workers", {"place": "the number of its place on the node"}, unit="seconds", scope="node",
        now=True, query="slot_seconds", legend="{{run}} {{node}} {{place}}",
    ),
    Metric(
        "worker_memory_bytes", "gauge", "Workers", "The memory that a worker process holds.",
        "`/proc/PID/statm` of the workers", {"place": "the number of its place on the node"}, unit="bytes",
        scope="node", now=True, query="worker_memory_bytes", legend="{{run}} {{node}} {{place}}",
    ),
    # ---- failures
    Metric(
        "time_seconds_total", "counter", "Failures",
        "Where the time went. It is counted when an event tells what it was for, so it may be late, and never falls.",
        "`t` of `run_started`, `waiting`, `generation`, `step_committed`, `run_finished`; `step_s`",
        {"state": TIMES}, unit="seconds",
        query='max by (run) (rate(time_seconds_total{state="productive"}[1h])) / '
        "sum by (run) (max by (run, state) (rate(time_seconds_total[1h])))",
    ),
    Metric(
        "failures_total", "counter", "Failures",
        "Failures by their code, and what followed from them by its own. Alarms and requests to leave do not count.",
        "`code` of all events but `incident` and `hang`, which tell of a failure again",
        {"code": "[codes](TROUBLESHOOTING.md)"}, scope="node",
        query="sum by (run, code) (increase(failures_total[1h])) > 0", legend="{{run}} {{code}}",
    ),
    Metric(
        "alarms_total", "counter", "Failures", "Alarms by their code: what ended nothing.",
        "`code` of `alarm`, `worker_slow`, `slot_retried`, `slot_declined`",
        {"code": "[codes](TROUBLESHOOTING.md)"}, scope="node",
        query="sum by (run, code) (increase(alarms_total[1h])) > 0", legend="{{run}} {{code}}",
    ),
    Metric(
        "recovery_seconds", "histogram", "Failures",
        "How long recoveries took, by their stages. Planned changes of the members are not among them.",
        "`stages`, `total_ms` and `t_noticed` of `recovery`; detect: since `t_detected` of `failure_detected`",
        {"stage": STAGES}, unit="seconds", buckets=STAGE_BUCKETS_S,
        query="histogram_quantile(0.95, max by (run, stage, le) (rate(recovery_seconds_bucket[1h])))",
        legend="{{run}} {{stage}}",
    ),
    Metric(
        "slots_recomputed_total", "counter", "Failures",
        "Slots that were computed again: of steps committed before a restore, or for want of memory.",
        "`step_committed` with `slots` of `run_configured`; `slot_retried`; `slot_declined`", {"reason": RECOMPUTED},
        query="sum by (run, reason) (increase(slots_recomputed_total[1h]))", legend="{{run}} {{reason}}",
    ),
    Metric(
        "audits_total", "counter", "Failures",
        "Comparisons of all workers that were asked for and agreed, and computations that were done again for doubt.",
        "`audited`; `outcome` of `recheck`", {"result": AUDITS},
        query="max by (run, result) (increase(audits_total[1h]))", legend="{{run}} {{result}}",
    ),
    Metric(
        "replica_mismatch_total", "counter", "Failures", "Workers that gave other bits than their peers.",
        "`evicted` and `run_finished` with a code EH-C…", query="max by (run) (increase(replica_mismatch_total[1h]))",
    ),
    Metric(
        "preemption_notices_total", "counter", "Failures", "Notices that the node will go.", "`source` of `drain`",
        {"source": SOURCES}, scope="node", query="sum by (run, source) (increase(preemption_notices_total[1h]))",
        legend="{{run}} {{source}}",
    ),
    # ---- checkpoints
    Metric(
        "checkpoints_saved_total", "counter", "Checkpoints", "Checkpoints that are safe, by where.",
        "`checkpoint_saved`, `checkpoint_uploaded`", {"tier": TIERS}, scope="node",
        query="max by (run, tier) (increase(checkpoints_saved_total[1h]))", legend="{{run}} {{tier}}",
    ),
    Metric(
        "checkpoint_age_seconds", "gauge", "Checkpoints", "How long ago the newest checkpoint was safe, by where.",
        "`t` of `checkpoint_saved` and `checkpoint_uploaded`", {"tier": TIERS}, unit="seconds", scope="node", now=True,
        query="min by (run, tier) (checkpoint_age_seconds)", legend="{{run}} {{tier}}",
    ),
    Metric(
        "checkpoint_duration_seconds", "gauge", "Checkpoints",
        "How long the newest checkpoint took until it was safe. Training did not wait for it.",
        "`seconds` of the same", {"tier": TIERS}, unit="seconds", scope="node",
        query="max by (run, tier) (checkpoint_duration_seconds)", legend="{{run}} {{tier}}",
    ),
    Metric(
        "checkpoint_size_bytes", "gauge", "Checkpoints", "The bytes that were written for the newest checkpoint.",
        "`bytes` of the same", {"tier": TIERS}, unit="bytes", scope="node",
        query="max by (run, tier) (checkpoint_size_bytes)", legend="{{run}} {{tier}}",
    ),
)  # fmt: skip
