"""Workers that hang in every way: the right one is named, with all stacks, and the others train on to the exact end."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.harness import TrainingJob

pytestmark = pytest.mark.slow
STEPS = 10
LONG_S = 3.0  # a diagnosis takes 0.3 s at most, on a machine that has time for it
TRAINER = Path(__file__).with_name("hanging_trainer.py")
SETTINGS = ("elastic.progress_timeout_min_s=2",)
Train = Callable[..., TrainingJob]
Weights = Callable[[int], str]


def begin(train: Train, workers: int, **more: Any) -> TrainingJob:
    """A job whose workers have learned how long a slot takes."""
    job = train(workers, steps=STEPS, settings=SETTINGS, script=TRAINER, **more)
    job.fill()
    job.advance(3)
    return job


def sections(job: TrainingJob, hang: dict[str, Any]) -> dict[str, str]:
    """What the file about a hang has of each worker."""
    _, *parts = (job.run_dir / hang["stacks"]).read_text().split("=== ")
    return {part.split(",")[0]: part for part in parts}


def the_hang(job: TrainingJob, culprit: str, members: list[str]) -> dict[str, Any]:
    """The only hang of a job. Its event, its file and its incident name the culprit and nobody else."""
    job.until(lambda: job.events("incident"), "the incident")
    (hang,) = job.events("hang")
    assert hang["members"] == [culprit]
    others = sorted(set(members) - {culprit})
    assert hang["culprits"] == [{"verdict": "hangs", "members": [culprit], "waiters": others}], hang
    assert f"from {culprit}, which hangs: " in hang["why"][0] and "the header of step" in hang["why"][0]
    assert set(sections(job, hang)) == set(members), "the stacks of all workers"
    for other in others:
        evidence = sections(job, hang)[other]
        starved = re.search(rf"^thread {job.pid(other)} .*: state R", evidence, re.MULTILINE)  # on a loaded machine
        assert "in finish_exchange" in evidence or starved, "who waits is seen to wait"
    (incident,) = job.events("incident")
    assert culprit in incident["what"] and hang["why"][0] in incident["evidence"]
    assert any(hang["stacks"] in line for line in incident["evidence"])
    assert job.causes() == [hang["code"]] == [incident["code"]]
    assert hang["took_s"] < LONG_S, "the others wait meanwhile"
    return {**hang, "incident": incident}


@pytest.mark.parametrize(
    ("how", "function", "workers"),
    [("loop", "loop_for_ever", 3), ("lock", "keep_the_lock", 2), ("read", "read_from_nobody", 3)],
)
def test_a_worker_that_hangs_is_named_with_the_function_in_which_it_does(
    train: Train, undisturbed: Weights, how: str, function: str, workers: int
) -> None:
    job = begin(train, workers)
    members = job.status()["members"]
    job.fault(1, "slot.forward", how)
    hang = the_hang(job, members[1], members)
    assert f"in {function}" in sections(job, hang)[members[1]] and hang["code"] == "EH-H103"
    shown = [line for line in hang["incident"]["evidence"] if line.startswith("  File")]
    assert shown and f"in {function}" in shown[0], "the incident shows the innermost line of the user's code"
    job.finish(expected=undisturbed(STEPS))


def test_of_a_stopped_process_the_kernel_and_py_spy_tell(train: Train, undisturbed: Weights) -> None:
    job = begin(train, 3)
    members = job.status()["members"]
    assert job.signal_rank(1, signal.SIGSTOP) == members[1]
    job.allow(job.limit + 2)
    job.until(lambda: members[1] in job.failed(), "the stopped process to be noticed")
    job.settle()
    evidence = sections(job, the_hang(job, members[1], members))[members[1]]
    assert "the process is stopped" in evidence and "state T (stopped)" in evidence
    assert "by py-spy" in evidence and "in <module>" in evidence, "py-spy reads the memory of a stopped process"
    job.finish(expected=undisturbed(STEPS), victims=[members[1]])


def test_of_a_process_that_does_not_answer_the_kernel_tells(train: Train, undisturbed: Weights) -> None:
    """Nobody answers here. The culprit is named all the same, because who waits for whom is on the boards."""
    job = begin(train, 2, variables={"BLOCK_STACKS": "1"})
    members = job.status()["members"]
    job.fault(1, "slot.forward", "read")
    (hang,) = job.until(lambda: job.events("hang"), "the diagnosis")
    assert hang["culprits"] == [{"verdict": "hangs", "members": [members[1]], "waiters": [members[0]]}], hang
    assert 0.3 <= hang["took_s"] < LONG_S
    for member in members:
        evidence = sections(job, hang)[member]
        assert "did not answer within 0.3 s" in evidence and "state S (sleeping)" in evidence
    job.finish(expected=undisturbed(STEPS))
