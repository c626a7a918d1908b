"""The leader's protocol: (state, event, now) → (state, actions). No I/O, no clock, no randomness.

The agent drives this module with real events; the model checker and the simulator drive the very same one.
A generation is announced, then formed, and ends with the next one:

    announced ──(every member reported)──► formed ──(a member lost, links broke, a join, a removal)──► next one
        └────────(a member lost, links broke)───────────────────────────────────────────────────────► next one

Generation numbers only grow. A generation is *formed* when its digest is published; before that only losses and
broken links replace it, planned changes wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic_harness.membership.decide import Form, Hold, View, decide
from elastic_harness.membership.poison import Failure, How, blame
from elastic_harness.membership.reconcile import reconcile, scattered
from elastic_harness.membership.types import Digest, Generation, Limits, Report, node_of

TROUBLE_PATIENCE = 2  # generations that may break on the same link before that pair is separated …
TROUBLE_MEMORY = 4  # … out of so many; a break long ago says nothing about the link
APART_S = 60.0  # so long two nodes whose network was seen to be cut are kept apart before they are tried again
HEARING_S = 4.0  # so long a node that others cannot reach may take to say that it lives

# ---- events


@dataclass(frozen=True)
class Ready:
    """A worker said hello and is fit to be a member. Each incarnation has its own id."""

    member: str


@dataclass(frozen=True)
class Lost:
    """A worker is gone for good (died, was killed after a hang, left after a removal)."""

    member: str


@dataclass(frozen=True)
class Reported:
    member: str
    report: Report


@dataclass(frozen=True)
class Trouble:
    """A member's exchange broke, or it could not complete its part of the recovery. `peers` as far as known. `cut`: the
    network to them is known to be cut, by what the kernel says, so none of them need be at fault. `holds`: the member
    has the state."""

    member: str
    generation: int
    peers: tuple[str, ...] = ()
    cut: bool = False
    holds: bool = False


@dataclass(frozen=True)
class Committed:
    """A step was committed: from now on the run is born and must never begin at zero unnoticed."""

    step: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint was saved: from now on the run does not begin at zero before those who can read it had time to
    come."""

    step: int


@dataclass(frozen=True)
class Finished:
    """A member committed the last step, or holds it after a recovery: said once in every generation."""

    member: str
    version: int


@dataclass(frozen=True)
class SlotFailed:
    """A member failed while computing a slot."""

    member: str
    step: int
    slot: int
    how: How


@dataclass(frozen=True)
class Overdue:
    """A member was ended because it did not finish a piece of work of a step within the deadline it had: whoever does
    that step now has longer."""

    member: str
    step: int
    deadline_s: float


@dataclass(frozen=True)
class Unfit:
    """A member's canary hash differs from its peers': its arithmetic is not the run's, or with `samples` its data."""

    member: str
    reason: str
    samples: bool = False


@dataclass(frozen=True)
class Scaled:
    """The wanted number of workers changed."""

    target: int


@dataclass(frozen=True)
class Leaving:
    """A member is to be let go at a step boundary: its node was asked to stop. The others go on without it."""

    member: str


