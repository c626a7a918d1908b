"""An update policy of the user's own, with real workers that die while it decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.errors import EXIT_CONFIG, EXIT_USER_CODE
from elastic_harness.runs.events import read_events
from elastic_harness.runs.ledger import read_ledger
from elastic_harness.runs.verify import verify
from integration.script_tools import SCRIPTS, failing, finals, forked, launch, one_message, said

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "own_policy.py"


def decisions(run_dir: Path) -> dict[int, list[Any]]:
    lines = read_ledger(run_dir / "ledger.jsonl").followed()
    return {step: list(line.decisions) for step, line in lines.items() if line.decisions}


def test_a_policy_decides_alike_whoever_dies(tmp_path: Path) -> None:
    """One worker dies in a scaled update and one in a skipped one; another joins, and takes the policy's state over."""
    alone = forked(SCRIPT, "spikes", "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, said(alone)
    expected = decisions(tmp_path / "alone")
    scaled = min(expected)
    assert expected[9][0]["verdict"] == "skip" and expected[scaled][0]["verdict"] == "scale" and scaled < 9, expected
    faults = f"apply.gradients member=w0-1 step={scaled} kill; apply.skipped member=w1-1 step=9 kill"
    run_dir, options = tmp_path / "launched", ("--nproc-per-node", 2, "--spares", 1)
    ended = launch(run_dir, SCRIPT, "spikes", "--rejoin-at", scaled + 1, options=options, **failing(faults))
    assert ended.returncode == 0, said(ended)
    assert set(finals(ended.stdout)) == set(finals(alone.stdout)), said(ended)
    assert decisions(run_dir) == expected
    told = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "step_committed"]
    assert {event["step"]: event["decisions"] for event in told if "decisions" in event} == expected
    verdict = verify(run_dir)
    assert verdict.ok and (verdict.skipped, verdict.scaled) == (1, len(expected) - 1), verdict
    shown = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "incident"]
    assert any(event["what"].startswith(f"the update of step {scaled} was scaled by 0.") for event in shown), shown
    assert "None" not in str([event["evidence"] for event in shown]), "without clipping no norm is told"


def test_a_resumed_run_goes_on_with_its_state_and_refuses_other_settings(tmp_path: Path) -> None:
    whole = forked(SCRIPT, "spikes", "--run-dir", tmp_path / "whole")
    first = forked(SCRIPT, "spikes", "--run-dir", tmp_path / "halves", **failing("slot.forward step=7 kill"))
    assert first.returncode != 0
    other = forked(SCRIPT, "spikes", "--run-dir", tmp_path / "halves", "--times", 3)
    assert other.returncode == EXIT_CONFIG and "policy.tame_spikes.times" in one_message(other)
    second = forked(SCRIPT, "spikes", "--run-dir", tmp_path / "halves")
    assert second.returncode == 0, said(second)
    assert finals(second.stdout) == finals(whole.stdout)
    assert decisions(tmp_path / "halves") == decisions(tmp_path / "whole")


def test_a_policy_stops_the_run_for_all(tmp_path: Path) -> None:
    ended = launch(tmp_path, SCRIPT, "stop", options=("--nproc-per-node", 2))
    assert ended.returncode == EXIT_USER_CODE, said(ended)
    assert "enough is known" in one_message(ended)
    assert max(read_ledger(tmp_path / "ledger.jsonl").followed()) == 6
    finished = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "run_finished"]
    assert finished[-1]["status"] == "failed" and "enough is known" in json.dumps(finished[-1])


def test_a_policy_that_differs_between_workers_is_named(tmp_path: Path) -> None:
    ended = launch(tmp_path, SCRIPT, "rank", options=("--nproc-per-node", 3))
    shown = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "incident"]
    assert any("states of policies" in json.dumps(event) for event in shown), said(ended)


def test_spikes_are_skipped_alike_whoever_dies(tmp_path: Path) -> None:
    """One worker dies in a skipped update. A spare joins in the middle of the window, and takes it over."""
    options = ("--steps", 16)
    alone = forked(SCRIPT, "health", *options, "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, said(alone)
    expected = decisions(tmp_path / "alone")
    assert len(expected) > 1 and all(each[0]["policy"] == "spikes" for each in expected.values()), expected
    first = min(expected)
    run_dir = tmp_path / "launched"
    ended = launch(
        run_dir, SCRIPT, "health", *options, options=("--nproc-per-node", 2, "--spares", 1),
        **failing(f"apply.skipped member=w1-1 step={first} kill"),
    )  # fmt: skip
    assert ended.returncode == 0, said(ended)
    assert set(finals(ended.stdout)) == set(finals(alone.stdout)), said(ended)
    assert decisions(run_dir) == expected
    joined = [each for each in read_events(run_dir / "events.jsonl") if each["event"] == "worker_joined"]
    assert any(0 < each["version"] <= max(expected) for each in joined), joined
    verdict = verify(run_dir)
    assert verdict.ok and verdict.skipped == len(expected), verdict
    backtest = forked("-m", "elastic_harness", "health", "backtest", run_dir, "--window", 8, "--sigmas", 3, "--json")
    assert backtest.returncode == 0, said(backtest)
    (rule,) = json.loads(backtest.stdout)["rules"]
    assert set(map(int, rule["steps"])) <= set(expected), "the backtest knows no norm here: there is no clipping"
    plain, watched, own = tmp_path / "plain", tmp_path / "watched", tmp_path / "own"
    ended = launch(plain, SCRIPT, "none", "--steps", 18, options=("--nproc-per-node", 1, "--from", run_dir))
    assert ended.returncode == 0, said(ended)
    ended = launch(watched, SCRIPT, "health", "--steps", 20, options=("--nproc-per-node", 1, "--from", plain))
    assert ended.returncode == 0, said(ended)
    ended = launch(own, SCRIPT, "spikes", "--steps", 22, options=("--nproc-per-node", 1, "--from", watched))
    assert ended.returncode == 0, said(ended)
    ended = launch(tmp_path / "last", SCRIPT, "none", "--steps", 24, options=("--nproc-per-node", 1, "--from", own))
    assert ended.returncode == 0, f"the refusal of other policies advises --from: {said(ended)}"
