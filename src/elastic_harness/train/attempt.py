"""A worker's share of one step: which lanes, which partial sums go where, and the exchange that is under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from elastic_harness.comm.exchange import Add, Exchange
from elastic_harness.comm.placement import Ranges, deal_to_rows, merge_ranges
from elastic_harness.comm.plan import Plan, make_plan
from elastic_harness.comm.tree import Span
from elastic_harness.contract.board import Phase
from elastic_harness.errors import PeerFailed, Unreachable
from elastic_harness.membership.types import Replica, node_of
from elastic_harness.omissions import Omitted
from elastic_harness.train.apply import Record
from elastic_harness.train.audits import Audit, audits_due, resolved
from elastic_harness.train.ending import ends
from elastic_harness.train.engine import Engine
from elastic_harness.train.gate import canaries_due
from elastic_harness.train.header import FIXED_WORDS, Header, combine
from elastic_harness.train.lane_times import LaneTimes
from elastic_harness.train.layout import Layout
from elastic_harness.train.partials import Partials, SlotTable
from elastic_harness.train.placing import UNASKED, Paces, PlacementFacts, handicap
from elastic_harness.train.progress import Formed, Progress


@dataclass
class Attempt:
    """One attempt at a step. canary_due: this member computes lane 0 once more, for comparison with `reference`, and
    with what it gave the first time if that was here."""

    lanes: tuple[int, ...]  # those that this member still has to compute
    placed: dict[str, Ranges]  # by member, all lanes that it holds once the step's slots are done
    plan: Plan
    exchange: Exchange
    layout: Layout
    step: int
    rank: int
    lineage: int
    canary_due: bool = False
    reference: int | None = None  # the rank whose canary and state count, if one was compared before
    canary: int = 0  # the word of its gradients, once computed
    canary_batch: int = 0  # the word of its batch
    newcomers: frozenset[int] = frozenset()  # ranks of which nothing was committed yet
    omitted: Omitted = field(default_factory=Omitted)  # what nobody computes of this step
    audits: tuple[Audit, ...] = ()  # of all members, in this step
    audited: int = 0  # the word of the lane of this member's that another one audits, once computed
    audit: int = 0  # the word of the lane that it audits itself
    lane_times: LaneTimes = field(default_factory=LaneTimes)

    def is_compared(self, headers: Sequence[Header]) -> bool:
        """Whether this member's canary was compared: with that of the member that counts, or of any if all are new. A
        member that is alone has only its own first time."""
        others = range(len(headers)) if self.reference is None else [self.reference]
        compared = [rank for rank in others if rank != self.rank and headers[rank].canary]
        return bool(self.canary) and (bool(compared) or len(headers) == 1)

    def send_if_finished(self, span: Span, partials: Partials) -> None:
        """If `span` is one of this member's partial sums on the wire, flatten it and let it go."""
        if (span, self.rank) in self.plan.cover:
            flat = self.exchange.lend_vector()
            self.layout.flatten(partials.spans[span], flat)
            self.exchange.send_partial(span, flat)