@dataclass(frozen=True)
class StopAsked:
    """The whole job is to stop at a step boundary."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = (
    Ready
    | Lost
    | Reported
    | Trouble
    | Committed
    | Saved
    | Finished
    | SlotFailed
    | Overdue
    | Unfit
    | Scaled
    | Leaving
    | StopAsked
    | Tick
)

# ---- actions


@dataclass(frozen=True)
class Announce:
    """Tell every member of this generation, and those of the previous one that are left out."""

    generation: Generation


@dataclass(frozen=True)
class Publish:
    """Send the digest to every member of its generation."""

    digest: Digest
    reason: str


@dataclass(frozen=True)
class Pause:
    """Too few members, or none who can go on: those left abort what they do and wait with their state alive."""

    reason: str


@dataclass(frozen=True)
class Evict:
    """Stop this worker and do not restart it as it is. `samples`: it reads other ones."""

    member: str
    reason: str
    samples: bool = False


@dataclass(frozen=True)
class Poison:
    """The same slot failed on several members: stop the job, it would walk through every worker."""

    step: int
    slot: int
    members: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Done:
    """Every member finished: the job is complete."""

    version: int


@dataclass(frozen=True)
class Stop:
    """Everybody saves and leaves at the next step boundary."""

    reason: str


Action = Announce | Publish | Pause | Evict | Poison | Done | Stop

# ---- state


@dataclass(frozen=True)
class State:
    """Everything the leader knows. `number` is the last generation number ever used, `born` whether any step was
    ever committed (then nobody starts silently from zero), `veterans` who of the newest generation that was formed is
    known to hold the state. `apart`: when two nodes were last seen to be cut from each other. `overdue`: steps that
    members were ended in, and the longest deadline that one had there. `saved`: whether any checkpoint was ever saved.
    `stateless`: members that reported neither state nor a checkpoint while nobody had any, the first at
    `stateless_at`."""

    limits: Limits
    number: int = 0
    born: bool = False
    saved: bool = False
    lineage: int = 0
    from_step: int = 0
    ready: tuple[str, ...] = ()
    first_ready_at: float = 0.0
    generation: Generation | None = None
    previous: Generation | None = None
    formed: bool = False
    ever_formed: bool = False
    paused: str = ""
    reports: tuple[tuple[str, Report], ...] = ()
    finished: tuple[tuple[str, int], ...] = ()
    arrived: tuple[str, ...] = ()
    failed_slots: tuple[Failure, ...] = ()
    overdue: tuple[tuple[int, float], ...] = ()
    veterans: tuple[str, ...] = ()
    broken: tuple[tuple[int, str, str], ...] = ()
    apart: tuple[tuple[float, str, str], ...] = ()
    troubled: tuple[str, ...] = ()
    trouble_at: float | None = None
    trouble_in: int = 0
    leaving: tuple[str, ...] = ()
    stateless: tuple[str, ...] = ()
    stateless_at: float | None = None
    done: bool = False


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """Apply one event. Never raises on late, repeated or unknown input: it is ignored."""
    return steps(state, (event,), now)


def steps(state: State, events: Iterable[Event], now: float) -> tuple[State, tuple[Action, ...]]:
    """Apply events that became known together: what follows is decided once, with all of them in view."""
    if state.done:
        return state, ()
    actions: tuple[Action, ...] = ()
    draft = _Draft(state)
    for event in events:
        more = _take(draft, event, now)
        actions += more
        if any(isinstance(a, Poison | Stop) for a in more):
            return replace(draft.result(), done=True), actions
    state, more = _advance(draft.result(), now)
    return state, actions + more


def timed(state: State) -> bool:
    """Whether anything may follow from time alone."""
    waits = state.generation is None or state.trouble_at is not None or state.paused or state.apart
    return not state.done and bool(waits)


class _Draft:
    """A state while events are applied to it. What is looked up by member is in dicts and sets here, in the same order:
    an event costs the same however many members there are. `state` holds everything else."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.ready = dict.fromkeys(state.ready)
        self.reports = dict(state.reports)
        self.finished = dict(state.finished)
        self.arrived = dict.fromkeys(state.arrived)
        self.broken = set(state.broken)
        self.troubled = dict.fromkeys(state.troubled)
        self.leaving = dict.fromkeys(state.leaving)
        self._gone: set[str] = set()
        self._recent = False  # whether only recent breaks are left

    def remove(self, member: str) -> None:
        for by_member in (self.ready, self.reports, self.finished, self.leaving):
            by_member.pop(member, None)
        self._gone.add(member)

    def add_broken(self, pairs: Iterable[tuple[int, str, str]]) -> None:
        self._forget_gone()
        if not self._recent:
            self._recent = True
            self.broken = {b for b in self.broken if b[0] > self.state.number - TROUBLE_MEMORY}
        self.broken.update(pairs)

    def _forget_gone(self) -> None:
        if self._gone:
            self.broken = {b for b in self.broken if self._gone.isdisjoint(b[1:])}
            self._gone.clear()

    def result(self) -> State:
        self._forget_gone()
        return replace(
            self.state,
            ready=tuple(self.ready),
            reports=tuple(self.reports.items()),
            finished=tuple(self.finished.items()),
            arrived=tuple(self.arrived),
            broken=tuple(sorted(self.broken)),
            troubled=tuple(self.troubled),
            leaving=tuple(self.leaving),
        )


