"""The leader's protocol: (state, event, now) → (state, actions). No I/O, no clock, no randomness.

The agent drives this module with real events. The model checker and the simulator drive the very same module. A
generation is announced, then formed, and ends with the next one:

    announced ──(every member reported)──► formed ──(a member lost, links broke, a join, a removal)──► next one
        └────────(a member lost, links broke)───────────────────────────────────────────────────────► next one

Generation numbers only grow. A generation is *formed* when its digest is published. Before that only a loss or a broken
link replaces it, or the leader itself, if the reports show that its members cannot go on like this. Planned changes
wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elastic_harness.membership.decide import Form, View, decide
from elastic_harness.membership.decide import Pause as Pause
from elastic_harness.membership.poison import FOR_MEMORY, Failure, How, blame
from elastic_harness.membership.reconcile import declined_by_all, reconcile, scattered
from elastic_harness.membership.types import Digest, Generation, Limits, Report, node_of
from elastic_harness.omissions import Entry, no_help, since
from elastic_harness.shape import UNTOLD

TROUBLE_PATIENCE = 2  # a pair of members is separated when so many generations broke on the link between them …
TROUBLE_MEMORY = 4  # … out of so many; a break long ago says nothing about the link
APART_S = 60.0  # two nodes whose network was seen to be cut are kept apart for so long, then they are tried again
HEARING_S = 4.0  # a node that others cannot reach has so long to say that it lives
REPLACED_S = 600.0  # from one slow member's replacement to the next: slowness that goes on has another cause
LEAVING_S = 0.3  # notices that come within so long of the first count together: perhaps the whole job has to go

# ---- events


@dataclass(frozen=True)
class Ready:
    """A worker said hello and is fit to be a member. Each incarnation of a worker has its own id."""

    member: str


@dataclass(frozen=True)
class Lost:
    """A worker is gone for good (died, was killed after a hang, left after a removal)."""

    member: str


@dataclass(frozen=True)
class Reported:
    """A member sent its report for a generation."""

    member: str
    report: Report


@dataclass(frozen=True)
class Trouble:
    """A member's exchange broke, or the member could not complete its part of the recovery."""

    member: str
    generation: int
    peers: tuple[str, ...] = ()  # that it could not reach, as far as known
    cut: bool = False  # the kernel says that the network to them is cut, so none of them need be at fault
    holds: bool = False  # the member has the state
    why: str = "the exchange broke"


