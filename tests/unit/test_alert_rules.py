"""The alert rules, judged by promtool on made-up series: each fires when it should, and a healthy run is quiet."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_harness.metrics import alerts
from elastic_harness.metrics.table import PREFIX

PROMTOOL = os.environ.get("ELASTIC_HARNESS_PROMTOOL") or shutil.which("promtool")
MINUTES = 200
HEALTHY = {
    'run_state{run="r",state="running"}': "1x{n}",
    'run_state{run="r",state="failed"}': "0x{n}",
    'last_commit_timestamp_seconds{run="r"}': "0+60x{n}",
    'world_size{run="r"}': "8x{n}",
    'time_seconds_total{run="r",state="productive"}': "0+59x{n}",
    'time_seconds_total{run="r",state="recovery"}': "0+1x{n}",
    'failures_total{run="r",code="EH-W101"}': "0+0.01x{n}",
    'failures_total{run="r",code="EH-S101"}': "0x{n}",
    'step_duration_seconds_bucket{run="r",le="1"}': "0+50x{n}",
    'step_duration_seconds_bucket{run="r",le="2.5"}': "0+60x{n}",
    'step_duration_seconds_bucket{run="r",le="+Inf"}': "0+60x{n}",
    'loss{run="r"}': "2x{n}",
    'updates_skipped_total{run="r"}': "0x{n}",
    'replica_mismatch_total{run="r"}': "0x{n}",
    'checkpoint_age_seconds{run="r",tier="disk"}': "600x{n}",
    'preemption_notices_total{run="r",source="aws"}': "0x{n}",
}
ILL: dict[str, dict[str, str]] = {  # what is otherwise when each alert has to fire, at the end
    "TrainingStandsStill": {'last_commit_timestamp_seconds{run="r"}': "0+60x170 10200x30"},
    "RunFailed": {'run_state{run="r",state="failed"}': "0x190 1x10"},
    "WorkersAreMissing": {'world_size{run="r"}': "8x150 6x50"},
    "LittleEffectiveTime": {
        'time_seconds_total{run="r",state="productive"}': "0+40x{n}",
        'time_seconds_total{run="r",state="recovery"}': "0+20x{n}",
    },
    "WorkersFailOften": {'failures_total{run="r",code="EH-W101"}': "0+0.3x{n}"},
    "StepsAreSlower": {'step_duration_seconds_bucket{run="r",le="1"}': "0+50x140 7000x60"},
    "LossIsNotFinite": {'loss{run="r"}': "2x180" + 20 * " NaN"},
    "UpdatesAreSkipped": {'updates_skipped_total{run="r"}': "0+0.5x{n}"},
    "WorkerGaveOtherBits": {'replica_mismatch_total{run="r"}': "0x180 1x20"},
    "CheckpointIsOld": {'checkpoint_age_seconds{run="r",tier="disk"}': "600x60 600+60x140"},
    "CheckpointsFail": {'failures_total{run="r",code="EH-S101"}': "0x180 1x20"},
    "NodeHasNotice": {'preemption_notices_total{run="r",source="aws"}': "0x195 1x5"},
}


def case(series: dict[str, str], firing: set[str]) -> dict[str, Any]:
    inputs = [{"series": PREFIX + name, "values": of.replace("{n}", str(MINUTES))} for name, of in series.items()]
    queries = [{"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": f"{MINUTES}m"}]
    queries[0]["exp_samples"] = [  # type: ignore[assignment]
        {"labels": f'{{alertname="ElasticHarness{name}"}}', "value": 1} for name in sorted(firing)
    ]
    return {"interval": "1m", "input_series": inputs, "promql_expr_test": queries}


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here: name one in ELASTIC_HARNESS_PROMTOOL")
def test_each_alert_fires_when_it_should_and_a_healthy_run_is_quiet(tmp_path: Path) -> None:
    assert set(ILL) == {alert.name for alert in alerts.ALERTS}
    (tmp_path / "rules.yaml").write_text(alerts.rules())
    cases = [case(HEALTHY, set()), *(case({**HEALTHY, **ill}, {name}) for name, ill in ILL.items())]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": cases}))
    judged = subprocess.run([str(PROMTOOL), "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert judged.returncode == 0, judged.stdout + judged.stderr
