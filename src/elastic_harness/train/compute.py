"""A worker computes the slots that fall to it, lane by lane. Between two slots it heeds a change of generation."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

from elastic_harness.comm.tree import Span
from elastic_harness.contract.board import Phase
from elastic_harness.contract.messages import LogEvent
from elastic_harness.errors import Declined, GenerationChanged, OutOfMemory, UserCodeError
from elastic_harness.failpoints import failpoint
from elastic_harness.train.attempt import Attempt
from elastic_harness.train.engine import Engine
from elastic_harness.train.memory import free_unused, is_out_of_memory, memory_now
from elastic_harness.train.partials import Contribution, Gradients
from elastic_harness.train.progress import Progress
from elastic_harness.train.slots import batch_word, gradients_word

CANARY: Span = (0, 1)
"""The lane that members new to a run compute once more, for comparison with others and with the first time."""
DECLINES_MAX = 2
"""So many slots in a row, without one finished in between, are another worker's. One more, and this worker ends."""


def compute(engine: Engine, progress: Progress, attempt: Attempt) -> Iterator[Any]:
    """Run the slots of this worker's lanes; each finished partial sum starts to travel at once."""
    partials = progress.partials
    assert partials is not None and progress.formed is not None
    # A unit that was left half-way when the generation changed comes first, before p.grad is needed for others.
    begun = engine.slots.begun_unit()
    first = 0
    for unit in sorted(units(engine, attempt, begun), key=lambda unit: unit != begun):
        began = engine.slots.times()
        try:
            yield from run_slots(engine, progress, unit)
        except OutOfMemory as error:
            raise given_up(engine, progress, error.with_traceback(None)) from None
        gradients, contributions = engine.slots.take_gradients()
        failpoint("lane.computed", partials.step, values=gradients)
        if attempt.canary_due and unit == CANARY:
            first = gradients_word(gradients)
        if any(audit.owner == attempt.rank and unit == (audit.lane, audit.lane + 1) for audit in attempt.audits):
            attempt.audited = gradients_word(gradients)
        span = partials.add(unit, gradients, contributions)
        failpoint("lane.finished", partials.step, values=unit)
        attempt.send_if_finished(span, partials)
        if unit != begun:
            slots = engine.batches.shape(attempt.step).unit_slots(unit)
            attempt.lane_times.add(len(slots), engine.slots.times().since(began))
    if attempt.canary_due:
        with contextlib.suppress(OutOfMemory):  # without its word this member stays unverified
            again, _ = yield from compute_again(engine, progress, CANARY)
            attempt.canary, attempt.canary_batch = gradients_word(again), batch_word(engine.slots.canary_batches)
            check_pure(first, attempt.canary, partials.step)
    for audit in attempt.audits:
        if audit.auditor == attempt.rank:
            with contextlib.suppress(OutOfMemory):  # without its word the lane is not audited in this step
                again, _ = yield from compute_again(engine, progress, (audit.lane, audit.lane + 1))
                attempt.audit = gradients_word(again)


def compute_again(
    engine: Engine, progress: Progress, unit: Span
) -> Generator[Any, None, tuple[Gradients, dict[int, Contribution]]]:
    """Compute a unit for comparison only, and return what it contributes. Nothing of the step changes."""
    yield from run_slots(engine, progress, unit, canary=True)
    gradients, contributions = engine.slots.take_gradients()
    failpoint("lane.computed", progress.version, values=gradients)
    return gradients, contributions


def units(engine: Engine, attempt: Attempt, begun: Span | None) -> list[Span]:
    """How to compute this worker's lanes. Those that are compared are computed alone, which gives the same bits, unless
    one has been begun in a pair."""
    compared = {CANARY[0]} if attempt.canary_due else set()
    compared |= {audit.lane for audit in attempt.audits if audit.owner == attempt.rank}
    shape = engine.batches.shape(attempt.step)
    together = shape.units(attempt.lanes)
    return together if begun in together else shape.units(attempt.lanes, compared)