@dataclass(frozen=True)
class Committed:
    """A step was committed. From now on the run is born, and must never begin at zero unnoticed."""

    step: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint was saved. From now on the run does not begin at zero before the nodes that can read the checkpoint
    had time to come."""

    step: int


@dataclass(frozen=True)
class Finished:
    """A member committed the last step, or holds it after a recovery. It says so once in every generation."""

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
    """A member was ended because it did not finish a piece of work of a step within its deadline. The next members at
    that step have longer."""

    member: str
    step: int
    deadline_s: float


@dataclass(frozen=True)
class Unfit:
    """A member's canary or state differs from its peers': its arithmetic is not the run's, or with `samples` its data
    is not."""

    member: str
    reason: str
    samples: bool = False


@dataclass(frozen=True)
class Doubted:
    """What the run has done since a version is in doubt, because a machine computed wrong and was found out later, or
    because a policy wants to go back."""

    lineage: int  # to which the doubt applies
    version: int  # the newest one that nobody doubts
    reason: str
    unfit: tuple[str, ...] = ()  # members of which is known that they compute wrong
    omissions: tuple[Entry, ...] = ()  # of a policy: what the run omits from now on


@dataclass(frozen=True)
class Scaled:
    """The wanted number of workers changed."""

    target: int


@dataclass(frozen=True)
class Leaving:
    """A member is to leave at a step boundary, because its node was asked to stop. The others go on without it."""

    member: str


@dataclass(frozen=True)
class Slow:
    """A member is slower than the others for long, or is so no longer (`over`). Another one is to take its place."""

    member: str
    over: bool = False


@dataclass(frozen=True)
class DrainAsked:
    """A node is to leave at a step boundary. Another node asks for that."""

    node: str


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
    | Doubted
    | Scaled
    | Leaving
    | Slow
    | DrainAsked
    | StopAsked
    | Tick
)

# ---- actions


@dataclass(frozen=True)
class Announce:
    """Tell every member of this generation, and the members of the previous one that it leaves out."""

    generation: Generation


@dataclass(frozen=True)
class Publish:
    """Send the digest to every member of its generation."""

    digest: Digest
    reason: str


@dataclass(frozen=True)
class Evict:
    """Stop this worker and do not restart it as it is. `samples`: it reads other samples than its peers."""

    member: str
    reason: str
    samples: bool = False


@dataclass(frozen=True)
class RollBack:
    """Start these members again. What the run did beyond `version` does not count any more: `lineage` begins there."""

    members: tuple[str, ...]
    lineage: int
    version: int
    reason: str
    omissions: tuple[Entry, ...] = ()  # what is omitted from now on, besides what was


@dataclass(frozen=True)
class GiveUp:
    """Stop the job: going back once more would not help."""

    reason: str


@dataclass(frozen=True)
class Poison:
    """Stop the job. The same slot failed on several members, and would end every worker that computes it."""

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
    """All members save and leave at the next step boundary on which all agree."""

    reason: str


@dataclass(frozen=True)
class Drain:
    """This node leaves at a step boundary."""

    node: str


Action = Announce | Publish | Pause | Evict | RollBack | GiveUp | Poison | Done | Stop | Drain

# ---- state


@dataclass(frozen=True)
class State:
    """Everything the leader knows."""

    limits: Limits
    number: int = 0  # the last generation number ever used
    born: bool = False  # a step was committed at some time; then nobody starts silently from zero
    saved: bool = False  # a checkpoint was saved at some time
    lineage: int = 0  # the newest one, …
    from_step: int = 0  # … and the step at which it began
    doubts: tuple[tuple[int, int], ...] = ()  # what lineages before this one did beyond this version never counts
    omissions: tuple[Entry, ...] = ()  # of all rollbacks by a policy
    ready: tuple[str, ...] = ()  # living, admitted members, oldest first
    first_ready_at: float = 0.0  # when a member became ready while no other was
    generation: Generation | None = None  # the newest one
    previous: Generation | None = None  # the one before it
    formed: bool = False  # the newest generation is formed
    ever_formed: bool = False  # some generation was
    paused: str = ""  # why no generation can go on; "": one can
    reports: tuple[tuple[str, Report], ...] = ()  # for the newest generation, until it is formed
    finished: tuple[tuple[str, int], ...] = ()  # members that finished, and at which version
    arrived: tuple[str, ...] = ()  # … that said so in the newest generation
    failed_slots: tuple[Failure, ...] = ()  # the recent ones
    overdue: tuple[tuple[int, float], ...] = ()  # steps that members were ended in, and the longest deadline there
    veterans: tuple[str, ...] = ()  # members that are known to hold the state, since a generation was last formed
    broken: tuple[tuple[int, str, str], ...] = ()  # a generation, and two members of it whose link broke
    apart: tuple[tuple[float, str, str], ...] = ()  # two nodes, and when they were last seen to be cut from each other
    troubled: tuple[str, ...] = ()  # members that reported trouble since the newest generation was announced
    trouble_at: float | None = None  # when the trouble began that the next generation is to end
    trouble_in: int = 0  # the newest generation with that trouble
    trouble_why: str = ""  # what the first member that told of it says
    leaving: tuple[str, ...] = ()  # members that are to leave at a step boundary
    leaving_at: float | None = None  # when the first of them was told of
    slow: tuple[str, ...] = field(default=(), metadata=UNTOLD)  # members that are to be replaced, oldest news first
    replaced_at: float | None = field(default=None, metadata=UNTOLD)  # when the last of them was
    stateless: tuple[str, ...] = ()  # members that reported no state and no checkpoint, while nobody had any
    stateless_at: float | None = None  # when the first of them did
    unable: tuple[str, ...] = ()  # members of which none has the memory for some slot of the running step
    split_at: float | None = field(default=None, metadata=UNTOLD)  # since when a cut parts the holders of all shards
    done: bool = False  # the job is over; the leader ignores all events


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """Apply one event. Ignore late, repeated and unknown input; never raise on it."""
    return steps(state, (event,), now)


def steps(state: State, events: Iterable[Event], now: float) -> tuple[State, tuple[Action, ...]]:
    """Apply events that became known together. The leader decides once, with all of them in view."""
    if state.done:
        return state, ()
    actions: tuple[Action, ...] = ()
    draft = _Draft(state)
    for event in events:
        more = _apply(draft, event, now)
        actions += more
        if any(isinstance(a, Poison | GiveUp | Stop) for a in more):
            return replace(draft.result(), done=True), actions
    state, more = _advance(draft.result(), now)
    return state, actions + more


def timed(state: State) -> bool:
    """Return whether anything may follow from time alone."""
    waits = state.generation is None or state.trouble_at is not None or state.paused or state.apart
    return not state.done and bool(waits or state.leaving or state.slow)


class _Draft:
    """A state while events are applied to it. Everything that is looked up by member is in dicts and sets here, in the
    same order. So an event costs the same however many members there are. `state` holds everything else."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.ready = dict.fromkeys(state.ready)
        self.reports = dict(state.reports)
        self.finished = dict(state.finished)
        self.arrived = dict.fromkeys(state.arrived)
        self.broken = set(state.broken)
        self.troubled = dict.fromkeys(state.troubled)
        self.leaving = dict.fromkeys(state.leaving)
        self.slow = dict.fromkeys(state.slow)
        self._gone: set[str] = set()
        self._recent = False  # `broken` has only recent breaks

    def remove(self, member: str) -> None:
        """Forget a member that is gone for good. Its broken links are dropped later, for all such members at once."""
        for by_member in (self.ready, self.reports, self.finished, self.leaving, self.slow):
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
            slow=tuple(self.slow),
        )


