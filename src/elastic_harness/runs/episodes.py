"""What went wrong in a run, from its events: the first cause first, what followed from it, and what it cost. Pure.

An episode begins with a failure and ends with the next commit of a step that was not committed before. What follows
from a failure is known only where the events say so: a worker that waited for one that hangs, an exchange with a peer
that died, a rollback for a worker that was sent away. Everything else stands for itself, in the order of time.
"""

from __future__ import annotations

import heapq
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_harness.incidents import table
from elastic_harness.incidents.code import Code
from elastic_harness.incidents.naming import is_alarm, of_event

SECONDS_MAX = 1e11  # the year 5138
HEALTHY_STEPS = 32  # before an episode: their median says how long a step takes
UNSETTLED = 8  # the newest episodes, to which something may still be added
Event = Mapping[str, Any]
TimedEvent = tuple[float, str, Event]
"""Time, node, event."""

_OF_A_WORKER = {"failure_detected", "evicted"}
_IN_A_STEP = _OF_A_WORKER | {"exchange_broke"}
"""Their step is one that was not committed then, as far as the one who tells of them knew."""
_OF_AN_END = _OF_A_WORKER | {"hang", "incident", "recheck"}
"""With a member they tell of its end, which it has only once. All others may be told of a member again and again."""
_INTERRUPTING = _OF_A_WORKER | {
    "exchange_broke", "hang", "peers_lost", "rollback", "rollback_decided", "run_cut_off", "slot_declined",
}  # fmt: skip
_OF_PEERS = {table.EXCHANGE_BROKE, table.PEERS_LOST}
_WORKER = re.compile(r"worker (\S+) ")


@dataclass
class Failure:
    """One thing that went wrong."""

    t: float
    code: Code
    event: str  # that told of it first
    what: str  # in words
    member: str | None = None
    node: str | None = None  # whose log has it, if there are several
    step: int | None = None
    slot: int | None = None
    evidence: tuple[str, ...] = ()
    done: str = ""
    log: str = ""
    times: int = 1  # that the same was told
    consequences: list[Failure] = field(default_factory=list)
    peers: frozenset[str] = frozenset()  # other members and nodes that it is about
    reason: str = ""  # word for word, by which events that tell of one matter are known

    @property
    def ends_nothing(self) -> bool:
        """Whether nothing ends because of it, and no other failure follows from it."""
        return is_alarm(self.code)

    @property
    def codes(self) -> list[Code]:
        """Its code, and those of all that followed from it."""
        return [self.code, *(code for each in self.consequences for code in each.codes)]


@dataclass
class Episode:
    """Failures until a new step was committed."""

    failures: list[Failure]  # first causes, the first one first
    interrupted: bool = False  # whether training waited for it
    world_before: int = 0
    gap_s: float | None = None  # between the new steps before and after it, without the time between launches
    cost_s: float | None = None  # by which the next new step came later; None: not known, or nobody waited
    redone_steps: int = 0  # that were committed again
    restored_version: int | None = None  # to which all members went back
    over_at: float | None = None  # when the next new step was committed; None: none was
    over_step: int | None = None

    @property
    def began_at(self) -> float:
        return self.first.t

    @property
    def first(self) -> Failure:
        """The first cause of what followed. One that ends nothing is that only if there is no other."""
        return next((failure for failure in self.failures if not failure.ends_nothing), self.failures[0])


@dataclass(frozen=True, slots=True)
class NewStep:
    """A step that was committed for the first time."""

    t: float
    step: int
    step_s: float | None
    world_size: int
    tokens: int  # 0: not told


@dataclass
class Tale:
    """A run as its events tell it."""

    episodes: list[Episode] = field(default_factory=list)
    commits: list[NewStep] = field(default_factory=list)
    started_at: float | None = None
    newest_at: float | None = None
    run_id: str = ""
    launches: int = 0
    down_s: float = 0.0  # between a launch that failed, or was cut off, and the next one
    paused_s: float = 0.0  # between a launch that did what it was asked to, and the next one
    waiting: str = ""  # what for, if it waits for workers
    finished: Event | None = None  # the end of the newest launch

    @property
    def failures(self) -> list[Failure]:
        """All first causes."""
        return [failure for episode in self.episodes for failure in episode.failures]

    @property
    def healthy_s(self) -> float | None:
        """The median duration of a step."""
        known = [commit.step_s for commit in self.commits if commit.step_s]
        return statistics.median(known) if known else None


