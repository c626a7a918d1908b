"""Everything a training script may use: killed in mid-step, joined in mid-run, and not a bit of its state differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.script_tools import SCRIPTS, failing, finals, forked, launch, said

pytestmark = pytest.mark.slow
FEATURES = SCRIPTS / "features.py"
REJOIN_AT = 4


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        pytest.param(
            "plain", "slot.backward member=w1-1 step=1 kill", "exchange.gathered_sent member=w0-1 step=6 kill",
            marks=pytest.mark.soak,
        ),
        ("convolution", "slot.backward member=w1-1 step=1 kill", "apply.optimizer member=w0-1 step=6 kill"),
        pytest.param(
            "text", "exchange.posted member=w0-1 step=1 kill", "exchange.gathered_sent member=w1-1 step=6 kill",
            marks=pytest.mark.soak,
        ),
        ("scaled", "slot.backward member=w1-1 step=1 kill", "exchange.gathered_sent member=w0-1 step=6 kill"),
        ("unfreezing", "slot.backward member=w1-1 step=1 kill", "apply.optimizer member=w0-1 step=6 kill"),
        ("mixed", "slot.backward member=w1-1 step=2 kill", "apply.gradients member=w0-1 step=6 kill"),
    ],
)  # fmt: skip
def test_state_after_kills_and_joins_is_that_of_one_worker(
    tmp_path: Path, case: str, first: str, second: str
) -> None:
    alone = forked(FEATURES, case, "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, said(alone)
    expected = finals(alone.stdout)
    assert len(expected) == 2

    run_dir = tmp_path / "launched"
    ended = launch(
        run_dir,
        FEATURES,
        *(case, "--rejoin-at", REJOIN_AT),
        options=("--nproc-per-node", 3, "--spares", 1),
        **failing(f"{first}; {second}"),
    )
    assert ended.returncode == 0, said(ended)
    events = list(read_events(run_dir / "events.jsonl"))
    assert [e["signal"] for e in events if e["event"] == "failure_detected"] == ["SIGKILL", "SIGKILL"]
    joined = [e for e in events if e["event"] == "worker_joined" and e.get("source") == "state"]
    assert any(e["version"] > 0 for e in joined), "nobody took over the state of a running job"
    reasons = [e["reason"] for e in events if e["event"] == "generation"]
    assert sum("lost" in reason for reason in reasons) == 2, reasons
    assert any("joined" in reason for reason in reasons[1:]), reasons
    reached = finals(ended.stdout)
    assert len(reached) >= 2 * 2 and set(reached) == set(expected), said(ended)
    for folder in (run_dir, tmp_path / "alone"):
        assert verify(folder).ok, verify(folder)
    verdict = verify(run_dir)
    assert verdict.handovers == len(joined) and not verdict.unproven, verdict


@pytest.mark.parametrize("case", [pytest.param("convolution", marks=pytest.mark.soak), "mixed", "scaled"])
def test_state_after_a_restored_checkpoint_is_that_of_one_worker(tmp_path: Path, case: str) -> None:
    """All die at once; what user code changed between the steps is in the checkpoint as well."""
    alone = forked(FEATURES, case, "--run-dir", tmp_path / "alone")
    ended = launch(
        tmp_path / "launched",
        FEATURES,
        *(case, "--checkpoint-every", 3),
        options=("--nproc-per-node", 2),
        **failing("apply.gradients member=w0-1 step=7 kill; apply.gradients member=w1-1 step=7 kill"),
    )
    assert ended.returncode == 0, said(ended)
    assert set(finals(ended.stdout)) == set(finals(alone.stdout)), said(ended)
    verdict = verify(tmp_path / "launched")
    assert verdict.ok and verdict.lineage == 1, verdict
    assert verdict.handovers >= 2 and not verdict.unproven, verdict