def _apply(draft: _Draft, event: Event, now: float) -> tuple[Action, ...]:
    """Note one event in the draft. Return the actions that follow from it alone; `_advance` finds the others."""
    state = draft.state
    match event:
        case Ready(member):
            if not draft.ready:
                draft.state = replace(state, first_ready_at=now)
            draft.ready[member] = None
        case Lost(member):
            waited_for = _still_needed(draft, member)
            draft.remove(member)
            # Others may wait for this member at the boundary: after the grace a new generation frees them.
            if waited_for and state.trouble_at is None and state.previous is not None:
                draft.state = replace(state, trouble_at=now, trouble_in=state.previous.number)
        case Unfit(member, reason, samples):
            if member in draft.ready:
                draft.remove(member)
                return (Evict(member, reason, samples),)
        case Doubted(lineage, version, reason, unfit, omissions):
            known = any(before > lineage and reached <= version for before, reached in state.doubts)
            if lineage <= state.lineage and not known and (lineage == state.lineage or state.from_step > version):
                if why := no_help(state.omissions, omissions):
                    return (GiveUp(f"{reason}. {why}"),)
                # State of an older lineage does not count, so this holds whatever becomes of the members.
                begun = state.lineage + 1
                doubts = (*state.doubts, (begun, version))
                added = since(omissions, begun)
                every = tuple(sorted({*state.omissions, *added}))
                draft.state = replace(state, lineage=begun, from_step=version, doubts=doubts, omissions=every)
                involved = tuple(m for m in draft.ready if _may_have_state(state, m))
                for member in involved:
                    draft.remove(member)
                evicted = tuple(Evict(m, reason) for m in involved if m in unfit)
                again = tuple(m for m in involved if m not in unfit)
                return (*evicted, RollBack(again, begun, version, reason, added))
        case Reported(member, report):
            if _current(draft, member, report.generation) and not state.formed:
                draft.reports.pop(member, None)
                draft.reports[member] = report
        case Trouble(member, generation, peers, cut, holds, why):
            # Trouble of an earlier generation counts only while this member may still step in it.
            if _current(draft, member, generation) or _still_before(draft, member, generation):
                if cut:
                    state = _note_cuts(state, member, peers, now)
                if holds and member not in state.veterans:
                    state = replace(state, veterans=(*state.veterans, member))
                draft.state = state
                _note_trouble(draft, member, generation, peers)
                first_at = now if state.trouble_at is None else state.trouble_at
                trouble_in = max(state.trouble_in, generation)
                first_why = state.trouble_why or why
                draft.state = replace(state, trouble_at=first_at, trouble_in=trouble_in, trouble_why=first_why)
        case Committed():
            draft.state = replace(state, born=True)
        case Saved():
            draft.state = replace(state, saved=True)
        case Finished(member, version):
            if member in draft.ready:
                draft.finished.pop(member, None)
                draft.finished[member] = version
                # Word from before the generation formed is of an earlier one: see _everyone_arrived.
                if state.formed:
                    draft.arrived[member] = None
            draft.state = replace(state, born=True)
        case SlotFailed(member, at_step, slot, how):
            # Members are at most one step apart, so what failed in older steps is settled.
            recent = tuple(failed for failed in state.failed_slots if failed[0] >= at_step - 1)
            draft.state = replace(state, failed_slots=(*recent, (at_step, slot, member, how)))
            members, reason = blame(draft.state.failed_slots, at_step, slot, dict(state.overdue).get(at_step, 0.0))
            return (Poison(at_step, slot, members, reason),) if members else ()
        case Overdue(_, at_step, deadline_s):
            had_s = max(deadline_s, dict(state.overdue).get(at_step, 0.0))
            draft.state = replace(state, overdue=tuple(sorted({**dict(state.overdue), at_step: had_s}.items())))
        case Leaving(member):
            if member in draft.ready:
                if not draft.leaving:
                    draft.state = replace(state, leaving_at=now)
                draft.leaving[member] = None
        case Slow(member, over):
            draft.slow.pop(member, None)
            if member in draft.ready and not over:
                draft.slow[member] = None
        case DrainAsked(node):
            return (Drain(node),)
        case StopAsked(reason):
            return (Stop(reason),)
        case Scaled(target):
            limits = state.limits
            target = max(limits.least, min(target, limits.max_workers))
            draft.state = replace(state, limits=replace(limits, target=target), unable=())
        case Tick():
            pass
    return ()


