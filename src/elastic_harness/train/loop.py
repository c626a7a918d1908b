"""The life of a step, recovery included. Read this page first.

    have all know what is measured of this version, if anything is
    → place the lanes → compute the slots of mine, summing them up the fixed tree → exchange partial sums
    → gate on everyone's header → finish the copy of the state, if one is being made → apply the record: version + 1

Whatever breaks on the way (`Recoverable`) leads to `recover`, which returns how far this worker is now; finished
lanes survive it, and the same step goes on. Nothing is voted on: state at a version is a pure function of the seed,
so members differ only in how far they are, by at most one step.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from elastic_harness.errors import Declined, PeerFailed, Recoverable
from elastic_harness.failpoints import failpoint
from elastic_harness.train.apply import Decided, Record
from elastic_harness.train.attempt import Attempt, finish_exchange, note_paces, paces_after, place, record_of
from elastic_harness.train.boundary import after_apply, after_commit, before_apply, measure_and_save
from elastic_harness.train.compute import compute
from elastic_harness.train.engine import Engine
from elastic_harness.train.gate import gate
from elastic_harness.train.interrupts import interrupts_wait
from elastic_harness.train.measuring import measure, same_measures
from elastic_harness.train.progress import Progress
from elastic_harness.train.recheck import disputes, doubts, has_audits, is_doubtful, recheck
from elastic_harness.train.recovery import recover
from elastic_harness.train.replay import slot_alone
from elastic_harness.train.sums import audit_sums
from elastic_harness.train.tell import refuse, tell_rollback
from elastic_harness.train.whole_audit import audit_all


def commit_step(engine: Engine, progress: Progress) -> Generator[Any, None, Progress]:
    """Commit step `progress.version`; yields the batches of the slots that fall to this worker. Returns (as the
    generator's value) the progress after it. Collective; blocks until the step is committed."""
    engine.board.offer_stacks()  # as long as the script leaves the signal alone
    engine.watch.check_step(f"before step {progress.version}, outside of its micro-batches")
    progress = settle_commit(engine, progress)
    step = progress.version
    failpoint("step.begun", step, values=engine.applier.parameters[-1:])
    if engine.before_step is not None:
        engine.watch.run_before_step(step, engine.before_step)
    while progress.version == step:
        try:
            yield from slot_alone(engine, progress)
            measure_and_save(engine, progress)
            progress = progress if progress.partials else begin(engine, progress)
            attempt = place(engine, progress)
            yield from compute(engine, progress, attempt)
            progress = yield from exchange_and_apply(engine, progress, attempt)
        except Recoverable as failure:
            if isinstance(failure, Declined):
                progress = progress.declining(failure.lane, failure.slot, engine.slots.finished)
            progress = recover(engine, progress, failure)
    return progress


def begin(engine: Engine, progress: Progress) -> Progress:
    """Begin the step of this version. What it consists of must not change any more once a header is sent."""
    assert progress.formed is not None
    workers = engine.batches.workers(progress.version)
    begun_for = (progress.formed.generation.number, workers) if workers else (0, 0)
    return replace(progress, partials=engine.new_partials(progress.version), begun_for=begun_for)


def exchange_and_apply(engine: Engine, progress: Progress, attempt: Attempt) -> Generator[Any, None, Progress]:
    """Complete the exchange and commit, or refuse to: the same decision from the same headers everywhere. Yields
    batches only if a policy is about to act: what it acts on is computed again first."""
    formed, partials = progress.formed, progress.partials
    assert formed is not None and partials is not None
    headers = finish_exchange(engine, progress, attempt)
    verdict, reason = gate(headers, attempt.reference, engine.watch.compared())
    if verdict.commit:
        verdict, reason = same_measures(headers, attempt.reference) or (verdict, reason)
    if not verdict.commit:
        refuse(engine, formed, verdict, reason, attempt.newcomers)
    record = record_of(formed, attempt, headers)
    failpoint("exchange.finished", record.step)
    disputed, audited = disputes(formed, attempt, headers)
    certain = max(header.certain for header in headers)
    if disputed:
        yield from recheck(engine, progress, disputed, certified=certain)
    if has_audits(headers):
        audit_sums(engine, progress, attempt, headers, certain)
    progress = replace(progress, certain=record.step if audited else certain)
    if any(header.asked for header in headers):
        progress = yield from audit_all(engine, progress, attempt, headers)
    before_apply(engine, progress)
    decided = decide(engine, record)
    if is_doubtful(engine, decided):
        engine.applier.forget()
        bad_slots = {*decided.facts.bad_slots, *decided.facts.left_out}
        doubtful = yield from doubts(engine, progress, attempt, record.table, bad_slots)
        yield from recheck(engine, progress, doubtful)
        before_apply(engine, progress)
        decided = decide(engine, record)
    if decided.decision.rollback is not None:
        engine.applier.forget()
        failpoint("rollback.decided", record.step)
        raise PeerFailed(tell_rollback(engine, formed, decided))
    progress = replace(progress, paces=paces_after(engine, progress, attempt, headers))
    with interrupts_wait():
        metrics = engine.applier.apply(record, decided)
        if record.step == 0:
            engine.registry.rehearse()  # most optimizers have no state before their first step
        engine.accept_state(record.step + 1)
        failpoint("apply.finished", record.step)
        progress = after_apply(engine, progress, record, metrics, attempt, headers)
    note_paces(engine, formed, attempt, headers)
    return replace(progress, verdict=verdict)


def decide(engine: Engine, record: Record) -> Decided:
    """Ask the policies what becomes of the update."""
    with interrupts_wait():
        return engine.applier.decide(record)


def measure_last(engine: Engine, progress: Progress) -> Progress:
    """Have all members know what is measured of the last version, which no step follows. Collective. Return the
    progress after it; raises as `recover`."""
    while True:
        try:
            measure(engine, progress, last=True)
            return progress
        except Recoverable as failure:
            progress = recover(engine, progress, failure)


def settle_commit(engine: Engine, progress: Progress) -> Progress:
    """Do what the last commit left to be done once the user's code after it has run: begin to save, stop, or move on to
    the planned generation that all have heard of. Raises Diverged or Left if training does not go on."""
    after_commit(engine, progress)
    verdict, progress = progress.verdict, replace(progress, verdict=None)
    if verdict is not None and verdict.switch:
        progress = recover(engine, progress, None)
    return progress