def in_order(logs: Mapping[str, Iterable[Event]], damaged: Callable[[str], object]) -> Iterator[TimedEvent]:
    """Yield the events of a run's nodes, whose logs are given by their names, in the order of time. `damaged` is called
    for each event that cannot be used."""
    return heapq.merge(*(_timed(node, events, damaged) for node, events in logs.items()), key=lambda each: each[0])


def tell(events: Iterable[TimedEvent], damaged: Callable[[str], object]) -> Tale:
    """Return the tale of a run. `damaged` is called for each event that cannot be used."""
    teller = Teller()
    for t, node, event in events:
        teller.take(t, node, event, damaged)
    return teller.told()


def _timed(node: str, events: Iterable[Event], damaged: Callable[[str], object]) -> Iterator[TimedEvent]:
    for event in events:
        t = _seconds(event.get("t"))
        if t is not None:
            yield t, node, event
        else:
            damaged(f"an event {event['event']!r} without a time")


def _seconds(value: object) -> float | None:
    """Return a duration, or a time since 1970, in seconds; None if it is none."""
    return float(value) if isinstance(value, int | float) and 0 <= value < SECONDS_MAX else None


class Teller:
    """Takes events in the order of time, and tells the tale so far at any moment."""

    def __init__(self) -> None:
        self.tale = Tale()  # as it was taken: its failures stand side by side
        self._settled: list[Episode] = []  # the oldest episodes, arranged: nothing is added to them any more
        self._open: Episode | None = None
        self._farthest, self._newest = -1, (-1, -1)  # the newest commit: lineage, step
        self._world = 0
        self._members: list[frozenset[str]] = []  # of the newest two generations
        self._down_since: float | None = None
        self._down_s = 0.0  # since the newest commit
        self._live: set[str] = set()  # nodes whose launch has not ended
        self._by_member: dict[str, Failure] = {}  # ends of workers
        self._asked: Failure | None = None  # that this node goes, since it was launched

    def take(self, t: float, node: str, event: Event, damaged: Callable[[str], object]) -> None:
        """Take one event. `damaged` is called if it cannot be used."""
        try:
            self._take(t, node, event)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            damaged(f"an event {event['event']!r} with other fields than its kind has ({error!r})")

    def told(self) -> Tale:
        """Return the tale so far, with all that followed from a first cause below it. More events may be taken."""
        healthy_s = self.tale.healthy_s
        settled = len(self.tale.episodes) - UNSETTLED
        for episode in self.tale.episodes[len(self._settled) : max(0, settled)]:
            self._settled.append(_arranged(episode, healthy_s))
        open_ones = self.tale.episodes[len(self._settled) :]
        return replace(self.tale, episodes=[*self._settled, *(_arranged(each, healthy_s) for each in open_ones)])

    def thin(self, commits_max: int) -> None:
        """Drop every second of the older commits, if there are more than so many: for who follows a run for weeks. The
        first one, and those that the next failure is compared with, stay."""
        commits = self.tale.commits
        if len(commits) > commits_max:
            commits[1:-HEALTHY_STEPS] = commits[1:-HEALTHY_STEPS:2]

    def _take(self, t: float, node: str, event: Event) -> None:
        tale, name = self.tale, event["event"]
        tale.newest_at = t
        if name == "run_started":
            self._start(t, node, event)
        elif name == "generation":
            members = frozenset(map(str, event["members"]))
            self._members, tale.waiting = [*self._members[-1:], members], ""
        elif name == "waiting":
            tale.waiting = str(event.get("reason") or "")
        elif name == "worker_joined" and event.get("source") == "restore" and self._open is not None:
            self._open.restored_version = int(event["version"])
        code = of_event(event)
        if name == "incident":
            self._complete(t, node, event, code)
        elif code is not None:
            self._fail(t, node, event, code)
        if name == "step_committed":
            self._commit(t, event)
        elif name == "run_finished":
            self._live.discard(node)
            tale.finished = event
            if not self._live:
                self._down_since = t

    def _start(self, t: float, node: str, event: Event) -> None:
        tale = self.tale
        tale.started_at = t if tale.started_at is None else tale.started_at
        tale.run_id = tale.run_id or str(event.get("run_id") or "")
        tale.launches += 1
        if not self._live and self._down_since is not None:
            away_s = t - self._down_since
            self._down_s += away_s
            if tale.finished is None or tale.finished.get("status") == "failed":
                tale.down_s += away_s
            else:
                tale.paused_s += away_s
        self._down_since = None
        self._live.add(node)
        tale.finished, self._asked = None, None

    def _commit(self, t: float, event: Event) -> None:
        tale, step, step_s = self.tale, int(event["step"]), _seconds(event.get("step_s"))
        world, tokens = int(event.get("world_size") or 0), int(event.get("tokens") or 0)
        commit = int(event.get("lineage") or 0), step
        if commit <= self._newest:  # another node tells of it as well
            return
        self._newest, self._world = commit, world
        if step <= self._farthest:
            if self._open is not None:
                self._open.redone_steps += 1
            return
        if self._open is not None and not self._was_before(self._open, step):
            self._close(self._open, t, step)
            self._open = None
        tale.commits.append(NewStep(t, step, step_s, world, tokens))
        self._farthest, self._down_s = step, 0.0

    @staticmethod
    def _was_before(episode: Episode, step: int) -> bool:
        """Whether a step is one before those in which workers ended, or an exchange broke: its commit is told late."""
        return any(f.step is not None and step < f.step for f in every(episode.failures) if f.event in _IN_A_STEP)

    def _close(self, episode: Episode, t: float, step: int) -> None:
        episode.over_at, episode.over_step = t, step
        before = [commit.step_s for commit in self.tale.commits[-HEALTHY_STEPS:] if commit.step_s]
        if episode.interrupted and self.tale.commits:
            episode.gap_s = t - self.tale.commits[-1].t - self._down_s
            episode.cost_s = max(0.0, episode.gap_s - statistics.median(before)) if before else None

    # ---- failures

    def _fail(self, t: float, node: str, event: Event, code: Code) -> None:
        name = event["event"]
        failure = _failure(t, node, event, code)
        if name == "run_cut_off":
            failure.t = _seconds(event.get("at")) or t
            if self._down_since is None:
                self._down_since = failure.t
            self._live.discard(node)
        known = self._known(failure)
        if known is not None:
            _merge(known, failure)
            if self._open is not None and any(known is each for each in every(self._open.failures)):
                self._open.interrupted |= self._interrupts(name, failure)
            return
        if failure.code is table.STOPPED_ON_REQUEST and self._asked is not None:
            self._asked.consequences.append(failure)
            return
        if failure.code in _OF_PEERS and self._open is None:  # told after a commit that was told late itself
            blamed = next((self._by_member[peer] for peer in failure.peers if peer in self._by_member), None)
            if blamed is not None:
                blamed.consequences.append(failure)
                return
        if name == "drain":
            self._asked = failure
        episode = self._note(failure)
        episode.interrupted |= self._interrupts(name, failure)
        if failure.member is not None and name in _OF_AN_END:
            self._by_member[failure.member] = failure

    def _interrupts(self, name: str, failure: Failure) -> bool:
        if name in _OF_A_WORKER and self._members:
            return any(failure.member in members for members in self._members)
        return name in _INTERRUPTING

    def _known(self, failure: Failure) -> Failure | None:
        """Return the failure that this one is once more."""
        if failure.member is not None and failure.event in _OF_AN_END:
            return self._by_member.get(failure.member)
        newest = self.tale.episodes[-1].failures if self.tale.episodes else []
        alike = [f for f in every(newest) if f.code is failure.code and f.member == failure.member]
        if failure.event == "peers_lost":  # every other node tells of it
            return next((f for f in alike if f.peers == failure.peers), None)
        if failure.event == "run_finished" or failure.member is not None:
            alike = [f for f in alike if f.event == failure.event]
        elif failure.step is not None and failure.code.family == "N":  # a row of steps is one failure
            return next((f for f in alike if f.step is not None and 0 <= failure.step - f.step <= f.times), None)
        return alike[0] if alike and self._open is not None else None

    def _note(self, failure: Failure) -> Episode:
        """Add a failure to the episode that goes on, or begin one. Return it."""
        newest = self.tale.episodes[-1] if self.tale.episodes else None
        late = failure.event in ("run_finished", "rollback")  # told after the step that was committed meanwhile
        if self._open is None and late and newest and self._reaches_to_now(newest):
            self._open = newest
        if self._open is None:
            self._open = Episode([], world_before=self._world)
            self.tale.episodes.append(self._open)
        self._open.failures.append(failure)
        return self._open

    def _reaches_to_now(self, episode: Episode) -> bool:
        """Whether nothing was committed since an episode, or only steps that are a part of it."""
        rows = [f.step + f.times - 1 for f in every(episode.failures) if f.step is not None and f.code.family == "N"]
        return self._farthest in (episode.over_step, *rows)

    def _complete(self, t: float, node: str, event: Event, code: Code | None) -> None:
        """Add what an incident says to the failure that it is about."""
        what = str(event.get("what") or "")
        member = event.get("member")
        if "member" not in event and (found := _WORKER.match(what)):  # as earlier versions wrote it
            member = found[1]
        known = self._by_member.get(str(member)) if member is not None else None
        code = code or (known.code if known is not None else None)
        if code is None:
            return
        failure = _failure(t, node, {**event, "member": member}, code)
        known = known or self._known(failure)
        if known is None:
            self._fail(t, node, {**event, "member": member}, code)
            return
        known.code, known.what = code, what or known.what
        known.evidence = failure.evidence or known.evidence
        known.done, known.log = failure.done or known.done, failure.log or known.log
        known.step = known.step if known.step is not None else failure.step
        known.slot = known.slot if known.slot is not None else failure.slot