def _may_have_state(state: State, member: str) -> bool:
    known = (state.generation, state.previous)
    return member in state.veterans or any(each is not None and member in each.member_set for each in known)


def _current(draft: _Draft, member: str, generation: int) -> bool:
    current = draft.state.generation
    return (
        current is not None and current.number == generation and member in current.member_set and member in draft.ready
    )


def _still_before(draft: _Draft, member: str, generation: int) -> bool:
    """Return whether a member may still step in an earlier generation. Until a planned generation is formed, its
    members do so, and so do those that it leaves out."""
    state = draft.state
    current = state.generation
    planned = current is not None and not current.urgent and not state.formed
    return planned and generation < state.number and member in draft.ready


def _still_needed(draft: _Draft, member: str) -> bool:
    """Return whether the members of a planned generation may be waiting for this member, at the boundary before the
    generation. If the generation leaves the member out, and the member has just left at that boundary, the generation
    forms within the grace and nothing is aborted."""
    current, previous = draft.state.generation, draft.state.previous
    if current is None or previous is None or current.urgent or draft.state.formed:
        return False
    return member in previous.member_set and member in draft.ready


def _note_cuts(state: State, member: str, peers: tuple[str, ...], now: float) -> State:
    """Remember which nodes are cut from each other. The kernel has said so: that needs no second try."""
    seen = {(a, b): at for at, a, b in state.apart if now < at + APART_S}
    node, others = node_of(member), {node_of(p) for p in peers}
    seen |= {(min(node, other), max(node, other)): now for other in others - {node}}
    return replace(state, apart=tuple(sorted((at, a, b) for (a, b), at in seen.items())))