def place(engine: Engine, progress: Progress) -> Attempt:
    """Deal the lanes that are missing, plan the exchange and post its receives. Every member comes to the same plan
    from the same digest."""
    formed, partials = progress.formed, progress.partials
    assert formed is not None and partials is not None
    members, lanes = formed.generation.members, partials.table.lanes
    unverified = formed.unverified(partials.step) if engine.canary else ()
    canaries, reference = canaries_due(unverified, formed.world)
    held = formed.digest.lanes if partials.step == formed.digest.version else {}
    facts = PlacementFacts(lanes, formed.world, canaries, formed.late(partials.step), progress.paces.fewer_of(lanes))
    fewer = handicap(facts)
    finished, rows = tuple(sorted(held.items())), formed.generation.rows
    declined = formed.digest.declined if partials.step == formed.digest.version else ()
    placed, plan = plan_step(members, rows, lanes, finished, fewer, engine.layout.elements, formed.rank, declined)
    exchange = Exchange(
        formed.transport,
        plan,
        lanes,
        partials.step,
        formed.rank,
        engine.layout.elements,
        FIXED_WORDS + SlotTable.size(partials.table.slots, lanes, len(engine.layout.entries)),
        engine.pool,
        engine.board.wait_for,
    )
    done = {lane for lo, hi in partials.held() for lane in range(lo, hi)}
    own = [lane for lo, hi in placed[members[formed.rank]] for lane in range(lo, hi) if lane not in done]
    step, lineage = partials.step, formed.digest.lineage
    attempt = Attempt(tuple(own), placed, plan, exchange, engine.layout, step, formed.rank, lineage)
    attempt.reference = reference
    attempt.newcomers = frozenset(unverified)
    alone = formed.world == 1 and not progress.verified and engine.canary
    attempt.canary_due = formed.rank in canaries or alone
    attempt.omitted = engine.omitted(formed.digest, partials.step)
    # An audit of nothing would certify the step, and those before it.
    if engine.config.elastic.exactness == "strict" and not attempt.omitted.slots:
        interval = resolved(engine.config.health.audit_interval, lanes, formed.world)
        attempt.audits = audits_due(partials.step, interval, [placed[member] for member in members])
    for span in tuple(partials.spans):
        attempt.send_if_finished(span, partials)
    return attempt