def _failure(t: float, node: str, event: Event, code: Code) -> Failure:
    name, member = event["event"], event.get("member")
    step, slot = event.get("step"), event.get("slot")
    if name == "hang":
        members = event.get("culprits") or []
        member = members[0]["members"][0] if members else (event.get("members") or [None])[0]
    elif name == "recheck":
        member = next(iter(event.get("ill") or ()), None)
    evidence = event.get("evidence") or ()
    told = (str(line) for line in evidence) if isinstance(evidence, list | tuple) else [str(evidence)]
    at = _seconds(event.get("t_detected")) if name == "failure_detected" else None
    return Failure(
        t=t if at is None else at,
        code=code,
        event=name,
        what=_in_words(name, event),
        member=None if member is None else str(member),
        node=node or None,
        step=step if isinstance(step, int) and step >= 0 else None,
        slot=slot if isinstance(slot, int) else None,
        evidence=tuple(told),
        done=str(event.get("done") or ""),
        log=str(event.get("log") or ""),
        reason=_reason(name, event),
        peers=_peers(name, event),
    )


def _peers(name: str, event: Event) -> frozenset[str]:
    match name:
        case "exchange_broke":
            return frozenset(map(str, event.get("peers") or ()))
        case "peers_lost":
            return frozenset({str(event.get("node")), *map(str, event.get("members") or ())})
        case "unreachable":
            return frozenset({str(event.get("node")), str(event.get("peer"))})
    return frozenset()