def _note_trouble(draft: _Draft, member: str, generation: int, peers: tuple[str, ...]) -> None:
    """Remember which members cannot talk to each other, once per generation. A peer that has reported trouble itself
    has given up its connections, so its silence says nothing about the link to it. Links between nodes that are kept
    apart are not counted: those nodes do not go on together in any case."""
    apart = {frozenset(pair) for _, *pair in draft.state.apart}
    suspects = [p for p in peers if p in draft.ready and p != member and p not in draft.troubled]
    accused = [p for p in suspects if frozenset((node_of(member), node_of(p))) not in apart]
    draft.add_broken((generation, min(member, p), max(member, p)) for p in accused)
    draft.troubled[member] = None


def _advance(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """Return the state and the actions that follow from the state as it now is."""
    current = state.generation
    if current and _everyone_arrived(state, current):
        version = max(v for _, v in state.finished)
        return replace(state, done=True), (Done(version),)

    lost = current is not None and not current.member_set.issubset(state.ready)
    reform = state.trouble_at is not None and now >= state.trouble_at + state.limits.trouble_grace_s
    reform = reform or (current is not None and state.paused != "")  # all members have aborted what they did in it
    if current is None or lost or reform or (state.formed and state.trouble_at is None):
        state, actions = _propose(state, now, reform)
        if actions:
            return state, actions
    current = state.generation
    if current and not state.formed and not state.paused and len(state.reports) == len(current.members):
        return _form(state, current, now)
    return state, ()


def _everyone_arrived(state: State, current: Generation) -> bool:
    """Return whether every member has finished in this very generation. To have finished in an earlier one does not
    count, because the rank that was to write the last line and save the result may have died since."""
    if not state.formed or len(state.arrived) < len(current.members):
        return False
    return current.member_set.issubset(state.arrived) and current.member_set.issubset(m for m, _ in state.finished)


def _propose(state: State, now: float, reform: bool) -> tuple[State, tuple[Action, ...]]:
    """Ask `decide` for the membership. Announce a new generation, pause, or leave everything as it is."""
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
        why=state.trouble_why,
        leaving=frozenset(state.leaving),
        slow=_to_be_replaced(state, now),
        gathering=state.leaving_at is not None and now < state.leaving_at + LEAVING_S,
        first_ready_at=state.first_ready_at,
        veterans=frozenset({*state.veterans, *(m for m, report in state.reports if report.version >= 0)}),
        apart=apart,
        unheard=_unheard(state, apart),
        heard_out=state.trouble_at is None or now >= state.trouble_at + HEARING_S,
        stateless=frozenset(state.stateless if _others_may_come(state, now) else ()),
        waited=bool(state.paused or state.stateless),
        held=_held(state) if state.limits.shards > 1 else {},
        unable=frozenset(state.unable),
        hopes=state.split_at is None or now < state.split_at + state.limits.join_timeout_s,
    )
    outcome = decide(now, view, state.limits)
    if not isinstance(outcome, Form):
        lost = state.generation is not None and not state.generation.member_set.issubset(state.ready)
        stands = state.generation is not None and not lost and not reform
        if isinstance(outcome, Pause) and outcome.reason != state.paused and not stands:
            split_at = state.split_at if state.split_at is not None or not outcome.split else now
            return replace(state, paused=outcome.reason, split_at=split_at), (outcome,)
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
        trouble_why="",
        replaced_at=state.replaced_at if generation.member_set.issuperset(view.slow) else now,
    )
    return state, (Announce(generation),)


