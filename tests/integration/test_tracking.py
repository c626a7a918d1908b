"""What follows a run from beside it, while its workers are killed: one curve without gaps and overlaps, and metrics
that say what the ledger says."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic_harness.runs.verify import verify
from integration.launch_tools import SOURCE
from integration.script_tools import failing, launch, said

pytestmark = pytest.mark.slow
EXAMPLES = SOURCE.parent / "examples"
STEPS = 30


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that loses rank 0, and later all of its workers at once."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    rules = "slot.backward member=w0-1 step=7 kill; slot.backward member=w1-1 step=25 kill; "
    rules += "slot.backward member=w0-2 step=25 kill"
    options = ("--nproc-per-node", 2, "--track", "tensorboard", "--metrics-file", folder.with_name("run.prom"))
    ended = launch(folder, EXAMPLES / "own_loop.py", "--steps", STEPS, options=options, **failing(rules))
    assert ended.returncode == 0, said(ended)
    return folder


def test_tensorboard_shows_one_curve(run_dir: Path) -> None:
    curve = EventAccumulator(str(run_dir / "tracking" / "tensorboard"), size_guidance={"scalars": 0})
    curve.Reload()
    assert [event.step for event in curve.Scalars("loss")] == list(range(STEPS))


def test_metrics_say_what_the_ledger_says(run_dir: Path) -> None:
    families = text_string_to_metric_families(run_dir.with_name("run.prom").read_text())
    samples = [sample for family in families for sample in family.samples]
    values = {(s.name.removeprefix("elastic_harness_"), *s.labels.values()): s.value for s in samples}
    verdict = verify(run_dir)
    assert verdict.ok and values["run_state", "run", "finished"] == 1
    assert values["steps_committed_total", "run"] == verdict.steps == STEPS
    assert values["samples_total", "run"] == verdict.samples, "the last step of an epoch has fewer"
    again = values["steps_recommitted_total", "run"]
    assert again == 5 and values["slots_recomputed_total", "run", "restored"] == 16 * again, "from 25 back to 20"
    assert values["failures_total", "run", "EH-W101"] == 3 and values["lineage", "run"] == 1
    spent = {state: value for (name, _, state), value in
             ((key, value) for key, value in values.items() if key[0] == "time_seconds_total")}  # fmt: skip
    assert spent["productive"] > 0 and spent["replay"] > 0 and spent["recovery"] + spent["waiting"] > 0
    assert ("workers", "run", "training") not in values, "nobody lives any more"
