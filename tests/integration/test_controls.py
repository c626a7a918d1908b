"""Would the other tests notice? Each of these breaks one promise on purpose, and demands that the check which guards it
fails."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_harness.errors import EXIT_OTHER_BITS
from elastic_harness.runs.verify import verify
from integration.harness import TrainingJob
from integration.launch_tools import command, environment, run

pytestmark = pytest.mark.slow
Start = Callable[..., TrainingJob]
Weights = Callable[[int], str]
BROKEN = Path(__file__).with_name("broken_trainer.py")
PLAIN = Path(__file__).with_name("plain_ddp.py")
STEPS = 12


@pytest.fixture
def broken(train: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A job of the trainer with this defect."""

    def begin(defect: str, workers: int, *options: object) -> TrainingJob:
        monkeypatch.setenv("BROKEN", defect)
        return train(workers, *options, steps=STEPS, script=BROKEN)

    return begin


@pytest.mark.soak
def test_plain_ddp_depends_on_the_number_of_workers(tmp_path: Path) -> None:
    hashes = {}
    for name, workers in (("one", 1), ("again", 1), ("three", 3)):
        done = run("launch", "--nproc-per-node", workers, "--run-dir", tmp_path / name, PLAIN, tmp_path / f"{name}.txt")
        assert done.returncode == 0, done.stdout + done.stderr
        hashes[name] = (tmp_path / f"{name}.txt").read_text()
    assert hashes["one"] == hashes["again"] != hashes["three"]


@pytest.mark.soak
def test_another_order_of_additions_gives_other_weights(broken: Start, undisturbed: Weights) -> None:
    job = broken("order_of_additions_depends_on_the_number_of_workers", 3)
    job.fill()
    with pytest.raises(AssertionError, match="not the weights of the undisturbed run"):
        job.finish(expected=undisturbed(STEPS))


def test_other_threads_are_refused(broken: Start) -> None:
    job = broken("two_threads", 2)
    refused = job.until_event("incident")
    assert "threads" in refused["what"] + " ".join(refused["evidence"]), refused
    job.process.terminate()
    assert job.wait() != 0


def test_wrong_arithmetic_is_refused(broken: Start, undisturbed: Weights) -> None:
    """The worker whose canary differs is sent away; the others' weights are right."""
    job = broken("wrong_arithmetic", 3)
    job.until(lambda: job.ready() == 3, "3 ready workers")
    job.allow(1 << 30)
    assert job.wait() == 0, job.output
    assert job.events("run_finished")[-1]["weights_sha256"] == undisturbed(STEPS)
    (incident,) = job.events("incident")
    assert "canary" in incident["what"] + " ".join(incident["evidence"]), incident


@pytest.mark.parametrize("defect", ["wrong_arithmetic_and_no_gate", "none"])
def test_an_audit_on_request_finds_who_differs(broken: Start, undisturbed: Weights, defect: str) -> None:
    """Without it the run would end with other weights, as the next test shows."""
    job = broken(defect, 3)
    job.fill()
    with subprocess.Popen(
        command("audit", job.run_dir), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as audit:
        job.until(lambda: audit.poll() is not None or job.status().get("audit_asked"), "the request")
        while audit.poll() is None:
            job.allow(min(job.committed() + 1, STEPS - 2))  # so that the run does not end before the answer
            time.sleep(0.05)
        said, _ = audit.communicate(timeout=60)
    assert audit.returncode == (EXIT_OTHER_BITS if defect != "none" else 0), said
    assert ("workers agree in all bits" in said) and ("differed: lanes" in said) == (defect != "none"), said
    job.allow(1 << 30)
    assert job.wait() == 0, job.output
    assert job.events("run_finished")[-1]["weights_sha256"] == undisturbed(STEPS)
    assert bool(job.events("rollback")) == (defect != "none")


def test_without_the_gate_wrong_arithmetic_gives_other_weights(broken: Start, undisturbed: Weights) -> None:
    job = broken("wrong_arithmetic_and_no_gate", 3)
    job.fill()
    with pytest.raises(AssertionError, match="not the weights of the undisturbed run"):
        job.finish(expected=undisturbed(STEPS))


@pytest.mark.parametrize("defect", ["torn_update", "joiner_without_the_optimizer"])
def test_members_that_differ_fail_the_run(broken: Start, defect: str) -> None:
    job = broken(defect, 2)
    job.fill()
    if defect == "joiner_without_the_optimizer":
        job.advance(2)
        job.fault(0, "slot.forward")
        job.fill()
    job.allow(1 << 30)
    assert job.wait() == 4
    assert "different weights" in job.output


def test_computing_finished_lanes_again_is_noticed(broken: Start) -> None:
    job = broken("everything_again", 3)
    job.fill()
    job.order(2, "exchange.header_sent")
    job.play()
    job.allow(1 << 30)
    assert job.wait() == 0, job.output
    with pytest.raises(AssertionError, match="was computed by"):
        job.check_lanes()


def test_other_samples_are_noticed(broken: Start) -> None:
    job = broken("other_samples", 2)
    job.fill()
    job.allow(1 << 30)
    assert job.wait() == 0, job.output
    verdict = verify(job.run_dir)
    assert not verdict.ok and "slot" in verdict.violations[0]


@pytest.mark.soak
def test_messages_keyed_by_position_give_other_weights(broken: Start, undisturbed: Weights) -> None:
    """After a loss the survivors send what they had finished before the lanes that were dealt to them anew."""
    job = broken("messages_keyed_by_position", 3)
    job.fill()
    job.order(0, "exchange.header_sent")
    job.play()
    with pytest.raises(AssertionError, match="not the weights of the undisturbed run"):
        job.finish(expected=undisturbed(STEPS))
