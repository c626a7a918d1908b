"""Before a policy acts on a step's numbers, members compute what is in doubt again, within the step.

Slots are pure functions of what all members hold. So other bits mean that a machine computes wrong: its member is
evicted, the others compute its slots, and the step commits with the right value. The same bits mean that it is the data
or the model, and the policy acts. Every member comes to the same from the same answers.

    a loss is not finite   every member computes its lane again
    any other doubt        each member computes its neighbour's partial sums again; where two differ, every member does
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import xxhash

from elastic_harness.comm.tree import Span
from elastic_harness.contract.messages import Rechecked, Undecided
from elastic_harness.errors import InfrastructureError, OutOfMemory, PeerFailed
from elastic_harness.failpoints import failpoint
from elastic_harness.health import spikes
from elastic_harness.health.votes import Judgement, judge, together
from elastic_harness.train import nonfinite
from elastic_harness.train.apply import Decided
from elastic_harness.train.attempt import Attempt
from elastic_harness.train.audits import audits_due
from elastic_harness.train.batches import Shape
from elastic_harness.train.compute import compute_again, impure
from elastic_harness.train.engine import Engine
from elastic_harness.train.header import Header
from elastic_harness.train.partials import SlotTable
from elastic_harness.train.progress import Formed, Progress
from elastic_harness.train.slots import gradients_word
from elastic_harness.train.tell import is_first_fit, tell_doubt, tell_unfit
from elastic_harness.train.words import gather

LANES_MAX = 2
"""So many lanes with bad losses are computed again. If all lanes are bad, two tell as much as all."""


class Answer(NamedTuple):
    """What one computation of some lanes gave, as two words; 0: not known."""

    losses: int
    gradients: int


@dataclass(frozen=True)
class Question:
    """Lanes that are in doubt, and what is known of them."""

    span: Span  # a place in the tree
    owner: int  # the rank that computed them for the step
    answers: Mapping[int, tuple[Answer, ...]] = field(default_factory=dict)  # by rank

    def answered(self, more: Mapping[int, tuple[Answer, ...]]) -> Question:
        """Return the same question with more answers."""
        ranks = self.answers.keys() | more.keys()
        return replace(self, answers={rank: (*self.answers.get(rank, ()), *more.get(rank, ())) for rank in ranks})

    def judge(self) -> Judgement:
        """Judge losses and gradients, each by the words that are known."""
        words = [{rank: [a[part] for a in given if a[part]] for rank, given in self.answers.items()} for part in (0, 1)]
        return together([judge({rank: given for rank, given in each.items() if given}) for each in words])


def is_doubtful(engine: Engine, decided: Decided) -> bool:
    """Return whether one of the harness's own policies is about to act. What a policy of the user's does is no sign of
    a fault, and it may do it in every step."""
    names = {each.policy for each in decided.decision.verdicts}
    return engine.config.elastic.exactness == "strict" and not names.isdisjoint({nonfinite.NAME, spikes.NAME})


def doubts(
    engine: Engine, progress: Progress, attempt: Attempt, table: SlotTable, bad_slots: Set[int]
) -> Generator[Any, None, list[Question]]:
    """Return what has to be computed again before a policy acts. table: of the whole step. bad_slots: those whose loss
    is not finite. Without any, each member computes its neighbour's partial sums; yields the batches. Collective."""
    formed = progress.formed
    assert formed is not None
    if bad_slots:
        shape = engine.batches.shape(progress.version)
        held = enumerate(attempt.placed[member] for member in formed.generation.members)
        owner_of = {lane: owner for owner, ranges in held for lo, hi in ranges for lane in range(lo, hi)}
        lanes = [
            lane
            for lane in range(shape.lanes)
            if not bad_slots.isdisjoint(shape.unit_slots((lane, lane + 1)))
        ]
        first = [((lane, lane + 1), owner_of[lane]) for lane in lanes[:LANES_MAX]]
        return [
            Question(span, owner, {owner: (Answer(losses_word(shape, table, span), 0),)})
            for span, owner in first
        ]
    questions = [Question(span, owner) for span, owner in attempt.plan.cover]
    questions = yield from _ask(engine, progress, questions, 0)
    return [each for each in questions if each.judge().outcome != "same"]


def has_audits(headers: Sequence[Header]) -> bool:
    """Return whether members audit each other in this step. What counts is what the headers say: members may have
    different intervals."""
    return any(header.audited or header.audit for header in headers)


def disputes(formed: Formed, attempt: Attempt, headers: Sequence[Header]) -> tuple[list[Question], bool]:
    """Return the lanes of which an audit gave other bits, and whether every member was audited."""
    if not has_audits(headers):
        return [], False
    found, compared = [], 0
    pairs = audits_due(headers[0].version, 1, [attempt.placed[member] for member in formed.generation.members])
    for lane, owner, auditor in pairs:
        first, again = headers[owner].audited, headers[auditor].audit
        compared += bool(first and again)
        if first and again and first != again:
            answers = {owner: (Answer(0, first),), auditor: (Answer(0, again),)}
            found.append(Question((lane, lane + 1), owner, answers))
    return found, compared == formed.world