def _reason(name: str, event: Event) -> str:
    if name == "rollback_decided":
        return _in_words(name, event)
    return str(event.get("error" if name == "exchange_broke" else "reason") or "")


def _in_words(name: str, event: Event) -> str:
    """Return an event as a sentence."""
    match name:
        case "failure_detected":
            return f"worker {event.get('member')}: {event.get('what')}"
        case "exchange_broke":
            waited = ", ".join(map(str, event.get("peers") or ())) or "nobody in particular"
            return f"worker {event.get('member')} could not exchange with {waited}: {event.get('error')}"
        case "hang":
            return "; ".join(map(str, event.get("why") or ())) or f"{event.get('members')} hang"
        case "evicted":
            return f"worker {event.get('member')} was sent away: {event.get('reason')}"
        case "rollback":
            return f"the run goes back to version {event.get('to')} or before: {event.get('reason')}"
        case "rollback_decided":
            return f"in step {event.get('step')} {event.get('reason')}"
        case "recheck":
            return f"{event.get('what')} of step {event.get('step')} were computed again: {event.get('outcome')}"
        case "run_finished":
            return str(event.get("message") or event.get("status"))
        case "run_cut_off":
            return "the log ends here without a last word; the next launch began later"
        case "step_committed":
            decisions = event.get("decisions") or ()
            reasons = "; ".join(str(decision.get("reason")) for decision in decisions)
            return f"step {event.get('step')}: {reasons}"
        case "unreachable":
            return f"node {event.get('node')} cannot reach node {event.get('peer')} at {event.get('way')}"
        case "drain":
            return f"{event.get('source')}: {event.get('why')}"
        case "drained":
            return str(event.get("how"))
        case "peers_lost":
            return (
                f"{', '.join(map(str, event.get('members') or ()))} of node {event.get('node')}: {event.get('reason')}"
            )
        case "damaged_lines":
            return f"{event.get('count')} damaged lines, the first: {event.get('first')}"
    said = event.get("what") or event.get("message") or event.get("error") or event.get("reason")
    return str(said or event.get("repaired") or event.get("where") or name.replace("_", " "))