def _take(draft: _Draft, event: Event, now: float) -> tuple[Action, ...]:
    state = draft.state
    match event:
        case Ready(member):
            if not draft.ready:
                draft.state = replace(state, first_ready_at=now)
            draft.ready[member] = None
        case Lost(member):
            waited_for = _still_needed(draft, member)
            draft.remove(member)
            if waited_for and state.trouble_at is None and state.previous is not None:
                draft.state = replace(state, trouble_at=now, trouble_in=state.previous.number)
        case Unfit(member, reason, samples):
            if member in draft.ready:
                draft.remove(member)
                return (Evict(member, reason, samples),)
        case Reported(member, report):
            if _current(draft, member, report.generation) and not state.formed:
                draft.reports.pop(member, None)
                draft.reports[member] = report
        case Trouble(member, generation, peers, cut, holds):
            if _current(draft, member, generation) or _still_before(draft, member, generation):
                if cut:
                    state = _note_cuts(state, member, peers, now)
                if holds and member not in state.veterans:
                    state = replace(state, veterans=(*state.veterans, member))
                draft.state = state
                _note_trouble(draft, member, generation, peers)
                first_at = now if state.trouble_at is None else state.trouble_at
                draft.state = replace(state, trouble_at=first_at, trouble_in=max(state.trouble_in, generation))
        case Committed():
            draft.state = replace(state, born=True)
        case Saved():
            draft.state = replace(state, saved=True)
        case Finished(member, version):
            if member in draft.ready:
                draft.finished.pop(member, None)
                draft.finished[member] = version
                if state.formed:
                    draft.arrived[member] = None
            draft.state = replace(state, born=True)
        case SlotFailed(member, at_step, slot, how):
            recent = tuple(failed for failed in state.failed_slots if failed[0] >= at_step - 1)
            draft.state = replace(state, failed_slots=(*recent, (at_step, slot, member, how)))
            members, reason = blame(draft.state.failed_slots, at_step, slot, dict(state.overdue).get(at_step, 0.0))
            return (Poison(at_step, slot, members, reason),) if members else ()
        case Overdue(_, at_step, deadline_s):
            had_s = max(deadline_s, dict(state.overdue).get(at_step, 0.0))
            draft.state = replace(state, overdue=tuple(sorted({**dict(state.overdue), at_step: had_s}.items())))
        case Leaving(member):
            if member in draft.ready:
                draft.leaving[member] = None
        case StopAsked(reason):
            return (Stop(reason),)
        case Scaled(target):
            limits = state.limits
            target = max(limits.least, min(target, limits.max_workers))
            draft.state = replace(state, limits=replace(limits, target=target))
        case Tick():
            pass
    return ()


def _current(draft: _Draft, member: str, generation: int) -> bool:
    current = draft.state.generation
    return (
        current is not None and current.number == generation and member in current.member_set and member in draft.ready
    )


def _still_before(draft: _Draft, member: str, generation: int) -> bool:
    """Until a planned generation is formed its members, and those it leaves out, go on stepping in an earlier one."""
    state = draft.state
    current = state.generation
    planned = current is not None and not current.urgent and not state.formed
    return planned and generation < state.number and member in draft.ready


def _still_needed(draft: _Draft, member: str) -> bool:
    """Whether the members of a planned generation may be waiting, at the boundary before it, for one it leaves out.
    If that one has just left there, the generation forms within the grace and nothing is aborted."""
    current, previous = draft.state.generation, draft.state.previous
    if current is None or previous is None or current.urgent or draft.state.formed:
        return False
    return member in previous.member_set and member in draft.ready


def _note_cuts(state: State, member: str, peers: tuple[str, ...], now: float) -> State:
    """Remember which nodes are cut from each other. That is known, and needs no second try."""
    seen = {(a, b): at for at, a, b in state.apart if now < at + APART_S}
    node, others = node_of(member), {node_of(p) for p in peers}
    seen |= {(min(node, other), max(node, other)): now for other in others - {node}}
    return replace(state, apart=tuple(sorted((at, a, b) for (a, b), at in seen.items())))


def _note_trouble(draft: _Draft, member: str, generation: int, peers: tuple[str, ...]) -> None:
    """Remember who cannot talk to whom, once per generation. A peer that has reported trouble itself has given up
    its connections: that it is silent now says nothing about the link to it. Of nodes that are kept apart as such
    nothing more need be known."""
    apart = {frozenset(pair) for _, *pair in draft.state.apart}
    suspects = [p for p in peers if p in draft.ready and p != member and p not in draft.troubled]
    accused = [p for p in suspects if frozenset((node_of(member), node_of(p))) not in apart]
    draft.add_broken((generation, min(member, p), max(member, p)) for p in accused)
    draft.troubled[member] = None