def recheck(
    engine: Engine, progress: Progress, questions: Sequence[Question], certified: int | None = None
) -> Iterator[Any]:
    """Have every member compute again what is in doubt, and act on what they find; yields the batches. Returns if all
    agree with what was computed first. Collective. Raises PeerFailed if some do not, which leads to a generation
    without them, UserCodeError if nobody gets the same bits twice, and InfrastructureError if nobody can say who is
    right. certified: if somebody computes wrong, what was committed since that version is in doubt."""
    formed = progress.formed
    assert formed is not None
    if questions:
        for turn in (1, 2) if formed.world == 2 else (1,):  # of two members, one may contradict itself
            questions = yield from _ask(engine, progress, questions, turn)
    lanes = ", ".join(f"{lo}" if hi == lo + 1 else f"{lo}-{hi - 1}" for lo, hi in (each.span for each in questions))
    found, what = together([each.judge() for each in questions]), f"lanes {lanes}" if questions else "all lanes"
    if conclude(engine, progress, found, what, certified).outcome == "random":
        raise impure(f"{what} of step {progress.version} were computed several times, with other gradients each time")


def _ask(
    engine: Engine, progress: Progress, questions: Sequence[Question], turn: int
) -> Generator[Any, None, list[Question]]:
    """Return the questions with everybody's new answers. In turn 0 each owner tells what it has, and its neighbour
    computes it again. In later turns every member computes all of it."""
    formed, partials = progress.formed, progress.partials
    assert formed is not None and partials is not None
    words = torch.zeros(len(questions), 2, len(Answer._fields), dtype=torch.int64)
    for index, question in enumerate(questions):
        if turn == 0 and question.owner == formed.rank:
            known = (
                losses_word(engine.batches.shape(progress.version), partials.table, question.span),
                gradients_word(partials.spans[question.span]),
            )
            words[index, 0] = torch.tensor(known)
        if turn > 0 or (question.owner + 1) % formed.world == formed.rank:
            with contextlib.suppress(OutOfMemory):  # without its words this member has no say
                words[index, 1] = torch.tensor((yield from _compute_again(engine, progress, question.span)))
    failpoint("recheck.computed", progress.version)
    given = [each.view_as(words).tolist() for each in gather(engine, progress, words.view(-1), turn)]
    return [
        question.answered(
            {rank: tuple(Answer(*pair) for pair in rows[index] if any(pair)) for rank, rows in enumerate(given)}
        )
        for index, question in enumerate(questions)
    ]


def _compute_again(engine: Engine, progress: Progress, span: Span) -> Generator[Any, None, Answer]:
    """Compute some lanes and their sum, as if for the first time. Nothing of the step changes."""
    again, shape = engine.new_partials(progress.version), engine.batches.shape(progress.version)
    for lane in range(*span):
        again.add((lane, lane + 1), *(yield from compute_again(engine, progress, (lane, lane + 1))))
    return Answer(losses_word(shape, again.table, span), gradients_word(again.spans[span]))


def conclude(engine: Engine, progress: Progress, found: Judgement, what: str, certified: int | None) -> Judgement:
    """Act on what was found out about a part of a step that was computed again: the same everywhere. Returns it if
    nobody in particular is at fault. Raises as `recheck`."""
    formed, step = progress.formed, progress.version
    assert formed is not None
    members = formed.generation.members
    ill = tuple(members[rank] for rank in found.ill)
    if is_first_fit(formed, found.ill):
        engine.link.send(Rechecked(step, what, formed.world, found.outcome, ill))
    if found.outcome == "undecided":
        reason = (
            f"members computed other bits for {what} of step {step}, each the same again, and no majority says who is "
            f"right: {', '.join(members)}. One of their machines computes wrong"
        )
        engine.link.send(Undecided(reason))
        raise InfrastructureError(reason)
    if found.outcome != "ill":
        return found
    reason = (
        f"{what} of step {step} were computed again on {formed.world} workers, and most have other bits than "
        f"{', '.join(ill)}"
    )
    tell_unfit(engine, formed, found.ill, reason)
    if certified is not None:
        tell_doubt(engine, formed, certified, found.ill, reason)
    raise PeerFailed(reason)


def losses_word(shape: Shape, table: SlotTable, span: Span) -> int:
    """63 bits of the hash over what the slots of some lanes contributed, but for their gradients; never 0."""
    digest = xxhash.xxh3_64()
    for slot in shape.unit_slots(span):
        loss = table.loss_N[slot]
        digest.update(
            f"{'nan' if math.isnan(loss) else float(loss).hex()} {float(table.weight_N[slot]).hex()} ".encode()
        )
        digest.update(table.ids_hash_N[slot].tobytes())
    return digest.intdigest() >> 1 | 1
