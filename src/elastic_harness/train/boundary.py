"""What happens at a step boundary: before the state changes, once it has changed, and after the user's code has run.
Saving and endings belong here. On each node the first member of a generation saves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from elastic_harness.checkpoint.packages import packages
from elastic_harness.contract.board import Phase
from elastic_harness.contract.messages import PolicyHalt
from elastic_harness.errors import Diverged
from elastic_harness.train.apply import Metrics, Record
from elastic_harness.train.attempt import Attempt
from elastic_harness.train.batches import NAME
from elastic_harness.train.compute import CANARY
from elastic_harness.train.engine import Engine
from elastic_harness.train.header import Header
from elastic_harness.train.link import Left
from elastic_harness.train.measuring import knows_measures, measure
from elastic_harness.train.nonfinite import NAME as NONFINITE
from elastic_harness.train.progress import Progress
from elastic_harness.train.tell import tell_commit

FRAME_WAIT_S = 60.0
"""So long training waits until there is memory for a version that may be among the best. Others are just not saved."""


def after_apply(
    engine: Engine, progress: Progress, record: Record, metrics: Metrics, attempt: Attempt, headers: Sequence[Header]
) -> Progress:
    """Return the progress after the state has changed. The vectors of the step before are free now; the first member of
    each node tells its agent."""
    assert progress.formed is not None
    if progress.exchange is not None:
        progress.exchange.retire(engine.config.elastic.exchange_timeout_s)
    now, first_lane = time.time(), engine.batches.shape(record.step).unit_slots(CANARY)
    step_s = now - progress.committed_at if progress.committed_at else None
    omitted = set(first_lane).issubset(record.omitted.slots)
    progress = replace(
        progress.at(record.step + 1, record=record, metrics=metrics),
        exchange=attempt.exchange,
        verified=progress.verified or not engine.canary or (not omitted and attempt.is_compared(headers)),
        committed_at=now,
    )
    assert progress.formed is not None
    relaxed = engine.config.elastic.exactness == "relaxed"  # then nobody can repeat it from a record
    if progress.formed.speaks or relaxed:
        tell_commit(engine, progress, step_s)
    return progress


def before_apply(engine: Engine, progress: Progress) -> None:
    """Wait for those who still read the state of this version: a snapshot's copy, and a joiner that receives it."""
    finish_copy(engine, progress)
    engine.deadlines.enter_phase(Phase.APPLY, progress.version)
    if progress.serving is not None:
        progress.serving.join()


def after_commit(engine: Engine, progress: Progress) -> None:
    """Do what follows from the commit of the last step, after the user's code and before the next step. Raises Diverged
    or Left if training does not go on. A version that is measured is saved later, with what was measured."""
    halt_if_decided(engine, progress)
    if progress.verdict is not None and progress.verdict.stop:
        raise stop_at_boundary(engine, progress)
    if not engine.measures_at(progress.version):
        save_if_due(engine, progress)


def measure_and_save(engine: Engine, progress: Progress) -> None:
    """Have all members know what is measured of this version, if anything is, and then save it if that is due. As
    `measure`."""
    measure(engine, progress)
    measured = progress.measured
    assert progress.formed is not None
    number = progress.formed.generation.number
    if engine.measures_at(progress.version) and knows_measures(progress) and measured.saved_in != number:
        measured.saved_in = number  # again in the next one: whoever has died there may have owed a share, or the saving
        save_if_due(engine, progress)


def save_if_due(engine: Engine, progress: Progress) -> None:
    """As the first member of a node, begin a snapshot if one is due; as another, copy a share if one was begun.
    The end of the run has a checkpoint of its own."""
    formed, version = progress.formed, progress.version
    assert formed is not None
    if progress.record is None or progress.ended or version >= engine.last_version:
        return
    if formed.speaks:
        digest, (_, shares) = formed.digest, formed.on_node
        uploads = formed.rank == 0  # one node's copy is enough
        needed = engine.batches.epoch_began(version) if engine.config.checkpoint.each_epoch else 0
        patience_s = 0.0
        if engine.measures.keeps(progress.measured):
            needed, patience_s = version, FRAME_WAIT_S
            engine.board.show(Phase.CHECKPOINT, version, deadline_s=engine.config.elastic.exchange_timeout_s)
        describes = described(engine, progress)
        engine.saver.save_if_due(
            version,
            digest.lineage,
            digest.from_step,
            shares,
            describes,
            uploads=uploads,
            needed=needed,
            patience_s=patience_s,
        )
    else:
        engine.saver.copy_share(version, *formed.on_node)


def finish_copy(engine: Engine, progress: Progress) -> None:
    """Block until this worker's share of a snapshot is copied, if one was begun of this version."""
    formed = progress.formed
    assert formed is not None
    engine.saver.copy_share(progress.version, *formed.on_node)
    if engine.saver.copying:
        engine.board.show(Phase.CHECKPOINT, progress.version, deadline_s=engine.config.elastic.exchange_timeout_s)
    engine.saver.finish_copy(progress.version)


def described(engine: Engine, progress: Progress) -> Callable[[], dict[str, Any]]:
    """What a checkpoint says beside the state. Data position and random numbers follow from seed and version."""

    def description() -> dict[str, Any]:
        formed, metrics = progress.formed, progress.metrics
        assert formed is not None
        positions = engine.batches.schedule.at(progress.version)
        values = {} if metrics is None else {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "lr": metrics.lr}
        values |= progress.measured.metrics(engine.measures)
        since = engine.policies.states[NONFINITE].value["since"]
        return {
            "generation": formed.generation.number,
            "world_size": formed.world,
            "metrics": {name: value for name, value in values.items() if value is not None and math.isfinite(value)},
            "epoch": positions.epoch,
            "position": positions.position,
            "tokens": positions.position * engine.tokens_per_sample,
            "data": {name: engine.configured[name] for name in ("order", "dataset")},
            "config": engine.config.to_dict(),
            "packages": packages(),
            "policies": sorted([*engine.policies.states, *([NAME] if engine.batches.are_state else [])]),
            **({"nonfinite_since": since} if since >= 0 else {}),
        }

    return description


def halt_if_decided(engine: Engine, progress: Progress) -> None:
    """Raise Diverged if a policy ends the run; all members come to that after the same step."""
    if progress.metrics is None or not progress.metrics.halted:
        return
    if progress.exchange is not None:
        progress.exchange.wait_until_sent(engine.config.elastic.exchange_timeout_s)
    tell_commit(engine, progress, None)  # the member that speaks may have died before it could
    engine.link.send(PolicyHalt(progress.metrics.halted))
    raise Diverged(progress.metrics.halted)


def stop_at_boundary(engine: Engine, progress: Progress) -> Left:
    """All members have agreed to stop after the step just committed: on each node the first one saves first, if that
    was asked for."""
    request, formed = engine.link.leave_asked, progress.formed
    assert request is not None and formed is not None and progress.exchange is not None
    if request.checkpoint and formed.speaks:
        engine.board.show(Phase.CHECKPOINT, progress.version, deadline_s=engine.config.elastic.exchange_timeout_s)
        engine.saver.save(
            progress.version, formed.digest.lineage, described(engine, progress), uploads=formed.rank == 0
        )
    progress.exchange.wait_until_sent(engine.config.elastic.exchange_timeout_s)
    return Left(request.reason)
