"""A loss or gradient that is not finite, with real workers: nothing of it gets into the state, and it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_harness.checkpoint.disk.manifest import newest
from elastic_harness.errors import EXIT_INFRASTRUCTURE, EXIT_USER_CODE
from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.launch_tools import causes
from integration.script_tools import SCRIPTS, failing, finals, forked, launch, one_message, said

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "nonfinite.py"


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["event"] == name]


def skipped(run_dir: Path) -> list[int]:
    return [event["step"] for event in events(run_dir, "step_committed") if event.get("skipped")]


@pytest.mark.parametrize(
    ("kind", "steps", "faults"),
    [
        ("sample", [1, 7, 9], "apply.skipped member=w0-1 step=1 kill; apply.skipped member=w1-1 step=7 kill"),
        pytest.param(
            "scaled", [1, 7, 9], "apply.finished member=w0-1 step=1 kill; apply.finished member=w1-1 step=7 kill",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "gradient", [5], "slot.backward member=w0-1 step=1 kill; apply.skipped member=w1-1 step=5 kill",
            marks=pytest.mark.soak,
        ),
    ],
)  # fmt: skip
def test_skipped_updates_are_alike_whoever_dies(tmp_path: Path, kind: str, steps: list[int], faults: str) -> None:
    alone = forked(SCRIPT, kind, "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, said(alone)
    run_dir = tmp_path / "launched"
    options = ("--nproc-per-node", 2, "--spares", 1)
    ended = launch(run_dir, SCRIPT, kind, "--rejoin-at", 4, options=options, **failing(faults))
    assert ended.returncode == 0, said(ended)
    assert len(events(run_dir, "failure_detected")) == 2
    assert set(finals(ended.stdout)) == set(finals(alone.stdout)), said(ended)
    for folder in (run_dir, tmp_path / "alone"):
        verdict = verify(folder)
        assert verdict.ok and verdict.skipped == len(steps), verdict
        assert skipped(folder) == steps
    told = [event["what"] for event in events(run_dir, "incident") if "was skipped" in event["what"]]
    assert [what.partition(":")[0] for what in told] == [f"the update of step {step} was skipped" for step in steps]
    assert all("not finite" in what for what in told)
    if kind != "gradient":
        assert "17" in str([event["bad_samples"] for event in events(run_dir, "step_committed") if "skipped" in event])


def test_too_many_in_a_row_stop_the_job_and_what_was_before_is_kept(tmp_path: Path) -> None:
    """Also where the one who would have told of the last one dies; and a resume goes on counting."""
    run_dir = tmp_path / "launched"
    arguments = ("ever", "--max-in-a-row", 6, "--steps", 30)
    dying = failing("apply.finished member=w0-1 step=10 kill")
    ended = launch(run_dir, SCRIPT, *arguments, options=("--nproc-per-node", 2), **dying)
    assert ended.returncode == EXIT_USER_CODE, said(ended)
    assert "6 steps in a row, 5 to 10, were not finite" in one_message(ended)
    assert skipped(run_dir) == [5, 6, 7, 8, 9, 10] and verify(run_dir).ok
    found = newest(run_dir / "checkpoints")
    assert found[-1].step <= 5 < found[0].step, "keep_last is 1, but one from before stays"
    assert found[0].meta["nonfinite_since"] == 5
    again = launch(run_dir, SCRIPT, *arguments, options=("--nproc-per-node", 1))
    assert again.returncode == EXIT_USER_CODE, said(again)
    assert "6 steps in a row, 5 to 10, were not finite" in one_message(again)
    assert newest(run_dir / "checkpoints")[-1].step == found[-1].step


def test_without_an_agent_it_is_said_and_ends_the_same_way(tmp_path: Path) -> None:
    ended = forked(SCRIPT, "ever", "--run-dir", tmp_path, "--max-in-a-row", 2)
    assert ended.returncode == EXIT_USER_CODE
    assert "the update of step 5 was skipped: the loss of 6 of 6 slots" in one_message(ended)
    assert "error: the updates of 2 steps in a row, 5 to 6, were not finite" in ended.stderr
    assert skipped(tmp_path) == [5, 6]


def test_slots_are_left_out_alike_whoever_dies(tmp_path: Path) -> None:
    """Their samples are named, the others of the step count, and `verify` knows."""
    answer = ("--answer", "skip_slot")
    alone = forked(SCRIPT, "sample", *answer, "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, said(alone)
    run_dir = tmp_path / "launched"
    faults = "apply.finished member=w0-1 step=1 kill; slot.forward member=w1-1 step=7 kill"
    options = ("--nproc-per-node", 2, "--spares", 1)
    ended = launch(run_dir, SCRIPT, "sample", *answer, "--rejoin-at", 4, options=options, **failing(faults))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == set(finals(alone.stdout)), said(ended)
    for folder in (run_dir, tmp_path / "alone"):
        verdict = verify(folder)
        assert verdict.ok and (verdict.skipped, verdict.left_out) == (0, 3), verdict
        told = {e["step"]: e for e in events(folder, "step_committed") if "decisions" in e}
        assert list(told) == [1, 7, 9] and all("17" in str(e["bad_samples"]) for e in told.values())
    named = "1/2, 7/4, 9/1"
    listed = forked(SCRIPT, "sample", "--omit", named, "--run-dir", tmp_path / "omitted")
    assert set(finals(listed.stdout)) == set(finals(alone.stdout)), "to leave out at once is to omit from the start"
    verdict = verify(tmp_path / "omitted")
    assert verdict.ok and (verdict.left_out, verdict.omitted) == (0, 3), verdict
    again = forked(SCRIPT, "sample", "--omit", "2", "--run-dir", tmp_path / "omitted", "--steps", 12)
    assert f"run.omit: the run has '{named}', this process '2'" in one_message(again)
    other = forked(SCRIPT, "sample", "--run-dir", tmp_path / "alone", "--steps", 12)
    assert "health.on_nonfinite: the run has 'skip_slot'" in one_message(other)


def test_steps_are_omitted_alike_whoever_dies(tmp_path: Path) -> None:
    """Nobody computes a slot of them, also with a GradScaler, and in the first step."""
    arguments = ("scaled", "--omit", "0, 1/2, 3-4, 7/4, 9/1")
    alone = forked(SCRIPT, *arguments, "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, said(alone)
    run_dir = tmp_path / "launched"
    faults = "apply.skipped member=w0-1 step=3 kill; apply.finished member=w1-1 step=4 kill"
    options = ("--nproc-per-node", 2, "--spares", 1)
    ended = launch(run_dir, SCRIPT, *arguments, options=options, **failing(faults))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == set(finals(alone.stdout)), said(ended)
    for folder in (run_dir, tmp_path / "alone"):
        verdict = verify(folder)
        assert verdict.ok and (verdict.skipped, verdict.omitted) == (3, 21), verdict
        assert sorted(set(skipped(folder))) == [0, 3, 4]  # twice if both died before the spare had the state


@pytest.mark.parametrize(
    ("kind", "omitted", "rollbacks", "workers", "faults"),
    [
        ("sample", "1/2, 7/4, 9/1", [(1, "1/2"), (7, "7/4"), (9, "9/1")], 2, ""),
        ("spike", "6-9", [(6, "6-9")], 1, "rollback.decided member=w0-1 kill"),
        ("spike", "6-9", [(6, "6-9")], 3, "rollback.decided member=w0-1 kill; recovery.reconciled member=w3-1 kill"),
    ],
)
def test_a_run_that_goes_back_ends_as_one_that_omits_the_same_from_the_start(
    tmp_path: Path, kind: str, omitted: str, rollbacks: list[tuple[int, str]], workers: int, faults: str
) -> None:
    """On any number of workers, also if one dies when it has decided that and has told nobody, and another one on the
    way back. A worker that is alone comes to the same when it does the step again."""
    fresh = forked(SCRIPT, kind, "--omit", omitted, "--run-dir", tmp_path / "fresh")
    assert fresh.returncode == 0, said(fresh)
    run_dir = tmp_path / "launched"
    options = ("--nproc-per-node", workers)
    ended = launch(run_dir, SCRIPT, kind, "--answer", "rollback", options=options, **failing(faults))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == set(finals(fresh.stdout)), said(ended)
    told = events(run_dir, "rollback")
    assert [(event["to"], event["omitted"]) for event in told] == rollbacks
    assert told[-1]["omitted_in_all"] == omitted
    assert [e["step"] for e in events(run_dir, "rollback_decided")] == ([8] if kind == "spike" else [1, 7, 9])
    if workers == 1:  # of several, the agent may have let go of it before it dies
        assert len(events(run_dir, "failure_detected")) == 1
    verdict, same = verify(run_dir), verify(tmp_path / "fresh")
    assert verdict.ok and same.ok, verdict
    assert (verdict.omitted, verdict.skipped) == (same.omitted, same.skipped) and verdict.lineage > 0


def test_a_lower_learning_rate_is_alike_whoever_dies(tmp_path: Path) -> None:
    """Also of who replays such a step, and of who joins in the middle. Steps are as many, and so is the schedule."""
    answer = ("spike", "--answer", "lower_lr")
    alone = forked(SCRIPT, *answer, "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, said(alone)
    faults = failing("apply.finished member=w0-1 step=8 kill")
    ended = launch(tmp_path / "launched", SCRIPT, *answer, options=("--nproc-per-node", 2), **faults)
    assert ended.returncode == 0 and set(finals(ended.stdout)) == set(finals(alone.stdout)), said(ended)
    committed = {event["step"]: event for event in events(tmp_path / "launched", "step_committed")}
    lowered = {step: event["decisions"][0] for step, event in committed.items() if "decisions" in event}
    assert list(lowered) == [8, 9] and lowered[8]["lr_scale"] == 0.1
    assert committed[8]["lr"] < committed[9]["lr"] < committed[7]["lr"], "though the schedule is still rising"
    verdict = verify(tmp_path / "launched")
    assert verdict.ok and verdict.scaled == 2, verdict


def test_rollbacks_that_do_not_help_end_the_job(tmp_path: Path) -> None:
    """Every loss is infinite from a step on, whatever is omitted."""
    ended = launch(tmp_path, SCRIPT, "ever", "--answer", "rollback", "--steps", 30, options=("--nproc-per-node", 2))
    assert ended.returncode == EXIT_USER_CODE, said(ended)
    assert "It would be rollback 3 in a row, because of the steps 3 … 10" in one_message(ended)
    assert [event["omitted"] for event in events(tmp_path, "rollback")] == ["3-6", "5-8"]
    assert causes(tmp_path) == ["EH-N106", "EH-N106", "EH-N106 → EH-N108"]


def test_without_an_agent_the_next_start_goes_back(tmp_path: Path) -> None:
    arguments = ("spike", "--answer", "rollback", "--run-dir", tmp_path / "run")
    ended = forked(SCRIPT, *arguments)
    assert ended.returncode == EXIT_INFRASTRUCTURE, said(ended)
    assert "error: going back to version 6: in step 8 the loss is" in one_message(ended)
    assert "6-9 is omitted from now on. This process ends; started again, it goes on from there" in ended.stderr
    again = forked(SCRIPT, *arguments)
    fresh = forked(SCRIPT, "spike", "--omit", "6-9", "--run-dir", tmp_path / "fresh")
    assert again.returncode == 0 and finals(again.stdout) == finals(fresh.stdout), said(again)
    assert verify(tmp_path / "run").omitted == 24


def test_the_first_update_that_is_not_finite_may_end_the_run(tmp_path: Path) -> None:
    ended = launch(tmp_path, SCRIPT, "sample", "--answer", "fail", options=("--nproc-per-node", 2))
    assert ended.returncode == EXIT_USER_CODE, said(ended)
    assert "in step 1 the loss of 1 of 6 slots is not finite" in one_message(ended)
    assert [event["outcome"] for event in events(tmp_path, "recheck")] == ["same"]
    assert causes(tmp_path) == ["EH-N107"]