def _to_be_replaced(state: State, now: float) -> tuple[str, ...]:
    """Return the slow members of which one may be replaced now, and not soon after another one."""
    recent = state.replaced_at is not None and now < state.replaced_at + REPLACED_S
    if recent or state.generation is None or state.limits.shards > 1:
        return ()
    return tuple(member for member in state.slow if member in state.generation.member_set)


def _held(state: State) -> dict[str, int]:
    """Return the shard that each member holds: the one that it reports, or else the one that its generation gave it."""
    given = state.generation.shard_of if state.generation is not None else {}
    return given | {member: report.shard for member, report in state.reports if report.version >= 0}


def _unheard(state: State, apart: frozenset[frozenset[str]]) -> frozenset[str]:
    """Return the nodes of the generation in trouble that are cut from others in it, and have said nothing themselves.
    Perhaps they are cut from everything, the store included. A member that has finished counts as heard: it exchanges
    nothing, and has no trouble to report."""
    if state.generation is None or state.trouble_at is None:
        return frozenset()
    inside = {node_of(m) for m in state.generation.members}
    spoke = {node_of(m) for m in (*state.troubled, *dict(state.reports), *dict(state.finished))}
    return frozenset(node for pair in apart if pair <= inside for node in pair if node not in spoke)


def _others_may_come(state: State, now: float) -> bool:
    """Return whether it is too early to begin at zero. Nobody here has a checkpoint, but other nodes may have one."""
    return state.stateless_at is None or now < state.stateless_at + state.limits.join_timeout_s


def _form(state: State, generation: Generation, now: float) -> tuple[State, tuple[Action, ...]]:
    """Publish the digest of a generation whose members have all reported, or propose another generation."""
    if generation.shards and scattered(generation, dict(state.reports), state.lineage):
        return _propose(state, now, True)
    digest, reason = reconcile(
        generation,
        dict(state.reports),
        born=state.born,
        lineage=state.lineage,
        from_step=state.from_step,
        doubts=state.doubts,
    )
    alone = all(node_of(m) == "" for m in generation.members)
    # A checkpoint was saved, and nobody here can read it: nodes that can must have the time to come. A run on one
    # machine waits for nobody.
    begins = any(source.kind == "init" for source in digest.sources.values())
    if begins and state.saved and not alone and _others_may_come(state, now):
        stateless_at = now if state.stateless_at is None else state.stateless_at
        stateless = tuple(dict.fromkeys((*state.stateless, *generation.members)))
        return _propose(replace(state, stateless=stateless, stateless_at=stateless_at), now, True)
    slot = declined_by_all(generation, dict(state.reports), digest.version)
    # A slot for which no member has the memory waits for those that are missing. A worker that is the only one tries
    # again, and ends if it fails: the next one has all the memory to itself.
    if slot is not None and len(generation.members) < state.limits.target:
        return _propose(replace(state, unable=generation.members), now, True)
    if slot is not None and len(generation.members) > 1:
        return replace(state, done=True), (Poison(digest.version, slot, generation.members, FOR_MEMORY),)
    # Steps that the run has passed are not done again, so their deadlines no longer matter.
    overdue = tuple(pair for pair in state.overdue if pair[0] >= digest.version)
    digest = replace(digest, overdue=overdue, omissions=state.omissions)
    state = replace(
        state,
        formed=True,
        ever_formed=True,
        veterans=tuple(m for m in generation.members if digest.sources[m].kind != "state"),
        finished=tuple(each for each in state.finished if each[0] not in digest.sources or each[1] == digest.version),
        born=state.born or digest.version > 0,
        reports=(),
        # every member has reached the boundary, so a failure before it no longer matters
        trouble_at=state.trouble_at if state.trouble_in == generation.number else None,
        lineage=digest.lineage,
        from_step=digest.from_step,
        overdue=digest.overdue,
        stateless=(),
        stateless_at=None,
        unable=(),
        split_at=None,
    )
    return state, (Publish(digest, reason),)
