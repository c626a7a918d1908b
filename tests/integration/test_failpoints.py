"""A worker fails at every named place of a step, of a recovery and of the end: the weights stay those of a run that
never failed, and nothing that was finished is computed again.

Many faults share one job, since starting workers is what costs time: within a round the group shrinks with every
fault, then new workers fill it up again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from elastic_harness import failpoints
from elastic_harness.checkpoint.disk import local
from elastic_harness.checkpoint.disk.manifest import newest
from elastic_harness.contract import variables
from integration.harness import TrainingJob

pytestmark = pytest.mark.slow
Start = Callable[..., TrainingJob]
STEPS = 60

# Passed by every member of a group of two or more in every step; `hit` counts within the step.
IN_STEP = (
    ("step.begun", 1),
    ("slot.forward", 1),
    ("slot.forward", 3),
    ("slot.backward", 2),
    ("lane.computed", 1),
    ("lane.finished", 1),
    ("exchange.posted", 1),
    ("exchange.partial_sent", 1),
    ("exchange.header_sent", 1),
    ("exchange.headers_received", 1),
    ("exchange.added_up", 1),
    ("exchange.gathered_sent", 1),
    ("exchange.finished", 1),
    ("apply.gradients", 1),
    ("apply.optimizer", 1),
    ("apply.finished", 1),
)
# Passed only by members of a generation that follows a loss.
IN_RECOVERY = (
    "recovery.released",
    "recovery.reported",
    "recovery.rebuilt",
    "recovery.reconciled",
    "recovery.finished",
)
# Passed only where a node has several members, and is not the only one.
BETWEEN_NODES = ("exchange.joined_sent", "exchange.spread_sent")
ELSEWHERE = (
    "recovery.receiving",
    "recovery.serving",
    "checkpoint.begun",
    "checkpoint.copied",
    "finish.saved",
    "finish.sent",
    "leave.began",
    # test_validation.py fails at these.
    "validation.batch",
    "validation.computed",
    "measured.told",
    "measured.known",
)


# Passed by the process that writes checkpoints.
IN_WRITER = (
    "checkpoint.hashing",
    "checkpoint.writing",
    "checkpoint.renaming",
    "checkpoint.written",
    "checkpoint.pruning",
)
# Passed there too; benchmarks/checkpoint_kills.py has them all, many times.
IN_KILLS = (
    "checkpoint.copying",
    "checkpoint.sealed",
    "checkpoint.syncing",
    "checkpoint.described",
    "checkpoint.pruned",
    "checkpoint.uploading",
    "checkpoint.uploaded",
)
# Passed while snapshots are copied to other nodes: tests/unit/test_checkpoint_peers.py.
IN_COPIES = ("checkpoint.peer_copying",)
IN_NONFINITE = ("apply.skipped", "rollback.decided")  # passed where an update is not finite: test_nonfinite.py
# Passed where numbers are computed again: test_ill_machine.py.
IN_THREADS = ("transport.received",)  # passed by the thread of the connections, where chaos damages messages
IN_RECHECK = ("recheck.computed", "audit.blocks_sent", "audit.added_up")


def test_the_lists_name_every_place() -> None:
    known = {p for p, _ in IN_STEP}
    known |= {*IN_RECOVERY, *BETWEEN_NODES, *ELSEWHERE, *IN_WRITER, *IN_KILLS, *IN_COPIES, *IN_NONFINITE, *IN_RECHECK}
    known |= {*IN_THREADS}
    assert known == set(failpoints.PLACES)


@pytest.mark.parametrize("first", [pytest.param(0, id="rank0"), pytest.param(1, id="last", marks=pytest.mark.soak)])
def test_a_kill_anywhere_in_a_step(train: Start, undisturbed: Callable[[int], str], first: int) -> None:
    """Groups of four, three and two, in turn; the victim is rank 0 or the last one, in turn."""
    faults = list(zip(IN_STEP, itertools.cycle([first == 0, first != 0]), strict=False))
    job = train(4, steps=STEPS, anew=True)
    while faults:
        job.fill(4)
        for world in (4, 3, 2):
            if faults:
                (place, hit), is_rank_0 = faults.pop(0)
                job.fault(0 if is_rank_0 else world - 1, place, hit=hit)
    job.finish(expected=undisturbed(STEPS))


def test_a_kill_between_nodes(train: Start, undisturbed: Callable[[int], str]) -> None:
    """On two nodes of two: a member dies when others wait for what it carries for its node. The survivors go on as two
    nodes of two and one."""
    job = train(4, steps=STEPS, variables={"ALTERNATE_NODES": "1"})
    for place in BETWEEN_NODES:
        for rank in (0, 3):
            job.fill(4)
            job.fault(rank, place)
    job.finish(expected=undisturbed(STEPS))


def test_a_second_kill_anywhere_in_a_recovery(train: Start, undisturbed: Callable[[int], str]) -> None:
    """One worker dies while computing, another one on the way to the next generation."""
    job = train(4, steps=STEPS)
    for turn, place in enumerate(IN_RECOVERY):
        job.fill(4)
        first, second = [(0, 3), (2, 0)][turn % 2]
        job.order(first, "slot.backward")
        job.order(second, place)
        job.play()
    job.finish(expected=undisturbed(STEPS))


def test_a_joiner_and_its_donor_die_during_the_transfer(train: Start, undisturbed: Callable[[int], str]) -> None:
    job = train(2, steps=STEPS)
    job.fill()
    job.advance(1)  # so that the first two are no joiners any more
    job.order(1, "slot.forward")
    job.order_for_joiner("recovery.receiving")  # before there is one: a forked worker comes at once
    job.advance(2)
    job.fill()
    job.fault(0, "slot.forward")
    # rank 0 has the state that the next joiner waits for, and dies when it is to hand it over
    job.until(lambda: job.ready() >= 2, "the joiner")
    job.order(0, "recovery.serving", lasting=3)
    job.play(3)
    job.finish(expected=undisturbed(STEPS))


def test_rank_0_dies_while_saving(train: Start, undisturbed: Callable[[int], str]) -> None:
    job = train(2, "--spares", 1, steps=STEPS, settings=["checkpoint.checkpoint_interval=2"])
    for place in ("checkpoint.begun", "checkpoint.copied"):
        job.fill(spares=1)
        job.order(0, place)
        job.play(4)
    job.finish(expected=undisturbed(STEPS))
    assert len(list((job.run_dir / "checkpoints").glob("step-*"))) == 3


def test_another_worker_dies_while_it_copies_its_share(train: Start, undisturbed: Callable[[int], str]) -> None:
    job = train(3, steps=STEPS, settings=["checkpoint.checkpoint_interval=2"])
    for rank in (1, 2):
        job.fill()
        job.order(rank, "checkpoint.copied")
        job.play(4)
    job.finish(expected=undisturbed(STEPS))


def test_the_writer_dies_at_every_place(train: Start, undisturbed: Callable[[int], str]) -> None:
    """Each writer at another place, of a checkpoint that the next one then finishes; the job does not notice."""
    rules = [f"{place} member=writer-{number} kill" for number, place in enumerate(IN_WRITER, 1)]
    job = train(
        2,
        steps=STEPS,
        settings=["checkpoint.checkpoint_interval=2", "checkpoint.keep_last=2"],
        variables={variables.FAILPOINTS: "; ".join(rules)},
    )
    job.fill()
    for number in range(1, len(IN_WRITER) + 1):
        job.advance(3)
        job.until(lambda number=number: len(job.events("checkpoint_writer_died")) == number, "a writer's death")
    job.finish(expected=undisturbed(STEPS))
    kept = newest(job.run_dir / "checkpoints")
    assert kept[0].step == STEPS and len(kept) == 2
    for checkpoint in kept:
        local.check(checkpoint)


def test_writers_stand_still_and_die_while_the_agent_waits_for_the_last_checkpoint(train: Start) -> None:
    """The job fails, and what it had in memory alone comes to disk all the same."""
    rules = "checkpoint.writing member=writer-1 stop; checkpoint.renaming member=writer-2 kill"
    job = train(
        2,
        *("--min-workers", 2, "--max-restarts", 0),
        steps=STEPS,
        settings=["checkpoint.checkpoint_interval=0", "checkpoint.memory_snapshot_interval=3"],
        variables={variables.FAILPOINTS: rules},
    )
    job.fill()
    job.advance(8)
    job.signal_rank(1)
    assert job.wait() != 0
    assert [checkpoint.step for checkpoint in newest(job.run_dir / "checkpoints")] == [6]
    first, second = job.events("checkpoint_writer_died")
    assert "was stopped" in first["error"] and first["exit_code"] == second["exit_code"] == -9
    assert "checkpoint writer died" in job.output


def test_kills_after_the_last_step(train: Start, undisturbed: Callable[[int], str]) -> None:
    """Rank 0 dies before it says that it has finished, another one right after."""
    job = train(4, steps=6)
    job.fill()
    job.order(0, "finish.saved", step=5)
    job.order(2, "finish.sent", step=5)
    job.finish(expected=undisturbed(6))


@pytest.mark.parametrize("spares", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_errors_stops_and_pauses(train: Start, undisturbed: Callable[[int], str], spares: int) -> None:
    """What is not a kill: an exception in the user's code, a stopped process, a long pause that is no failure."""
    job = train(3, "--spares", spares, steps=STEPS, settings=["elastic.progress_timeout_min_s=4"])
    job.fill(spares=spares)
    job.advance(2)
    job.fault(1, "slot.forward", "raise")
    job.fill(spares=spares)
    job.fault(0, "slot.backward", "stop")
    job.fill(spares=spares)
    job.order(0, "exchange.header_sent", "pause:1.0")
    job.order(1, "apply.optimizer", "pause:0.5")
    job.play()
    job.fault(2, "exchange.posted", "stop")
    job.finish(expected=undisturbed(STEPS))


@pytest.mark.soak
@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("victim", ["first", "last"])
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_every_place_in_every_group(
    train: Start, undisturbed: Callable[[int], str], world: int, victim: str, spares: int, action: str
) -> None:
    """The whole product: place × victim × number of workers × spares × kind of failure."""
    steps = 120
    settings = ["elastic.progress_timeout_min_s=3", "elastic.first_step_timeout_s=20"]
    job = train(world, "--spares", spares, steps=steps, settings=settings)
    for place, hit in IN_STEP:
        job.fill(spares=spares)
        job.fault(0 if victim == "first" else world - 1, place, action, hit=hit)
    if world > 2:
        for place in IN_RECOVERY:
            job.fill(spares=spares)
            job.order(1, "slot.backward")
            job.order(0 if victim == "first" else world - 1, place, action)
            job.play()
    job.finish(expected=undisturbed(steps))
