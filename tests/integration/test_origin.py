"""A run that begins from another: the other's state under other settings, and proven back to its start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.script_tools import SCRIPTS, failing, forked, launch, one_message, said

pytestmark = pytest.mark.slow
SETTINGS = SCRIPTS / "settings.py"


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["event"] == name]


def weights(run_dir: Path) -> str:
    return str(events(run_dir, "run_finished")[-1]["weights_sha256"])


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Eight steps, with checkpoints of versions 3, 6 and 8."""
    folder = tmp_path_factory.mktemp("first") / "run"
    ended = forked(SETTINGS, "--run-dir", folder)
    assert ended.returncode == 0, said(ended)
    yield folder


def test_the_same_settings_give_the_same_weights(first: Path, tmp_path: Path) -> None:
    ended = forked(SETTINGS, "--run-dir", tmp_path, "--resume-from", f"{first}@6")
    assert ended.returncode == 0, said(ended)
    assert weights(tmp_path) == weights(first)


def test_another_batch_and_rate_go_on_from_the_state_through_the_death_of_all(first: Path, tmp_path: Path) -> None:
    """Killed before it has a checkpoint of its own, it begins from the other run once more; the one that never failed
    is the reference."""
    other = ("--steps", 10, "--lr", 0.05, "--batch", 12, "--every", 100)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    ended = forked(SETTINGS, *other, "--run-dir", undisturbed, "--resume-from", f"{first}@6")
    assert ended.returncode == 0, said(ended)
    rules = "slot.backward member=w0-1 step=8 kill; slot.backward member=w1-1 step=8 kill"
    ended = launch(
        disturbed, SETTINGS, *other, options=("--nproc-per-node", 2, "--from", f"{first}@6"), **failing(rules)
    )
    assert ended.returncode == 0, said(ended)
    assert weights(disturbed) == weights(undisturbed)
    steps = events(undisturbed, "step_committed")
    assert [event["step"] for event in steps] == [6, 7, 8, 9]
    assert steps[0]["lr"] == pytest.approx(0.05 * 0.5**3), "its own rate, where the schedule has it after six steps"
    (configured,) = events(undisturbed, "run_configured")
    assert (configured["first_step"], configured["first_position"]) == (6, 48), "of 50 samples 48 were read"
    for folder in (undisturbed, disturbed):
        verdict = verify(folder)
        assert verdict.ok and verdict.steps == 4, verdict
        assert verdict.before is not None and verdict.before.steps == 6


def test_weights_alone_begin_at_step_zero(first: Path, tmp_path: Path) -> None:
    ended = forked(SETTINGS, "--steps", 2, "--run-dir", tmp_path, "--resume-from", first, "--weights-only")
    assert ended.returncode == 0, said(ended)
    losses = [event["loss"] for event in events(tmp_path, "step_committed")]
    beginning = [event["loss"] for event in events(first, "step_committed")][:2]
    assert len(losses) == 2 and losses[0] < beginning[0], "the same samples, known already"
    verdict = verify(tmp_path)
    assert verdict.ok and verdict.origin == f"{first}@8" and verdict.before is not None


def test_a_run_that_began_elsewhere_is_resumed_without_its_origin(first: Path, tmp_path: Path) -> None:
    origin, run = tmp_path / "origin", tmp_path / "run"
    shutil.copytree(first, origin)
    ended = forked(SETTINGS, "--run-dir", run, "--resume-from", f"{origin}@3", **failing("apply.finished step=7 kill"))
    assert ended.returncode == -9, said(ended)
    shutil.rmtree(origin)
    ended = forked(SETTINGS, "--run-dir", run)
    assert ended.returncode == 0, said(ended)
    assert weights(run) == weights(first)
    verdict = verify(run)
    assert verdict.ok and verdict.before is None and "not at hand" in str(verdict)


def test_without_any_state_left_it_does_not_begin_with_random_weights(first: Path, tmp_path: Path) -> None:
    origin, run = tmp_path / "origin", tmp_path / "run"
    shutil.copytree(first, origin)
    ended = forked(SETTINGS, "--run-dir", run, "--resume-from", f"{origin}@3", **failing("slot.forward step=3 kill"))
    assert ended.returncode == -9, said(ended)
    shutil.rmtree(origin)
    ended = forked(SETTINGS, "--run-dir", run)
    assert ended.returncode == 4
    assert "is not there any more" in one_message(ended)


def test_what_cannot_be_begun_from_is_said(first: Path, tmp_path: Path) -> None:
    ended = forked(SETTINGS, "--run-dir", tmp_path / "a", "--resume-from", f"{first}@5")
    assert ended.returncode == 2 and "no checkpoint of version 5; it has 3, 6, 8" in one_message(ended)
    ended = forked(SETTINGS, "--run-dir", first, "--resume-from", first)
    assert ended.returncode == 2 and "has trained already" in one_message(ended)
    ended = forked(SETTINGS, "--run-dir", first, "--lr", 0.2)
    message = one_message(ended)
    assert ended.returncode == 2
    assert "optimizer.lr: the run has '0.1', this process '0.2'" in message and "resume_from=" in message
