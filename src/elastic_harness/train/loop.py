"""The life of a step, recovery included. Read this page first.

    place the lanes → compute the slots of mine, summing them up the fixed tree → exchange partial sums
    → gate on everyone's header → finish the copy of the state, if one is being made → apply the record: version + 1

Whatever breaks on the way (`Recoverable`) leads to `recover`, which returns how far this worker is now; finished
lanes survive it, and the same step goes on. Nothing is voted on: state at a version is a pure function of the seed,
so members differ only in how far they are, by at most one step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from elastic_harness.comm.tree import Span
from elastic_harness.contract.board import Phase
from elastic_harness.errors import GenerationChanged, PeerFailed, Recoverable, UserCodeError
from elastic_harness.failpoints import failpoint
from elastic_harness.train.attempt import Attempt, finish_exchange, place, record_of
from elastic_harness.train.boundary import after_apply, after_commit, before_apply
from elastic_harness.train.engine import Engine
from elastic_harness.train.gate import gate
from elastic_harness.train.interrupts import interrupts_wait
from elastic_harness.train.progress import Progress
from elastic_harness.train.recovery import recover
from elastic_harness.train.replay import slot_alone
from elastic_harness.train.slots import batch_word, canary_word
from elastic_harness.train.tell import tell_unfit

CANARY: Span = (0, 1)
"""The lane that members new to a run compute once more, for comparison with others and with the first time."""


def commit_step(engine: Engine, progress: Progress) -> Generator[Any, None, Progress]:
    """Commit step `progress.version`; yields the batches of the slots that fall to this worker. Returns (as the
    generator's value) the progress after it. Collective; blocks until the step is committed."""
    engine.board.offer_stacks()  # as long as the script leaves the signal alone
    engine.watch.check_step(f"before step {progress.version}, outside of its micro-batches")
    progress = settle_commit(engine, progress)
    step = progress.version
    if engine.before_step is not None:
        engine.watch.run_before_step(step, engine.before_step)
    while progress.version == step:
        try:
            yield from slot_alone(engine, progress)
            progress = progress if progress.partials else replace(progress, partials=engine.new_partials(step))
            attempt = place(engine, progress)
            yield from compute(engine, progress, attempt)
            progress = exchange_and_apply(engine, progress, attempt)
        except Recoverable as failure:
            progress = recover(engine, progress, failure)
    return progress


def compute(engine: Engine, progress: Progress, attempt: Attempt) -> Iterator[Any]:
    """Run the slots of this worker's lanes; each finished partial sum starts to travel at once."""
    partials = progress.partials
    assert partials is not None and progress.formed is not None
    # A unit that was left half-way when the generation changed comes first, before p.grad is needed for others.
    begun = engine.slots.begun_unit()
    first = 0
    for unit in sorted(units(engine, attempt, begun), key=lambda unit: unit != begun):
        yield from run_slots(engine, progress, unit)
        gradients, contributions = engine.slots.take_gradients()
        if attempt.canary_due and unit == CANARY:
            first = canary_word(gradients)
        span = partials.add(unit, gradients, contributions)
        failpoint("lane.finished", partials.step)
        attempt.send_if_finished(span, partials)
    if attempt.canary_due:
        yield from run_slots(engine, progress, CANARY, canary=True)
        again, _ = engine.slots.take_gradients()
        attempt.canary, attempt.canary_batch = canary_word(again), batch_word(engine.slots.canary_batches)
        check_pure(first, attempt.canary, partials.step)


def units(engine: Engine, attempt: Attempt, begun: Span | None) -> list[Span]:
    """How to compute this worker's lanes; lane 0 by itself where it is compared, which gives the same bits."""
    together = engine.shape.units(attempt.lanes)
    if attempt.canary_due and begun not in together:
        return replace(engine.shape, pairs=False).units(attempt.lanes)
    return together


def check_pure(first: int, again: int, step: int) -> None:
    """Raise UserCodeError if a lane computed twice gave two gradients. `first`: 0 if it was computed once."""
    if first not in (0, again):
        raise UserCodeError(
            f"The first micro-batches of step {step} were computed twice and gave two different gradients, so the "
            "result would depend on who computes what. Something goes on from one micro-batch to the next: a random "
            "generator of your own (use the default ones, which are seeded for every micro-batch), a counter or cache "
            "in the model, a batch changed in place that is the dataset's own memory, weights changed through `.data`, "
            "or a loss that reads the clock. elastic.canary=false turns this comparison off."
        )


def run_slots(engine: Engine, progress: Progress, unit: Span, *, canary: bool = False) -> Iterator[Any]:
    """Yield the batches of a unit's slots; between two slots is where an urgent change of generation is noticed."""
    step = progress.version
    assert progress.formed is not None
    for slot, batch in engine.slots.run(step, unit, canary=canary):
        stop_if_void(engine, progress)
        engine.saver.copy_share(step, *progress.formed.on_node)
        with engine.deadlines.measured(Phase.SLOT, step, slot):
            failpoint("slot.forward", step)
            yield batch
        engine.watch.check_slot(f"in slot {slot} of step {step}")


def exchange_and_apply(engine: Engine, progress: Progress, attempt: Attempt) -> Progress:
    """Complete the exchange and commit, or refuse to: the same decision from the same headers everywhere."""
    formed, partials = progress.formed, progress.partials
    assert formed is not None and partials is not None
    headers = finish_exchange(engine, progress, attempt)
    verdict, reason = gate(headers, attempt.reference, engine.watch.compared())
    if not verdict.commit:
        tell_unfit(engine, formed, verdict, reason)
        raise PeerFailed(reason)
    record = record_of(engine, formed, attempt, headers)
    failpoint("exchange.finished", record.step)
    before_apply(engine, progress)
    with interrupts_wait():
        metrics = engine.applier.apply(record)
        if record.step == 0:
            engine.registry.rehearse()  # most optimizers have no state before their first step
        engine.accept_state(record.step + 1)
        failpoint("apply.finished", record.step)
        progress = after_apply(engine, progress, record, metrics, attempt)
    return replace(progress, verdict=verdict)


def settle_commit(engine: Engine, progress: Progress) -> Progress:
    """Do what the last commit left to be done once the user's code after it has run: begin to save, stop, or move on to
    the planned generation that all have heard of. Raises Diverged or Left if training does not go on."""
    after_commit(engine, progress)
    verdict, progress = progress.verdict, replace(progress, verdict=None)
    if verdict is not None and verdict.switch:
        progress = recover(engine, progress, None)
    return progress


def stop_if_void(engine: Engine, progress: Progress) -> None:
    """Raise GenerationChanged if an urgent change was announced."""
    assert progress.formed is not None
    if engine.link.urgent(progress.formed.generation.number):
        raise GenerationChanged("an urgent change of generation was announced")
