"""A machine that computes wrong, with real workers: it is named and sent away, and the weights are right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from elastic_harness.errors import EXIT_INFRASTRUCTURE
from elastic_harness.runs.events import read_events
from elastic_harness.runs.verify import verify
from integration.launch_tools import causes
from integration.script_tools import SCRIPTS, failing, finals, forked, launch, one_message, said

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "ill.py"
ALWAYS = ("--times", 1000)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The final state without a fault."""
    ended = forked(SCRIPT, "none", "--run-dir", tmp_path_factory.mktemp("healthy"))
    assert ended.returncode == 0, said(ended)
    return set(finals(ended.stdout))


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["event"] == name]


def evicted(run_dir: Path) -> list[str]:
    whats = [event["what"] for event in events(run_dir, "incident")]
    return [what.split()[1] for what in whats if "computed again" in what or "differs from" in what]


@pytest.mark.parametrize(
    ("fault", "workers", "options"),
    [
        ("nan", 3, ALWAYS),
        ("gradient", 3, ()),
        ("gradient", 3, ALWAYS),
        ("spike", 2, ()),  # of two, the one that contradicts itself
    ],
)
def test_what_stands_out_is_computed_again_in_the_same_step(
    tmp_path: Path, healthy: set[str], fault: str, workers: int, options: tuple[object, ...]
) -> None:
    ended = launch(tmp_path, SCRIPT, fault, *options, options=("--nproc-per-node", workers))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    (recheck,) = events(tmp_path, "recheck")
    assert (recheck["step"], recheck["outcome"], recheck["ill"]) == (7, "ill", ["w1-1"]), recheck
    assert evicted(tmp_path) == ["w1-1"] and causes(tmp_path) == ["EH-C101"]
    verdict = verify(tmp_path)
    assert verdict.ok and verdict.skipped == 0 and verdict.lineage == 0, verdict


@pytest.mark.parametrize(
    ("fault", "workers", "options", "back_to", "named"),
    [
        ("bit", 3, (*ALWAYS, "--audit-interval", 5), 4, ["w1-1"]),
        ("memory", 3, (), 5, ["w1-1"]),
        ("memory", 2, (), 5, []),  # nobody knows which of the two, and both take the state from before
    ],
)
def test_what_was_committed_in_doubt_is_done_again(
    tmp_path: Path,
    healthy: set[str],
    fault: str,
    workers: int,
    options: tuple[object, ...],
    back_to: int,
    named: list[str],
) -> None:
    """An audit, or the comparison of states, finds the fault some steps later."""
    ended = launch(tmp_path, SCRIPT, fault, *options, options=("--nproc-per-node", workers))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    (rollback,) = events(tmp_path, "rollback")
    assert rollback["to"] == back_to and not set(named) & set(rollback["members"]), rollback
    assert evicted(tmp_path) == named
    assert causes(tmp_path) == ["EH-C101 → EH-C102" if named else "EH-C102"]
    verdict = verify(tmp_path)
    assert verdict.ok and verdict.lineage == 2, verdict


@pytest.mark.parametrize(
    ("workers", "options", "back_to"), [(3, (*ALWAYS, "--audit-interval", 5), 4), (2, ("--audit-interval", 1), 6)]
)
def test_who_adds_up_wrong_is_named(
    tmp_path: Path, healthy: set[str], workers: int, options: tuple[object, ...], back_to: int
) -> None:
    """All members apply the same wrong sum, so no comparison of states shows it."""
    ended = launch(tmp_path, SCRIPT, "sum", *options, options=("--nproc-per-node", workers))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    (recheck,), (rollback,) = events(tmp_path, "recheck"), events(tmp_path, "rollback")
    assert recheck["what"].startswith("elements 0-") and recheck["outcome"] == "ill", recheck
    assert evicted(tmp_path) == recheck["ill"] and len(recheck["ill"]) == 1
    assert rollback["to"] == back_to and verify(tmp_path).ok


PART_OF_A_SUM = ("sum", "--block", 512, "--audit-interval", 1, "--times", 1000)


def test_since_when_a_part_of_a_sum_is_wrong_nobody_knows(tmp_path: Path, healthy: set[str]) -> None:
    """The wrong element is in a block that the audits of steps 7 to 9 do not draw. That they found nothing proves
    nothing about it, so all that was committed is in doubt."""
    ended = launch(tmp_path, SCRIPT, *PART_OF_A_SUM, options=("--nproc-per-node", 3))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    (recheck,), (rollback,) = events(tmp_path, "recheck"), events(tmp_path, "rollback")
    assert (recheck["step"], recheck["outcome"], rollback["to"]) == (10, "ill", 0), recheck
    assert evicted(tmp_path) == recheck["ill"]