def _advance(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """Whatever follows from the state as it now is."""
    current = state.generation
    if current and _everyone_arrived(state, current):
        version = max(v for _, v in state.finished)
        return replace(state, done=True), (Done(version),)
    if current and state.formed and state.leaving and current.member_set.issubset(state.leaving):
        return replace(state, done=True), (Stop("all nodes were asked to stop"),)

    lost = current is not None and not current.member_set.issubset(state.ready)
    reform = state.trouble_at is not None and now >= state.trouble_at + state.limits.trouble_grace_s
    reform = reform or (current is not None and state.paused != "")  # everybody has aborted what they did in it
    if current is None or lost or reform or (state.formed and state.trouble_at is None):
        state, actions = _propose(state, now, reform)
        if actions:
            return state, actions
    current = state.generation
    if current and not state.formed and not state.paused and len(state.reports) == len(current.members):
        return _form(state, current, now)
    return state, ()


def _everyone_arrived(state: State, current: Generation) -> bool:
    """Whether every member has finished in this very generation: a word given in an earlier one does not count,
    because the rank that was to write the last line and save the result may have died since."""
    if not state.formed or len(state.arrived) < len(current.members):
        return False
    return current.member_set.issubset(state.arrived) and current.member_set.issubset(m for m, _ in state.finished)


def _propose(state: State, now: float, reform: bool) -> tuple[State, tuple[Action, ...]]:
    counts: dict[frozenset[str], int] = {}
    for _, a, b in state.broken:
        counts[frozenset((a, b))] = counts.get(frozenset((a, b)), 0) + 1
    apart = frozenset(frozenset(pair) for at, *pair in state.apart if now < at + APART_S)
    view = View(
        current=state.generation,
        ready=state.ready,
        finished=frozenset(m for m, _ in state.finished),
        broken=frozenset(p for p, n in counts.items() if n >= TROUBLE_PATIENCE),
        reform=reform,
        leaving=frozenset(state.leaving),
        first_ready_at=state.first_ready_at,
        veterans=frozenset({*state.veterans, *(m for m, report in state.reports if report.version >= 0)}),
        apart=apart,
        unheard=_unheard(state, apart),
        heard_out=state.trouble_at is None or now >= state.trouble_at + HEARING_S,
        stateless=frozenset(state.stateless if _others_may_come(state, now) else ()),
        waited=bool(state.paused or state.stateless),
        held=_held(state) if state.limits.shards > 1 else {},
    )
    outcome = decide(now, view, state.limits)
    if not isinstance(outcome, Form):
        lost = state.generation is not None and not state.generation.member_set.issubset(state.ready)
        stands = state.generation is not None and not lost and not reform
        if isinstance(outcome, Hold) and outcome.reason != state.paused and not stands:
            return replace(state, paused=outcome.reason), (Pause(outcome.reason),)
        return state, ()
    generation = Generation(state.number + 1, **vars(outcome))
    state = replace(
        state,
        number=generation.number,
        previous=state.generation,
        generation=generation,
        formed=False,
        paused="",
        reports=(),
        arrived=(),
        troubled=(),
        trouble_at=None,
        trouble_in=0,
    )
    return state, (Announce(generation),)


def _held(state: State) -> dict[str, int]:
    """The shard that each member holds: as it reports, or else as its generation gave it."""
    given = state.generation.shard_of if state.generation is not None else {}
    return given | {member: report.shard for member, report in state.reports if report.version >= 0}


def _unheard(state: State, apart: frozenset[frozenset[str]]) -> frozenset[str]:
    """Nodes of the generation in trouble that are cut from others in it and have not said anything themselves: it may
    be that nobody reaches them, the store included. Who has finished exchanges nothing, and has nothing to say."""
    if state.generation is None or state.trouble_at is None:
        return frozenset()
    inside = {node_of(m) for m in state.generation.members}
    spoke = {node_of(m) for m in (*state.troubled, *dict(state.reports), *dict(state.finished))}
    return frozenset(node for pair in apart if pair <= inside for node in pair if node not in spoke)


def _others_may_come(state: State, now: float) -> bool:
    """Whether it is too early to begin at zero, though nobody here has anything: others may have a checkpoint."""
    return state.stateless_at is None or now < state.stateless_at + state.limits.join_timeout_s


def _form(state: State, generation: Generation, now: float) -> tuple[State, tuple[Action, ...]]:
    if generation.shards and scattered(generation, dict(state.reports), state.lineage):
        return _propose(state, now, True)
    digest, reason = reconcile(
        generation, dict(state.reports), born=state.born, lineage=state.lineage, from_step=state.from_step
    )
    alone = all(node_of(m) == "" for m in generation.members)
    begins = any(source.kind == "init" for source in digest.sources.values())
    if begins and state.saved and not alone and _others_may_come(state, now):
        stateless_at = now if state.stateless_at is None else state.stateless_at
        stateless = tuple(dict.fromkeys((*state.stateless, *generation.members)))
        return _propose(replace(state, stateless=stateless, stateless_at=stateless_at), now, True)
    digest = replace(digest, overdue=tuple(pair for pair in state.overdue if pair[0] >= digest.version))
    state = replace(
        state,
        formed=True,
        ever_formed=True,
        veterans=tuple(m for m in generation.members if digest.sources[m].kind != "state"),
        finished=tuple(each for each in state.finished if each[0] not in digest.sources or each[1] == digest.version),
        born=state.born or digest.version > 0,
        reports=(),
        # everyone reached the boundary, so whatever went wrong before it no longer matters
        trouble_at=state.trouble_at if state.trouble_in == generation.number else None,
        lineage=digest.lineage,
        from_step=digest.from_step,
        overdue=digest.overdue,
        stateless=(),
        stateless_at=None,
    )
    return state, (Publish(digest, reason),)