def every(failures: Iterable[Failure]) -> Iterator[Failure]:
    """Yield failures, each before what followed from it."""
    for failure in failures:
        yield failure
        yield from every(failure.consequences)


def _merge(known: Failure, again: Failure) -> None:
    """Take what another event says of the same failure."""
    if known.step is not None and again.step is not None and known.code.family == "N":
        known.times = max(known.times, again.step - known.step + 1)
    elif again.event == known.event:
        known.times += 1
    known.step = known.step if known.step is not None else again.step
    known.evidence = known.evidence or again.evidence
    known.reason = known.reason or again.reason


_OF_A_SLOT = {table.SLOT_FAILED, table.OVERDUE, table.OUT_OF_MEMORY}
_HANGS = {table.STANDS_STILL, table.STOPPED, table.OVERDUE, table.DEADLOCK}


def _arranged(episode: Episode, healthy_s: float | None) -> Episode:
    """Return an episode with what followed from a failure below it."""
    cost_s = episode.cost_s
    if cost_s is None and episode.gap_s is not None and healthy_s is not None:  # no step was timed before
        cost_s = max(0.0, episode.gap_s - healthy_s)
    return replace(episode, failures=_by_cause(list(map(_copied, episode.failures))), cost_s=cost_s)


def _copied(failure: Failure) -> Failure:
    return replace(failure, consequences=list(map(_copied, failure.consequences)))


def _by_cause(failures: Sequence[Failure]) -> list[Failure]:
    """Return the first causes among failures, which are given in the order of time, with all that followed below
    them."""
    causes: dict[int, int] = {}  # of failures, by their numbers
    for number, failure in enumerate(failures):
        for other, cause in enumerate(failures):
            if _first(other, causes) != number and _follows(failure, cause):
                causes[number] = other
                break
    for number in causes:
        failures[_first(number, causes)].consequences.append(failures[number])
    return [failure for number, failure in enumerate(failures) if number not in causes]


def _first(number: int, causes: Mapping[int, int]) -> int:
    """Return the first cause of a failure, over all between."""
    while number in causes:
        number = causes[number]
    return number


def _follows(failure: Failure, cause: Failure) -> bool:
    """Whether the events say that one failure is a consequence of another."""
    if cause.ends_nothing:
        return False
    if failure.code is table.WAITED_IN_VAIN:
        return cause.code in _HANGS
    if failure.code is table.EXCHANGE_BROKE:
        refused = failure.reason != "" and failure.reason == cause.reason and cause.event != "exchange_broke"
        unnamed = not failure.peers and cause.event in _OF_A_WORKER  # it broke under everybody who was in it
        named = cause.member in failure.peers or cause.code in (table.UNREACHABLE, table.LOOP_LEFT)
        return named or unnamed or refused
    if failure.code is table.PEERS_LOST:
        return cause.member in failure.peers or (cause.code is table.UNREACHABLE and bool(cause.peers & failure.peers))
    if failure.code is table.IN_DOUBT:
        return cause.code in (table.OTHER_BITS, table.OTHER_SAMPLES)
    if failure.code is table.WAITING:
        return cause.code is not table.WAITING
    if failure.code is table.DRAINED_LATE:
        return cause.code.family == "P"
    if failure.code is cause.code and failure.code in _OF_A_SLOT:  # which another worker has computed as well
        return failure.slot is not None and (failure.step, failure.slot) == (cause.step, cause.slot)
    if failure.code is table.LOOP_LEFT:
        return False
    return failure.event == "run_finished"