def test_a_long_run_that_is_in_doubt_from_its_beginning_is_not_begun_again(tmp_path: Path) -> None:
    """That may cost weeks, and is for people to decide."""
    late = ("--from-step", 70, "--steps", 90)
    ended = launch(tmp_path, SCRIPT, *PART_OF_A_SUM, *late, options=("--nproc-per-node", 3))
    assert ended.returncode == EXIT_INFRASTRUCTURE and not finals(ended.stdout), said(ended)
    assert "in doubt since version 0, and no checkpoint from before is left" in said(ended)


def test_workers_that_die_in_an_audit_are_replaced(tmp_path: Path, healthy: set[str]) -> None:
    faults = "audit.blocks_sent member=w0-1 step=4 kill; audit.added_up member=w2-1 step=6 kill"
    options = ("--nproc-per-node", 3)
    ended = launch(tmp_path, SCRIPT, "none", "--audit-interval", 1, options=options, **failing(faults))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    assert [event["member"] for event in events(tmp_path, "failure_detected")] == ["w0-1", "w2-1"]
    assert not evicted(tmp_path) and not events(tmp_path, "recheck") and verify(tmp_path).ok


def test_a_message_that_is_damaged_on_its_way_is_sent_again(tmp_path: Path, healthy: set[str]) -> None:
    ended = launch(tmp_path, SCRIPT, "wire", options=("--nproc-per-node", 3))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    assert len(events(tmp_path, "generation")) == 2 and not events(tmp_path, "failure_detected")
    assert any("damaged on its way" in broke["error"] for broke in events(tmp_path, "exchange_broke"))
    assert set(causes(tmp_path)) == {"EH-L101"}
    assert verify(tmp_path).ok


def test_two_that_stay_with_what_they_say_end_the_job(tmp_path: Path) -> None:
    ended = launch(tmp_path, SCRIPT, "nan", *ALWAYS, options=("--nproc-per-node", 2))
    assert ended.returncode == EXIT_INFRASTRUCTURE, said(ended)
    assert "no majority says who is right" in ended.stdout, said(ended)
    assert causes(tmp_path) == ["EH-C103"]


def test_a_run_without_a_checkpoint_from_before_a_doubt_is_not_begun_again(tmp_path: Path) -> None:
    """Not at the next launch either: that may cost weeks, and is for people to decide."""
    options = ("--nproc-per-node", 1)
    ended = launch(tmp_path, SCRIPT, "none", "--steps", 6, options=options)
    assert ended.returncode == 0, said(ended)
    path = tmp_path / "run.json"
    record = json.loads(path.read_text()) | {"lineage": 1, "from_step": 3, "doubts": [[1, 3]]}
    path.write_text(json.dumps(record))
    shutil.rmtree(tmp_path / "checkpoints")
    for _ in range(2):
        ended = launch(tmp_path, SCRIPT, "none", options=options)
        assert ended.returncode == EXIT_INFRASTRUCTURE, said(ended)
        assert "in doubt since version 3, and no checkpoint from before is left" in one_message(ended)
    path.write_text(json.dumps(record | {"doubts": [["x", 3]]}))
    ended = launch(tmp_path, SCRIPT, "none", options=options)
    assert ended.returncode == EXIT_INFRASTRUCTURE and "run.json is damaged" in one_message(ended)


def test_without_an_agent_a_restart_goes_back_as_well(tmp_path: Path, healthy: set[str]) -> None:
    """Under torchrun, which starts both workers again: the newest checkpoint is in doubt then, and is not taken."""
    arguments = ("memory", "--run-dir", tmp_path / "run", "--first-life-only")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    ended = forked(*torchrun, "--log-dir", tmp_path / "torchrun", SCRIPT, *arguments)
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    (rollback,) = events(tmp_path / "run", "rollback")
    assert rollback["to"] == 5 and "going back to version 5" in ended.stderr


def test_a_worker_dies_while_others_compute_again(tmp_path: Path, healthy: set[str]) -> None:
    """The two that are left are not of one mind then, but one of them contradicts itself."""
    faults = "recheck.computed member=w2-1 kill; apply.finished member=w0-1 step=8 kill"
    ended = launch(tmp_path, SCRIPT, "gradient", options=("--nproc-per-node", 3, "--spares", 1), **failing(faults))
    assert ended.returncode == 0 and set(finals(ended.stdout)) == healthy, said(ended)
    assert evicted(tmp_path) == ["w1-1"] and len(events(tmp_path, "failure_detected")) >= 2


@pytest.mark.parametrize(
    ("fault", "options"), [("nan", ()), ("gradient", ()), ("spike", ()), ("bit", ALWAYS), ("memory", ()), ("sum", ())]
)
def test_without_its_detector_a_fault_gets_through(
    tmp_path: Path, healthy: set[str], fault: str, options: tuple[object, ...]
) -> None:
    ended = launch(tmp_path, SCRIPT, fault, "--blind", *options, options=("--nproc-per-node", 3))
    assert set(finals(ended.stdout)).isdisjoint(healthy), said(ended)