@lru_cache(maxsize=4)
def plan_step(
    members: tuple[str, ...],
    rows: tuple[Replica, ...],
    lanes: int,
    held: tuple[tuple[str, Ranges], ...],
    handicap: tuple[int, ...],
    elements: int,
    rank: int | None = None,
    declined: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> tuple[dict[str, Ranges], Plan]:
    """Who holds which lanes in the end, and the exchange that follows, for this rank. The same in every undisturbed
    step."""
    finished = dict(held)
    nodes = tuple(map(node_of, members))
    order, fewer = in_dealing_order(nodes, rows), dict(zip(members, handicap, strict=True))
    dealt = deal_to_rows(lanes, order, finished, fewer, dict(declined))
    placed = {m: merge_ranges(finished.get(m, ()), dealt.get(m, ())) for m in members}
    return placed, make_plan(members, nodes, lanes, placed, elements, rank)


def in_dealing_order(nodes: Sequence[str], rows: Sequence[Replica]) -> list[Replica]:
    """Return the rows in the order in which lanes are dealt. Rows of a node are dealt neighbouring lanes, whatever
    their ranks: so few sums have to leave it. nodes: by rank."""
    return [row for node in dict.fromkeys(nodes) for row in rows if node_of(row[0]) == node]


def paces_after(engine: Engine, progress: Progress, attempt: Attempt, headers: Sequence[Header]) -> Paces:
    """Return what is known of the members' speed after a step that commits."""
    formed = progress.formed
    assert formed is not None
    if attempt.omitted.slots or engine.batches.is_short(attempt.step):
        return progress.paces  # slots without samples say nothing
    members = formed.generation.members
    rank_of = {member: rank for rank, member in enumerate(members)}
    order = in_dealing_order(tuple(map(node_of, members)), formed.generation.rows)
    rows = [[rank_of[member] for member in row] for row in order]
    dealt = [sum(hi - lo for lo, hi in attempt.placed[member]) for member in members]
    paces = [header.lane_us if header.by_speed else UNASKED for header in headers]
    return progress.paces.after(paces, dealt, rows)


def note_paces(engine: Engine, formed: Formed, attempt: Attempt, headers: Sequence[Header]) -> None:
    """Look at the paces of a step that was committed. A step in which slots are empty or omitted says nothing, nor does
    the first one of a generation: members join in it, and compute canaries."""
    step, members = headers[0].version, formed.generation.members
    if step == formed.digest.version:
        engine.pace.begin()
        return
    shape = engine.batches.shape(step)
    lanes = [sum(hi - lo for lo, hi in attempt.placed[member]) for member in members]
    comparable = not engine.batches.is_short(step) and not attempt.omitted.slots
    engine.pace.note(step, formed.rank, headers, lanes, shape.slots / shape.lanes if comparable else 0.0)


def finish_exchange(engine: Engine, progress: Progress, attempt: Attempt) -> list[Header]:
    """Send this member's header, receive all others' and the finished sum. Collective. A broken connection or a peer
    that never comes raises PeerFailed naming whom this member was waiting for, or Unreachable naming whose way here is
    cut."""
    formed, partials = progress.formed, progress.partials
    assert formed is not None and partials is not None
    generation, timeout_s = formed.generation, engine.config.elastic.exchange_timeout_s
    engine.board.show(Phase.EXCHANGE, partials.step, deadline_s=2 * timeout_s)
    asked, shape = engine.link.audit_asked, engine.batches.shape(partials.step)
    state = engine.watch.checked_word(f"in step {partials.step}")
    header = Header(
        generation=generation.number,
        version=partials.step,
        switch=engine.link.planned(generation.number),
        stop=engine.link.leave_asked is not None,
        canary=attempt.canary,
        canary_batch=attempt.canary_batch,
        state=state if engine.config.elastic.exactness == "strict" else 0,
        table=partials.table,
        ends=ends(engine.link.end_asked, partials.step),
        audited=attempt.audited,
        audit=attempt.audit,
        certain=progress.certain,
        asked=asked if asked > progress.audited and not attempt.omitted.slots else 0,
        by_speed=engine.config.elastic.deal_by_speed,
        measures=engine.measures.word,
        validation=progress.measured.validation,
        **attempt.lane_times.per_lane_us(shape),
    )

    def adder(packed: list[Tensor]) -> Add:
        return Adder(engine.layout, combine([Header.unpack(w, partials.table) for w in packed]))

    try:
        packed = attempt.exchange.finish(header.pack(), adder, timeout_s)
    except Unreachable as failure:
        failure.name(generation.members)
        raise
    except PeerFailed as failure:
        waiting = tuple(generation.members[r] for r in attempt.exchange.waiting_for())
        raise PeerFailed(str(failure), waiting) from failure
    return [Header.unpack(words, partials.table) for words in packed]


def record_of(formed: Formed, attempt: Attempt, headers: list[Header]) -> Record:
    """The outcome of the completed exchange."""
    computed_by = tuple((member, lo, hi) for member in formed.generation.members for lo, hi in attempt.placed[member])
    last, flat = any(header.ends for header in headers), attempt.exchange.result
    generation, step, omitted = formed.generation, headers[0].version, attempt.omitted
    validation = next((header.validation for header in headers if header.validation is not None), None)
    table, replicas = combine(headers), generation.replicas
    return Record(step, generation.number, flat, table, computed_by, last, replicas, omitted, validation)


class Adder:
    """Adds two spans' received elements, skipping parameters that are absent in one of them. table: of all lanes of
    the spans that are to be added, at least."""

    def __init__(self, layout: Layout, table: SlotTable) -> None:
        self._layout = layout
        self._table = table

    def __call__(self, out: Tensor, first: Span, a: Tensor, second: Span, b: Tensor, lo: int) -> None:
        in_first, in_second = self._table.present_in(first), self._table.present_in(second)
        if in_first.all() and in_second.all():
            torch.add(a, b, out=out)
            return
        for index, entry in enumerate(self._layout.entries):
            at = slice(max(entry.lo, lo) - lo, min(entry.hi, lo + out.numel()) - lo)
            if at.start >= at.stop:
                continue
            if in_first[index] and in_second[index]:
                torch.add(a[at], b[at], out=out[at])
            elif in_first[index] or in_second[index]:
                out[at].copy_((a if in_first[index] else b)[at])
            else:
                out[at].zero_()