def check_pure(first: int, again: int, step: int) -> None:
    """Raise UserCodeError if a lane computed twice gave two gradients. `first`: 0 if it was computed once."""
    if first not in (0, again):
        raise impure(f"The first micro-batches of step {step} were computed twice and gave two different gradients")


def impure(what: str) -> UserCodeError:
    """Return the error for micro-batches that give other gradients each time they are computed."""
    return UserCodeError(
        f"{what}, so the result would depend on who computes what. Something goes on from one micro-batch to the next: "
        "a random generator of your own (use the default ones, which are seeded for every micro-batch), a counter or "
        "cache in the model, a batch changed in place that is the dataset's own memory, weights changed through "
        "`.data`, or a loss that reads the clock. If it is nothing of the kind, check this machine with "
        "`elastic-harness burn-in`. elastic.canary=false and health.audit_interval=0 turn such comparisons off."
    )


def given_up(engine: Engine, progress: Progress, error: OutOfMemory) -> Declined | OutOfMemory:
    """Return how a slot ends here for which the memory does not suffice: another worker is to compute it, or this
    worker ends. It ends if it is asked for a slot a second time, because then nobody else is left to compute it; and if
    it had no memory for several slots in a row, because then it is not the slot that takes too much."""
    lane = engine.batches.shape(progress.version).lane_of(error.slot)
    in_a_row = progress.declining(lane, error.slot, engine.slots.finished).declines
    ends = engine.saver.alone or lane in dict(progress.declined) or in_a_row > DECLINES_MAX
    return error if ends else Declined(lane, error)


def run_slots(
    engine: Engine, progress: Progress, unit: Span, *, canary: bool = False, slots: range | None = None
) -> Iterator[Any]:
    """Yield the batches of a unit's slots, or of `slots` in their place. A slot for which memory runs out is computed
    once more, with all free memory given back, and everything else as it was; on a GPU then once more, with what its
    backward needs on the host. Raises OutOfMemory after that."""
    tried = set[int]()
    while True:
        try:
            yield from _run_slots(engine, progress, unit, canary=canary, slots=slots)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            slot, text = engine.slots.slot, str(error) or type(error).__name__
        held = memory_now()
        engine.slots.start_over()  # not in the handler: there the error keeps all that its frames hold
        free_unused()
        samples = engine.slots.sample_ids(progress.version, slot)
        fields = {"member": engine.link.member, "step": progress.version, "slot": slot, "samples": samples}
        spills = slot in tried and engine.slots.spill(progress.version, slot)
        if slot in tried and not spills:
            raise OutOfMemory(progress.version, slot, samples, text)
        tried.add(slot)
        engine.link.send(LogEvent("slot_retried", {**fields, "error": text, **held, "spills": spills}))


def _run_slots(engine: Engine, progress: Progress, unit: Span, *, canary: bool, slots: range | None) -> Iterator[Any]:
    """Yield the batches. Between two slots is where an urgent change of generation is noticed."""
    step = progress.version
    assert progress.formed is not None
    omitted = engine.omitted(progress.formed.digest, step).slots if slots is None else ()
    for slot, batch in engine.slots.run(step, unit, canary=canary, slots=slots, omitted=omitted):
        stop_if_void(engine, progress)
        engine.saver.copy_share(step, *progress.formed.on_node)
        with engine.deadlines.measured(Phase.SLOT, step, slot):
            failpoint("slot.forward", step, slot)
            yield batch
        engine.watch.check_slot(f"in slot {slot} of step {step}")


def stop_if_void(engine: Engine, progress: Progress) -> None:
    """Raise GenerationChanged if an urgent change was announced."""
    assert progress.formed is not None
    if engine.link.urgent(progress.formed.generation.number):
        raise GenerationChanged("an urgent change of generation was announced")
