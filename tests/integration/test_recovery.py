"""Losses of many workers at once, of those that others depend on, and changes of the group's size: the weights are
always those of the undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from elastic_harness import processes
from elastic_harness.checkpoint.disk.manifest import newest as checkpoints
from integration.harness import TrainingJob
from integration.launch_tools import run

pytestmark = pytest.mark.slow
Train = Callable[..., TrainingJob]
Weights = Callable[[int], str]
STEPS = 24


def worlds(job: TrainingJob) -> list[int]:
    """The number of members of every generation in which a step was committed, in order."""
    sizes = {e["number"]: e["world_size"] for e in job.events("generation")}
    used = dict.fromkeys(e["generation"] for e in job.events("step_committed"))
    return [sizes[number] for number in used]


def test_two_at_once_and_all_but_one(train: Train, undisturbed: Weights) -> None:
    job = train(4, steps=STEPS)
    job.fill()
    job.order(0, "apply.finished")
    job.order(3, "exchange.header_sent")
    job.play()
    job.fill()
    for rank in (0, 1, 3):
        job.order(rank, "slot.backward", hit=2)
    job.play()
    job.finish(expected=undisturbed(STEPS))
    assert {2, 4, 1} <= set(worlds(job))


def test_all_at_once_go_back_to_the_checkpoint(train: Train, undisturbed: Weights) -> None:
    job = train(3, steps=STEPS, settings=["checkpoint.checkpoint_interval=2"])
    job.fill()
    job.advance(5)
    job.until_event("checkpoint_saved")
    for rank in range(3):
        job.order(rank, "slot.backward", hit=rank + 1)
    job.play()
    job.finish(expected=undisturbed(STEPS))
    assert {e["lineage"] for e in job.events("step_committed")} == {0, 1}
    loaded = job.events("checkpoint_loaded")[0]["step"]
    saved = [e["step"] for e in job.events("checkpoint_saved")]
    assert loaded > 0 and loaded in saved, "a save that comes late, as the disk is busy, may be of an odd version"
    assert min(e["step"] for e in job.events("step_committed") if e["lineage"] == 1) == loaded


def damage(job: TrainingJob, step: int) -> None:
    """Change the last bytes of a checkpoint on disk."""
    state = job.run_dir / "checkpoints" / f"step-{step:08d}" / "state.safetensors"
    with open(state, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(byte ^ 255 for byte in state.read_bytes()[-100:]))


def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_taken(train: Train, undisturbed: Weights) -> None:
    job = train(2, steps=STEPS, settings=["checkpoint.checkpoint_interval=2"])
    job.fill()
    job.advance(5)
    job.until_event("checkpoint_saved", 2)
    assert run("stop", job.run_dir).returncode == 0  # with the launcher goes the memory
    job.allow(job.limit + 2)
    assert job.wait() == 143
    newest = max(c.step for c in checkpoints(job.run_dir / "checkpoints"))
    damage(job, newest)
    job.relaunch(2)
    job.finish(expected=undisturbed(STEPS))
    assert job.events("checkpoint_loaded")[0]["step"] < newest
    assert [e["step"] for e in job.events("checkpoint_corrupt")] == [newest]
    assert (job.run_dir / "checkpoints" / f"step-{newest:08d}.damaged").is_dir()


def test_damage_on_disk_does_not_matter_while_memory_has_it(train: Train, undisturbed: Weights) -> None:
    job = train(2, steps=STEPS, settings=["checkpoint.checkpoint_interval=2"])
    job.fill()
    job.advance(5)
    job.until_event("checkpoint_saved", 2)
    damage(job, max(e["step"] for e in job.events("checkpoint_saved")))
    for rank in range(2):
        job.order(rank, "slot.backward", hit=rank + 1)
    job.play()
    job.finish(expected=undisturbed(STEPS))
    assert [e["tier"] for e in job.events("checkpoint_loaded")] == ["memory"]


def test_memory_survives_workers_agent_and_writer(train: Train, undisturbed: Weights) -> None:
    """Nothing is on disk; what the launcher holds is enough."""
    settings = ["checkpoint.checkpoint_interval=0", "checkpoint.memory_snapshot_interval=3"]
    job = train(2, steps=STEPS, settings=settings, anew=True)
    job.fill()
    job.advance(8)
    os.kill(job.record()["agent_pid"], signal.SIGKILL)
    job.until(lambda: job.events("checkpoint_loaded"), "the state to be restored")
    job.finish(expected=undisturbed(STEPS))
    loaded = job.events("checkpoint_loaded")[0]
    assert loaded["tier"] == "memory" and loaded["step"] in (3, 6)


def test_whoever_is_one_step_behind_replays_it(train: Train, undisturbed: Weights) -> None:
    """Rank 0 dies having sent its part of the sum to rank 1 alone, so rank 1 commits and rank 2 cannot."""
    job = train(3, steps=STEPS)
    job.fill()
    job.advance()
    half_sent(job, 0)
    job.play()
    job.finish(expected=undisturbed(STEPS))
    assert "1 keep, 1 replay, 0 take the state" in job.output


def test_the_only_one_ahead_dies_while_serving_the_others(train: Train, undisturbed: Weights) -> None:
    """Rank 0 alone commits, and even says so; its record dies with it. The others finish the step from their lanes."""
    job = train(4, steps=STEPS)
    job.fill()
    job.advance()
    half_sent(job, 1)
    job.order(0, "recovery.serving", lasting=2)
    job.play()
    job.fill()
    half_sent(job, 0)
    job.order(3, "recovery.receiving", lasting=2)
    job.play()
    job.finish(expected=undisturbed(STEPS))
    assert "1 keep, 2 replay, 0 take the state" in job.output


def half_sent(job: TrainingJob, rank: int) -> None:
    """Let a rank die when its first message of the finished sum has arrived, and no other has left."""
    job.order(rank, "exchange.gathered_sent", "pause:1.0")
    job.order(rank, "exchange.gathered_sent", "kill")


def test_what_was_told_before_a_death_is_written_down_before_it(train: Train, undisturbed: Weights) -> None:
    """An agent that gets no time finds a death and older news of the others at once."""
    job = train(2, steps=STEPS)
    job.fill()
    job.advance()
    first = job.limit
    fault = job.order(1, "slot.forward", step=first + 2)  # so the other one has told of `first`, if not yet of the next
    agent = job.record()["agent_pid"]
    os.kill(agent, signal.SIGSTOP)
    job.allow(first + 3)
    pid = job.pid(job.until(lambda: job.victim(fault), "the fault"))
    job.until(lambda: processes.stat(pid).state == "Z", "the death")  # nobody reaps it
    os.kill(agent, signal.SIGCONT)
    job.settle()
    events = job.events("step_committed", "failure_detected")
    before = [event["step"] for event in events[: [event["event"] for event in events].index("failure_detected")]]
    assert max(before) >= first
    job.finish(expected=undisturbed(STEPS))


def test_below_the_minimum_the_survivors_wait_with_their_state(train: Train, undisturbed: Weights) -> None:
    job = train(3, "--min-workers", 3, steps=STEPS)
    job.fill()
    job.advance(3)
    before = job.members()
    fault = job.fault(1, "slot.backward")
    after = job.members()
    victim = job.victim(fault)
    assert [m for m in before if m != victim] == after[:2]
    assert len(after) == 3
    job.finish(expected=undisturbed(STEPS))
    assert {e["world_size"] for e in job.events("generation")} == {3}
    assert {e["lineage"] for e in job.events("step_committed")} == {0}
    assert not job.events("checkpoint_loaded")


def test_a_stop_below_the_minimum_saves_what_the_survivors_hold(train: Train, undisturbed: Weights) -> None:
    job = train(2, "--min-workers", 2, steps=STEPS)
    job.fill()
    job.advance(3)
    job.hold_joiners()  # a replacement would end the wait
    victim = job.signal_rank(1)
    job.allow(job.limit + 1)
    job.until(lambda: job.status().get("waiting"), "the job to wait")
    assert run("stop", job.run_dir).returncode == 0
    assert job.wait() == 143
    saved = max(e["step"] for e in job.events("checkpoint_saved"))
    assert saved == 1 + max(e["step"] for e in job.events("step_committed"))
    job.admit_joiners()
    job.relaunch(2)
    job.finish(expected=undisturbed(STEPS), victims=[victim])


def test_the_group_grows_and_shrinks(train: Train, undisturbed: Weights) -> None:
    job = train(2, steps=STEPS)
    job.fill()
    job.advance(2)
    job.scale(4)
    job.fill()
    job.advance(2)
    job.scale(1)
    job.fill()
    job.advance(2)
    job.scale(3)
    job.fill()
    job.finish(expected=undisturbed(STEPS))
    sizes = worlds(job)
    assert [n for n in (2, 4, 1, 3) if n in sizes] == [2, 4, 1, 3] and sizes[-1] == 3
    assert not any(e["urgent"] for e in job.events("generation")[1:])


def test_who_is_on_the_way_out_is_not_taken_back(train: Train, undisturbed: Weights) -> None:
    """Two workers leave, slowly, when the job is to grow again: they are replaced, and are no failures."""
    job = train(3, steps=STEPS)
    job.fill()
    job.advance(2)
    for rank in (1, 2):
        job.order(rank, "leave.began", "pause:1.5", lasting=8)
    job.scale(1)
    job.fill()
    job.scale(3)
    job.fill()
    job.finish(expected=undisturbed(STEPS))
    assert not job.events("failure_detected")


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_stopped_process_is_lost_within_its_deadline(train: Train, undisturbed: Weights, rank: int) -> None:
    job = train(3, steps=STEPS, settings=["elastic.progress_timeout_min_s=2"])
    job.fill()
    job.advance(3)
    stopped_at = time.time()
    member = job.signal_rank(rank, signal.SIGSTOP)
    job.allow(job.limit + 2)
    job.until(lambda: member in job.failed(), "the stopped process to be noticed")
    failure = job.failed()[member]
    deadline = re.search(r"deadline ([\d.]+) s", failure["what"])
    assert deadline and "SIGSTOP" in failure["what"], failure
    assert failure["t_detected"] - stopped_at < float(deadline[1]) + 1.5
    job.finish(expected=undisturbed(STEPS), victims=[member])


def test_a_run_that_was_stopped_resumes_to_the_same_weights(train: Train, undisturbed: Weights) -> None:
    """All that is on disk is enough: the second launch has another number of workers."""
    job = train(2, steps=STEPS, anew=True)
    job.fill()
    job.advance(4)
    assert run("stop", job.run_dir).returncode == 0
    job.allow(job.limit + 2)
    assert job.wait() == 143
    job.relaunch(3)
    job.finish(expected=undisturbed(STEPS))
    assert {e["lineage"] for e in job.events("step_committed")} == {0, 1}
